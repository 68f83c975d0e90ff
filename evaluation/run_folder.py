"""A run folder as the report reads it: recipe.yaml, metrics.jsonl and evaluation.json, checked against what they must hold."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import UserError
from .analysis_file import Analysis
from .plots import elide

WRITERS = {
    "recipe.yaml": "a run folder has one: `headstart train` writes it",
    "metrics.jsonl": "`headstart train` writes it",
    "evaluation.json": "`headstart eval` writes it",
}
REMEDIES = WRITERS | {"analysis.json": "`headstart analyse` writes it", "provenance.json": "`headstart train` writes it"}


class Model(BaseModel):
    model_config = ConfigDict(frozen=True)


Parsed = TypeVar("Parsed", bound=BaseModel)


class HeldOut(Model):
    tau: float | None = None
    alpha: float | None = None
    kl: float | None = None


class Step(Model):
    """A line of metrics.jsonl."""

    step: int
    loss: float | None = None
    loss_by_depth: list[float] = []
    accuracy_by_depth: list[float] | None = None
    supervised_tokens: int = 0
    seconds: float = 0.0
    time_shares: dict[str, float] = {}
    held_out: HeldOut | None = None


class Origin(Model):
    """A verifier, by the hash of its weights."""

    name: str
    fingerprint: str


class Data(Model):
    samples: int
    tokens: int
    supervised: int
    sha256: str


class MadeWith(Model):
    """What decoding must find again; absent where the run is older than this."""

    layers: list[int]
    vocabulary: str
    config: dict[str, Any]


class Provenance(Model):
    """What a head was made of and trained on: provenance.json."""

    verifier: Origin
    template: str
    data: Data
    head: MadeWith | None = None


class Tree(Model):
    kind: str
    depth: int
    nodes: int
    top_k: int | None = None

    def __str__(self) -> str:
        width = f", top_k {self.top_k}" if self.top_k else ""
        return f"{self.kind}, depth {self.depth}" + ("" if self.kind == "chain" else f"{width}, {self.nodes} nodes")


class Slice(Model):
    tau: float | None
    rounds: int
    emitted: int


class Token(Model):
    text: str
    source: Literal["drafted", "bonus", "prefill"]
    round: int


class Example(Model):
    id: str
    category: str | None = None
    prompt: str
    tokens: Annotated[list[Token], Field(min_length=1)]

    @property
    def rounds(self) -> int:
        return max(token.round for token in self.tokens)

    @property
    def emitted(self) -> int:
        return sum(token.source != "prefill" for token in self.tokens)


class Divergence(Model):
    prompt: str
    position: int
    gap: float


class Timing(Model):
    prompts: int
    repeats: int
    batch: int


class Result(Model):
    """One drafter and tree at one temperature; names as in evaluation.json."""

    drafter: str = "head"
    tree: Tree
    temperature: float
    rule: str = "greedy"
    lossless: bool = True
    rounds: int
    emitted: int
    drafted: int
    accepted: int
    tau: float | None
    survival: list[float | None]
    conditional: list[float | None] | None = None
    draft_acceptance_rate: float | None = None
    alpha: float | None = None
    identical_to_greedy: bool | None = None
    divergences: list[Divergence] = []
    speedup: float | None = None
    overhead: float | None = None
    seconds: dict[str, float | None] = {}
    timing: Timing | None = None
    accepted_histogram: list[int] = []
    by_category: dict[str, Slice] = {}
    by_context: dict[str, Slice] = {}
    example: Example | None = None

    @property
    def label(self) -> str:
        drafter = "" if self.drafter == "head" else f"{self.drafter}, "
        return f"{drafter}{self.tree}" + (f", T {self.chosen}" if self.temperature else "")

    @property
    def chosen(self) -> str:
        """How tokens were chosen: the temperature, and above 0 the rule."""
        rule = f", {self.rule}" if self.temperature else ""
        return f"{self.temperature:g}{rule}{'' if self.lossless else ' (lossy)'}"


class Head(Model):
    kind: str
    parameters: int


class Quality(Model):
    """A verifier's, on held-out answers. kl: to the verifier without its adapter, in nats a token."""

    perplexity: float
    kl: float


class VerifierQuality(Model):
    """Without and with the adapter that it learned beside the head."""

    tokens: int
    before: Quality
    after: Quality


class Evaluation(Model):
    verifier: str
    adapter: str | None = None
    verifier_quality: VerifierQuality | None = None
    head: Head
    prompts: int
    max_new_tokens: int
    dtype: str
    device: str
    versions: dict[str, str] = {}
    results: Annotated[list[Result], Field(min_length=1)]


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
    path = folder / "provenance.json"
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
