"""A run folder as the report reads it: recipe.yaml, metrics.jsonl and evaluation.json, checked against what they must hold."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from ..errors import UserError
from .analysis_file import Analysis
from .evaluation_file import Evaluation, Result
from .plots import elide
from .provenance_file import Provenance

PROVENANCE = "provenance.json"
WRITERS = {
    "recipe.yaml": "a run folder has one: `headstart train` writes it",
    "metrics.jsonl": "`headstart train` writes it",
    "evaluation.json": "`headstart eval` writes it",
}
REMEDIES = WRITERS | {"analysis.json": "`headstart analyse` writes it", PROVENANCE: "`headstart train` writes it"}


Parsed = TypeVar("Parsed", bound=BaseModel)


class HeldOut(BaseModel, frozen=True):
    tau: float | None = None
    alpha: float | None = None
    kl: float | None = None


class Step(BaseModel, frozen=True):
    """A line of metrics.jsonl."""

    step: int
    loss: float | None = None
    loss_by_depth: list[float] = []
    accuracy_by_depth: list[float] | None = None
    supervised_tokens: int = 0
    seconds: float = 0.0
    time_shares: dict[str, float] = {}
    held_out: HeldOut | None = None


@dataclass
class Run:
    """A run folder's content. label: the head's kind, with the folder where that is not enough."""

    folder: Path
    recipe: str
    metrics: list[Step]
    evaluation: Evaluation
    analysis: Analysis | None = None
    label: str = ""
    color: str = ""

    def legend(self, result: Result) -> str:
        return f"{elide(self.label, 22)} · {result.label}"

    @property
    def best(self) -> Result:
        """By tau; a lossy result or another drafter never stands for the run where there is a lossless one of the head."""
        return max(self.evaluation.results, key=lambda result: (result.drafter == "head", result.lossless, result.tau or 0.0))

    @property
    def steps(self) -> int:
        return max(line.step for line in self.metrics)

    @property
    def supervised_tokens(self) -> int:
        return sum(line.supervised_tokens for line in self.metrics)

    @property
    def seconds(self) -> float:
        """Wall time of training, pauses between its parts left out."""
        return max(line.seconds for line in self.metrics)

    @property
    def time_shares(self) -> str:
        """Where a training step's time went, the largest part first; empty where the lines do not say."""
        told = [line.time_shares for line in self.metrics if line.time_shares]
        means = {part: sum(shares.get(part, 0.0) for shares in told) / len(told) for part in (told[0] if told else {})}
        parts = sorted(means.items(), key=lambda item: -item[1])
        return ", ".join(f"{part} {share:.0%}" for part, share in parts if share >= 0.005)

    @property
    def fastest(self) -> Result:
        return max(
            self.evaluation.results, key=lambda result: (result.drafter == "head", result.lossless, result.speedup or 0.0)
        )


def read_run(folder: Path) -> Run:
    if not folder.is_dir():
        raise UserError(f"{folder}: no such run folder")
    recipe, metrics, evaluation = (read_text(folder / name) for name in WRITERS)
    analysis = folder / "analysis.json"
    return Run(
        folder,
        recipe,
        parse_steps(metrics, folder / "metrics.jsonl"),
        parse(Evaluation, evaluation, str(folder / "evaluation.json")),
        parse(Analysis, read_text(analysis), str(analysis)) if analysis.exists() else None,
    )


def read_provenance(folder: Path) -> Provenance | None:
    """None where the head was not trained here."""
    path = folder / PROVENANCE
    return parse(Provenance, read_text(path), str(path)) if path.exists() else None


def logged_accuracy(folder: Path) -> list[float]:
    """By depth, as training logged it last; empty where it did not."""
    path = folder / "metrics.jsonl"
    steps = parse_steps(read_text(path), path) if path.exists() else []
    return next((line.accuracy_by_depth for line in reversed(steps) if line.accuracy_by_depth is not None), [])


def parse_steps(text: str, path: Path) -> list[Step]:
    return [parse(Step, line, f"{path}:{number}") for number, line in enumerate(text.splitlines(), 1) if line.strip()]


def read_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; {REMEDIES[path.name]}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot read it: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text") from None
    if not text.strip():
        raise UserError(f"{path}: the file is empty; {REMEDIES[path.name]}")
    return text


def parse(model: type[Parsed], text: str, where: str) -> Parsed:
    try:
        return model.model_validate(json.loads(text))
    except json.JSONDecodeError as error:
        place = where if where.rpartition(":")[2].isdigit() else f"{where}:{error.lineno}"
        raise UserError(f"{place}: not JSON: {error.msg}") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        message = "must be a JSON object" if first["type"] == "model_type" else first["msg"]
        raise UserError(f"{where}: {key + ': ' if key else ''}{message}") from None
