"""evaluation.json: what `headstart eval` writes into a run folder, as the report and the model card read it."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field


class Tree(BaseModel, frozen=True):
    kind: str
    depth: int
    nodes: int
    top_k: int | None = None

    def __str__(self) -> str:
        width = f", top_k {self.top_k}" if self.top_k else ""
        return f"{self.kind}, depth {self.depth}" + ("" if self.kind == "chain" else f"{width}, {self.nodes} nodes")


class Slice(BaseModel, frozen=True):
    tau: float | None
    rounds: int
    emitted: int


class Token(BaseModel, frozen=True):
    text: str
    source: Literal["drafted", "bonus", "prefill"]
    round: int


class Example(BaseModel, frozen=True):
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


class Divergence(BaseModel, frozen=True):
    prompt: str
    position: int
    gap: float


class Timing(BaseModel, frozen=True):
    prompts: int
    repeats: int
    batch: int


class Result(BaseModel, frozen=True):
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


class Head(BaseModel, frozen=True):
    kind: str
    parameters: int


class Quality(BaseModel, frozen=True):
    """A verifier's, on held-out answers. kl: to the verifier without its adapter, in nats a token."""

    perplexity: float
    kl: float


class VerifierQuality(BaseModel, frozen=True):
    """Without and with the adapter that it learned beside the head."""

    tokens: int
    before: Quality
    after: Quality


class Evaluation(BaseModel, frozen=True):
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
