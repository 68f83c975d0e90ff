"""What `headstart eval` is asked for on the command line, as overrides of the recipe: drafters, trees and prompts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import UserError

FORMS = "chain:DEPTH, dynamic:DEPTH,TOP_K,NODES or static:FILE.json"


def overrides(drafters: Sequence[str], trees: Sequence[str], prompts: Sequence[Path]) -> list[str]:
    """Each list that is given replaces the recipe's."""
    given: dict[str, list[Any]] = {
        "drafters": list(drafters),
        "trees": [parse_tree(text) for text in trees],
        "prompt_files": [str(path) for path in prompts],
    }
    return [f"evaluation.{name}={json.dumps(value)}" for name, value in given.items() if value]


def parse_tree(text: str) -> dict[str, Any]:
    """`chain:5`, `dynamic:5,10,64` or `static:FILE.json` as recipes write it. Raises UserError."""
    kind, _, rest = text.partition(":")
    if kind == "static" and rest:
        return {"kind": "static", "paths": read_paths(Path(rest))}
    names = {"chain": ["depth"], "dynamic": ["depth", "top_k", "nodes"]}.get(kind, [])
    numbers = rest.split(",")
    if not names or len(numbers) != len(names) or not all(number.isdecimal() for number in numbers):
        raise UserError(f"--tree {text}: must be {FORMS}")
    return {"kind": kind} | {name: int(number) for name, number in zip(names, numbers, strict=True)}


def read_paths(path: Path) -> Any:
    """The paths of a file: a list of them, or what `headstart tree --output` writes."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--tree static:{path}: {error.strerror}") from None
    except ValueError:
        raise UserError(
            f"--tree static:{path}: not JSON; a list of paths of child ranks is needed, such as [[0], [1], [0, 0]]"
        ) from None
    return found.get("paths") if isinstance(found, dict) else found
