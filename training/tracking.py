"""metrics.jsonl: one object a logged step, complete whatever else fails."""

import json
import os
from pathlib import Path
from typing import Any


class Metrics:
    """Appends lines; on resume first drops what a killed run logged after its last checkpoint."""

    def __init__(self, path: Path, resumed_step: int = 0) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            return
        kept = b""
        for line in path.read_bytes().split(b"\n")[:-1]:
            if json.loads(line)["step"] > resumed_step:
                break
            kept += line + b"\n"
        os.truncate(path, len(kept))

    def log(self, step: int, **values: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
