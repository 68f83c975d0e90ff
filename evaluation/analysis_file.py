"""analysis.json: what `headstart analyse` writes into a run folder and the report shows."""

from pydantic import BaseModel


class Stage(BaseModel, frozen=True):
    """A held-out look during training."""

    step: int
    alpha: float
    kl: float
    tau: float | None


class Stages(BaseModel, frozen=True):
    """spearman: rank correlation of alpha with kl over the looks, and p its two-sided p-value; null below three looks."""

    looks: list[Stage]
    spearman: float | None
    p: float | None


class Curve(BaseModel, frozen=True):
    """Chains of N = 0, 1, .. drafts under independent acceptance. tokens: expected a verifier pass; speedup: tokens / (1 + cost
    · N); best: the N of the highest speedup."""

    alpha: float
    tokens: list[float]
    speedup: list[float]
    best: int


class Measured(BaseModel, frozen=True):
    """A chain of evaluation.json. tokens: 1 + the first N terms of its survival."""

    drafter: str = "head"
    tree: str
    temperature: float
    tau: float
    tokens: list[float]

    @property
    def label(self) -> str:
        drafter = "" if self.drafter == "head" else f"{self.drafter}, "
        return f"{drafter}{self.tree}, T {self.temperature:g}"


class Lengths(BaseModel, frozen=True):
    """cost: of drafting one token with the head, in verifier passes; cost_is_measured: whether evaluation.json's times say
    so."""

    cost: float
    cost_is_measured: bool
    curves: list[Curve]
    measured: list[Measured]


class Depth(BaseModel, frozen=True):
    """labels: tokens of the answers that decoding would draft at this depth; in_vocabulary: those the head can draft at all;
    accuracy[k]: share of all labels among the head's k + 1 likeliest tokens."""

    labels: int
    in_vocabulary: int
    accuracy: list[float | None]


class Part(BaseModel, frozen=True):
    tau: float | None
    rounds: int
    emitted: int


class Analysis(BaseModel, frozen=True):
    stages: Stages
    lengths: Lengths
    top_k: list[Depth]
    by_category: dict[str, Part]
    by_context: dict[str, Part]
