"""Why a head drafts one thing in training and another in decoding: faults are tried until one reproduces the difference.

Shapes: B texts, T tokens, Q columns of the head's vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..heads.base import DraftHead
from ..heads.layers import attend
from ..heads.recurrent import RecurrentHead
from ..heads.verifier import Features, Verifier
from .parity import Parting, Texts, apart

UNKNOWN = "unknown", "none of the known faults reproduces it"


@torch.no_grad()
def of_drafts(head: DraftHead, verifier: Verifier, texts: Texts, parting: Parting, tolerance: float) -> tuple[str, str]:
    """The cause of a parting of predictions, and how it shows."""

    def is_decoded(log_q: Tensor) -> bool:
        return not bool(apart(log_q, parting.decoded, tolerance))

    row, at, depth = parting.row, parting.at, parting.depth
    if bool(parting.trained.isnan().any()):
        note = "log q is not a number in training already: the head's weights, or the verifier's states, are too large"
        return UNKNOWN[0], note
    if not bool(apart(parting.trained.sort().values, parting.decoded.sort().values, tolerance)):
        return "vocabulary map", "the same probabilities stand in other columns"
    where = torch.zeros_like(texts.batch.mask)
    where[row] = True
    deepest = depth + 2 if head.depth is None else min(depth + 2, head.depth)
    predicted = predictions(head, verifier, texts, where, deepest)  # [T, Q] each
    for k, moved in ((depth, -1), (depth, 1), (depth - 1, 0), (depth + 1, 0)):
        inside = 0 <= k < len(predicted) and 0 <= at + moved < len(predicted[0])
        if inside and is_decoded(predicted[k][at + moved]):
            if moved:
                return "positions", f"decoding drafts from position {at + moved} where training drafts from {at}"
            return "positions", f"decoding drafts at depth {depth + 1} what training drafts at depth {k + 1}"
    where[row] = False
    where[row, at] = True
    for note, change in norm_faults(head):
        with change:
            if is_decoded(predictions(head, verifier, texts, where, depth + 1)[depth][0]):
                return "norm order", f"decoding is training {note}"
    if isinstance(head, RecurrentHead):
        return by_reference(head, verifier, texts, parting, tolerance)
    return UNKNOWN


def predictions(head: DraftHead, verifier: Verifier, texts: Texts, where: Tensor, depths: int) -> list[Tensor]:
    return head.predictions(texts.batch, texts.trained, verifier, where, depths)


def norm_faults(head: DraftHead) -> Iterator[tuple[str, Any]]:
    """Changes of a head that move or leave out a norm, as contexts."""
    norms = {name: module for name, module in head.named_modules() if isinstance(module, nn.RMSNorm)}
    for name, norm in norms.items():
        yield f"without {name}", replaced(norm, "forward", lambda x: x)
    if isinstance(head, RecurrentHead):
        yield "with the plain state handed to the next step", replaced(head, "feedback", lambda state: state)
        for name, norm in norms.items():
            yield f"with {name} before the next step", replaced(head, "feedback", norm.forward)


@contextmanager
def replaced(module: nn.Module, name: str, function: Any) -> Iterator[None]:
    """One instance's method, for a while."""
    setattr(module, name, function)
    try:
        yield
    finally:
        delattr(module, name)


def by_reference(
    head: RecurrentHead, verifier: Verifier, texts: Texts, parting: Parting, tolerance: float
) -> tuple[str, str]:  # fmt: skip
    """Draft once more from nothing but the head's parts, right and with a fault, and see which side is which."""
    right = reference(head, verifier, texts, parting)
    sides = [("decoding", parting.decoded)] if not bool(apart(right, parting.trained, tolerance)) else []
    sides += [("training", parting.trained)] if not bool(apart(right, parting.decoded, tolerance)) else []
    faults: list[tuple[str, str, dict[str, int]]] = [
        (cause, note.format(abs(by), "early" if by < 0 else "late"), {name: by})
        for cause, note, name in (
            ("positions", "gives drafted tokens positions {} too {}", "moved"),
            ("token shift", "embeds the token {} too {}", "token"),
            ("mask shift", "attends to committed tokens up to {} too {}", "seen"),
        )
        for by in (-1, 1)
    ]
    for side, log_q in sides:
        for cause, note, fault in faults:
            if not bool(apart(reference(head, verifier, texts, parting, **fault), log_q, tolerance)):
                return cause, f"{side} {note}"
    where = f"{sides[0][0]} is not what the head's parts give; " if len(sides) == 1 else ""
    return UNKNOWN[0], where + UNKNOWN[1]


@torch.no_grad()
def reference(
    head: RecurrentHead, verifier: Verifier, texts: Texts, parting: Parting, moved: int = 0, token: int = 0, seen: int = 0
) -> Tensor:
    """log q [Q] of drafting by its definition, from the states of training, without a cache and without a batch.

    moved: added to the positions of drafted tokens; token: to the index of every token embedded; seen: to the last committed
    position that is attended to.
    """
    ids, end = texts.batch.ids[parting.row][None], parting.at + 1
    known = texts.trained
    row = slice(parting.row, parting.row + 1)
    source = head.source(Features(known.last[row], known.layers[row]))[:, : end + max(seen, 0)]
    attention = head.block.self_attn
    last = ids.shape[1] - 1

    def embed(index: Tensor) -> Tensor:
        return verifier.embed(ids[:, (index + 1 + token).clamp(0, last)]).float()

    index = torch.arange(source.shape[1], device=ids.device)
    residuals, inputs = head.join(embed(index), source)
    keys, values = attention.key_value(inputs, *head.rotary(index[None]))
    hidden = min(seen, 0)
    keys, values = keys[:, :, : keys.shape[2] + hidden], values[:, :, : values.shape[2] + hidden]
    residual, x, position = residuals[:, end - 1 : end], inputs[:, end - 1 : end], index[None, end - 1 : end]
    state = residual
    for k in range(parting.depth + 1):
        if k:
            position = torch.full_like(position, parting.at + k + moved)
            residual, x = head.join(embed(torch.tensor([parting.at + k], device=ids.device)), head.feedback(state))
            key, value = attention.key_value(x, *head.rotary(position))
            keys, values = torch.cat([keys, key], 2), torch.cat([values, value], 2)
        mask = residual.new_zeros(1, 1, 1, keys.shape[2])
        state = head.block.finish(residual, attend(attention.query(x, *head.rotary(position)), keys, values, mask))
    return head.log_q(state, verifier)[0, 0]


@torch.no_grad()
def of_states(
    verifier: Verifier, texts: Texts, row: int, at: int, layers: tuple[int, ...], tolerance: float
) -> tuple[str, str]:
    """The cause of a parting of the verifier's states, first seen at position `at` of a text, and how it shows."""
    end = int(texts.batch.lengths[row]) - 1
    ids = texts.batch.ids[row : row + 1, : end + 1]
    every = verifier.features(ids, range(verifier.facts.num_hidden_layers)).layers[0, :end]
    found = texts.decoded.layers[row, :end].chunk(max(len(layers), 1), -1)
    for layer, states in zip(layers, found, strict=bool(layers)):
        others = every.chunk(verifier.facts.num_hidden_layers, -1)
        same = [i for i, other in enumerate(others) if not bool(apart(other, states, tolerance).any())]
        if same and layer not in same:
            return "layer ids", f"decoding reads the states entering layer {same[0]}, training those entering layer {layer}"
    if normed_apart(texts.trained.last[row, :end].double(), texts.decoded.last[row, :end].double(), tolerance):
        return "norm order", "one side's last states are the other's before the verifier's final norm"
    if not at:
        return UNKNOWN
    cache = verifier.new_cache(1, at + 2)
    one = torch.ones(1, 1, 1, dtype=torch.bool, device=ids.device)
    verifier.prefill([ids[0, :at].tolist()], cache)
    for moved in (-1, 1):
        again = verifier.decode(ids[:, at : at + 1], one, torch.tensor([[moved]], device=ids.device), cache)
        if not bool(apart(again.last[0, 0], texts.decoded.last[row, at], tolerance)):
            return "positions", f"the verifier decodes token {at} at position {at + moved}"
    return UNKNOWN


def normed_apart(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Whether an RMS norm lies between states [T, d]: it scales every position, and every dimension, by one factor each."""
    factors = (a.abs() / b.abs().clamp(min=1e-12)).clamp(min=1e-12).log()
    rest = factors - factors.mean(0) - factors.mean(1, keepdim=True) + factors.mean()
    return bool(rest.abs().median() <= tolerance) and bool((factors - factors.mean()).abs().median() > tolerance)
