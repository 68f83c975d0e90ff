"""A language model of its own as the drafter (Leviathan, Chen 2023): a smaller one of the same vocabulary, or the first layers
of the verifier itself.

Shapes: B rows, T tokens, M nodes of one tree level, Q columns: the ids that both models know.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..heads.batch import Batch, sent, shifted
from ..heads.cache import Ancestry
from ..heads.drafter import DraftSession, FreeDrafter
from ..heads.verifier import Features, Verifier


class ModelDrafter(FreeDrafter):
    """Raises UserError where the draft model writes other tokens than the verifier."""

    def __init__(self, model: Verifier, verifier: Verifier) -> None:
        check_vocabulary(model, verifier)
        self.model = model
        self.target_ids = torch.arange(min(model.facts.vocab_size, verifier.facts.vocab_size), device=verifier.device)

    def log_q(self, states: Tensor) -> Tensor:
        return self.model.logits(states)[..., : len(self.target_ids)].float().log_softmax(-1)

    def known(self, ids: Tensor) -> Tensor:
        """Ids that the model has embeddings for. (Of two models with one tokenizer one may pad its table with more rows.)"""
        return ids.clamp(max=self.model.facts.vocab_size - 1)

    @torch.no_grad()
    def first_draft(self, batch: Batch, features: Features, verifier: Verifier, where: Tensor) -> Tensor:
        states = self.model.features(self.known(batch.ids)).last
        return self.log_q(shifted(states, 1, 0.0)[where])  # the token t + 2 is drafted from the one before it

    def begin(self, verifier: Verifier, batch: int, capacity: int) -> "ModelSession":
        return ModelSession(self, batch, capacity)


def check_vocabulary(model: Verifier, verifier: Verifier) -> None:
    theirs, ours = model.facts.vocab_size, verifier.facts.vocab_size
    if model.tokenizer is None or verifier.tokenizer is None:
        if theirs != ours:
            raise UserError(f"draft model {model.name}: its vocabulary has {theirs} tokens, the verifier's {ours}; it must be "
                            "the same")  # fmt: skip
        return
    check_tokenizer(model.name, model.tokenizer, verifier.tokenizer)


def check_tokenizer(name: str, theirs: Any, ours: Any) -> None:
    """Raises UserError where the draft model's tokenizer is not the verifier's."""
    its, own = theirs.get_vocab(), ours.get_vocab()
    if its != own:
        token = min(t for t in {*its, *own} if its.get(t) != own.get(t))
        raise UserError(f"draft model {name}: its tokenizer is not the verifier's: {token!r} is {its.get(token)} there "
                        f"and {own.get(token)} here; it must be the same")  # fmt: skip


class ModelSession(DraftSession):
    """The model's own cache holds all committed tokens, the root too; a round's nodes are written behind them by level."""

    def __init__(self, drafter: ModelDrafter, batch: int, capacity: int) -> None:
        self.drafter, self.model = drafter, drafter.model
        self.cache = self.model.new_cache(batch, capacity + 1)
        self.first: Tensor | None = None  # [B]: the prompts' first tokens, which `observe` is not shown
        self.nodes = Ancestry(batch, self.model.device)

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        self.first = sent([prompt[0] for prompt in prompts], self.model.device)

    @torch.no_grad()
    def observe(self, features: Features, next_ids: Tensor, counts: list[int]) -> Tensor:
        ids, device = next_ids, next_ids.device
        if self.first is not None:
            ids, counts = torch.cat([self.first[:, None], ids], 1), [count + 1 for count in counts]
            self.first = None
        self.cache.pending = 0
        size = ids.shape[1]
        causal = torch.ones(1, size, size, dtype=torch.bool, device=device).tril()
        depth = torch.arange(size, device=device)[None]
        states = self.model.decode(self.drafter.known(ids), causal, depth, self.cache).last
        self.cache.advance(counts)
        self.nodes = Ancestry(len(counts), device)
        last = states[torch.arange(len(counts), device=device), sent(counts, device) - 1]
        return self.drafter.log_q(last)

    @torch.no_grad()
    def expand(self, ids: Tensor, parents: Tensor) -> Tensor:
        self.nodes.grow(parents)
        new = self.nodes.seen[:, -ids.shape[1] :]
        states = self.model.decode(self.drafter.known(ids), new, self.nodes.depths, self.cache).last
        self.cache.pending += ids.shape[1]
        return self.drafter.log_q(states)

    def keep_rows(self, rows: list[int]) -> None:
        self.cache.keep_rows(rows)
        self.first = None if self.first is None else self.first[rows]
