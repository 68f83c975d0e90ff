"""Hold a folder against an engine's loader, and its drafts against the head of a run.

Shapes: T tokens, d hidden size, Q draft vocabulary, K drafted tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ..errors import UserError
from ..heads.base import DraftHead
from ..heads.batch import Batch
from ..heads.eagle1 import Eagle1Head
from ..heads.eagle3 import Eagle3Head
from ..heads.medusa import MedusaHead
from ..heads.recurrent import RecurrentHead
from ..heads.verifier import Features, Verifier
from .contracts import eagle1, eagle3, hygiene, medusa
from .contracts.fields import rope_of
from .contracts.folder import Folder, read_folder
from .contracts.forward import eagle1_chain, eagle3_chain, medusa_logits, rotary

ENGINES = (*eagle3.ENGINES, "medusa")
TOKENS, STARTS, STEPS = 24, (6, 13, 19), 4  # of the comparison: fixed ids, where drafting starts, tokens drafted
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}  # of the largest logit


@dataclass
class Verdict:
    """broken: a line for each broken rule; difference: the largest between a logit of the folder and of the run's head."""

    broken: list[str] = field(default_factory=list)
    difference: float | None = None


def verify(path: Path, engine: str, head: DraftHead | None = None, verifier: Verifier | None = None) -> Verdict:
    """Apply the engine's contract; with a head and its verifier, compare what both draft.

    Raises UserError when the folder holds no head, a damaged one, or one for another verifier.
    """
    if engine not in ENGINES:
        raise UserError(f"--engine {engine}: unknown engine; known: {', '.join(ENGINES)}")
    folder = read_folder(path)
    verdict = Verdict([*hygiene.broken_rules(folder), *contract(folder, engine)])
    if verifier is not None:
        check_same_verifier(folder, verifier)
        if not folder.is_medusa and not verdict.broken:
            verdict.broken += verifier_rules(folder, engine, verifier, head)
        if head is not None and not verdict.broken:
            compare(folder, engine, head, verifier, verdict)
    return verdict


def contract(folder: Folder, engine: str) -> Iterator[str]:
    if folder.is_medusa:
        return medusa.broken_rules(folder, engine)
    if engine == "medusa":
        return iter([f"engine: medusa loads Medusa heads, {folder.path.name} holds none"])
    if folder.is_eagle1:
        return eagle1.broken_rules(folder, engine)
    return eagle3.broken_rules(folder, engine)


def check_same_verifier(folder: Folder, verifier: Verifier) -> None:
    for name, its in (("hidden_size", verifier.facts.hidden_size), ("vocab_size", verifier.facts.vocab_size)):
        mine = folder.layer.get(name)
        if isinstance(mine, int) and mine != its:
            raise UserError(f"{folder.path}: made for another verifier: its {name} is {mine}, {verifier.name} has {its}")


def verifier_rules(folder: Folder, engine: str, verifier: Verifier, head: DraftHead | None) -> Iterator[str]:
    """What must fit the verifier, and turn as the run's head does."""
    layer, facts = folder.layer, verifier.facts
    if layer["max_position_embeddings"] != facts.max_position_embeddings:
        yield (f"positions: max_position_embeddings is {layer['max_position_embeddings']}, the verifier's "
               f"{facts.max_position_embeddings}")  # fmt: skip
    if isinstance(head, Eagle3Head | Eagle1Head):
        far = torch.tensor([[1, 100, facts.max_position_embeddings - 1]])
        mine = head.rotary(far.to(verifier.device))[0][0, 0].cpu()
        if not torch.allclose(rotary(layer, far[0])[0], mine, atol=1e-3):
            yield f"rope: {rope_of(layer)} turns otherwise than the run's head, {head.config.rope_parameters}"
    if folder.is_eagle1:
        return
    layers = eagle3.captured_layers(folder, eagle3.ENGINES[engine], facts.num_hidden_layers)
    if not all(1 <= i < facts.num_hidden_layers for i in layers) or len(layers) != eagle3.STATES:
        yield f"layer ids: {engine} would capture the states entering layers {list(layers)} of {facts.num_hidden_layers}"


def compare(folder: Folder, engine: str, head: DraftHead, verifier: Verifier, verdict: Verdict) -> None:
    """Draft from fixed ids with the head and with the folder; a difference breaks the rule `logits`."""
    if head.kind != ("medusa" if folder.is_medusa else "eagle1" if folder.is_eagle1 else "eagle3"):
        raise UserError(f"{folder.path}: holds another kind of head than the run's {head.kind}")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(verifier.facts.vocab_size, (TOKENS,), generator=generator)
    with torch.no_grad():
        if isinstance(head, MedusaHead):
            pairs = list(medusa_pairs(folder, engine, head, verifier, ids))
        elif isinstance(head, Eagle1Head):
            pairs = list(eagle1_pairs(folder, engine, head, verifier, ids))
        else:
            pairs = list(eagle3_pairs(folder, engine, head, verifier, ids, verdict))
    if verdict.broken:
        return
    verdict.difference = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
    largest = max(1.0, *(ours.abs().max().item() for ours, _ in pairs))
    dtype = next(tensor.dtype for tensor in folder.tensors.values() if tensor.is_floating_point())
    if not verdict.difference <= TOLERANCE[dtype] * largest:
        verdict.broken.append(f"logits: differ from the run's head by {verdict.difference:.3g} (largest {largest:.3g})")


def medusa_pairs(
    folder: Folder, engine: str, head: MedusaHead, verifier: Verifier, ids: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """(the head's logits, the folder's) for each head, over the head's vocabulary: [T, Q]."""
    parsed = medusa.parse(folder, engine)
    hidden = verifier.features(ids[None].to(verifier.device)).last[0].float()
    mine = zip(head.blocks, head.output_weights(verifier), strict=True)
    if len(parsed.blocks) != head.config.heads:
        raise UserError(f"{folder.path}: holds {len(parsed.blocks)} heads, the run's {head.config.heads}")
    for (own, weight), blocks, output in zip(mine, parsed.blocks, parsed.outputs, strict=True):
        theirs = spread_out(medusa_logits(blocks, output, hidden.cpu()), parsed.target_ids, head.config.vocab_size)
        yield (own(hidden) @ weight.T).cpu(), theirs[:, head.target_ids.cpu()]


def spread_out(logits: Tensor, ids: Tensor | None, size: int) -> Tensor:
    """Logits [T, Q] at the verifier ids they stand for: [T, V], very low where nothing is drafted."""
    if ids is None:
        return logits
    out = torch.full((len(logits), size), -1e30)
    return out.index_copy(1, ids, logits)


def eagle3_pairs(
    folder: Folder, engine: str, head: DraftHead, verifier: Verifier, ids: Tensor, verdict: Verdict
) -> Iterator[tuple[Tensor, Tensor]]:
    """(the head's logits, the folder's) of drafting a few tokens from a few positions: [K, Q]."""
    assert isinstance(head, Eagle3Head)
    rules = eagle3.ENGINES[engine]
    layers = eagle3.captured_layers(folder, rules, verifier.facts.num_hidden_layers)
    if layers != head.config.layers:
        verdict.broken.append(f"layer ids: {engine} hands over the states entering {list(layers)}, the head reads "
                              f"{list(head.config.layers)}")  # fmt: skip
        return
    features = verifier.features(ids[None].to(verifier.device), layers)
    table = folder.tensors.get("embed_tokens.weight") if rules.own_table else None
    table = verifier.embedding_table.cpu() if table is None else table
    offsets = folder.tensors.get("d2t", torch.zeros(folder.config["draft_vocab_size"], dtype=torch.long))
    target_ids = offsets + torch.arange(len(offsets))
    for start in STARTS:
        theirs = eagle3_chain(folder.tensors, folder.layer, eagle3.prefix_of(folder),
                              eagle3.norm_before_residual(folder, rules), features.layers[0].cpu(), table, ids.tolist(),
                              start, STEPS)  # fmt: skip
        ours = head.lm_head(head.norm(drafted(head, features, verifier, ids, start)))
        yield ours.cpu(), spread_out(theirs, target_ids, head.config.vocab_size)[:, head.target_ids.cpu()]


def eagle1_pairs(
    folder: Folder, engine: str, head: Eagle1Head, verifier: Verifier, ids: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """(the head's logits, the folder's) of drafting a few tokens from a few positions, by the verifier's lm_head: [K, V]."""
    features = verifier.features(ids[None].to(verifier.device))
    table = folder.tensors.get("embed_tokens.weight") if eagle1.ENGINES[engine].own_table else None
    table = verifier.embedding_table.cpu() if table is None else table
    for start in STARTS:
        theirs = eagle1_chain(folder.tensors, folder.layer, features.last[0].cpu(), table, ids.tolist(), start, STEPS)
        ours = drafted(head, features, verifier, ids, start)
        mine, its = (verifier.logits(x.to(verifier.device, verifier.dtype)).float().cpu() for x in (ours, theirs))
        yield mine, its


def drafted(head: RecurrentHead, features: Features, verifier: Verifier, ids: Tensor, start: int) -> Tensor:
    """The head's own outputs [K, d] of drafting from `start` with the tokens `ids` [T]."""
    ids = ids[None].to(verifier.device)
    batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), torch.tensor([ids.shape[1]], device=ids.device))
    here = torch.zeros_like(ids, dtype=torch.bool)
    here[0, start] = True
    _, states = head.training_states(batch, features, verifier, here, STEPS)
    return torch.stack([state[0, 0] for state in states])
