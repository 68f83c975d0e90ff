"""metrics.jsonl: one object a logged step, complete whatever else fails."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..heads.files import writing
from ..ranks import is_first

Report = Callable[[int, dict[str, Any]], None]  # is told of each line too


class Metrics:
    """Appends lines; on resume first drops what a killed run logged after its last checkpoint. The first process alone."""

    def __init__(self, path: Path, resumed_step: int = 0, report: Report = lambda step, values: None) -> None:
        self.path, self.report = path, report
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or not is_first():
            return
        kept = b""
        for line in path.read_bytes().split(b"\n")[:-1]:
            if json.loads(line)["step"] > resumed_step:
                break
            kept += line + b"\n"
        os.truncate(path, len(kept))

    def log(self, step: int, **values: Any) -> None:
        if not is_first():
            return
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        self.report(step, values)
