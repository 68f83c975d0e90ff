"""Medusa heads against a reference that walks over samples, heads and positions one by one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from family_logits import LOGIT_SCALE, biased, logits_of
from torch import Tensor, nn

from headstart.errors import UserError
from headstart.heads.base import target_rows
from headstart.heads.batch import Batch
from headstart.heads.medusa import MedusaConfig, MedusaHead
from headstart.heads.verifier import Features, Verifier

Build = Callable[..., Any]
ROWS = [(1, 12), (2, 7), (3, 9)]  # (seed, length)
SPANS = [[(3, 6), (8, 12)], [(4, 7)], [(2, 4)]]


@pytest.fixture
def batch(ids_of: Build, batch_of: Build) -> Batch:
    return batch_of([ids_of(seed, length) for seed, length in ROWS], SPANS)


def as_double(verifier: Verifier, head: MedusaHead, features: Features) -> Features:
    verifier.model.double()
    head.double()
    return Features(features.last.double(), features.layers.double(), features.choice)


def naive_terms(
    family: str, head: MedusaHead, batch: Batch, features: Features, lm_head: nn.Linear
) -> tuple[list[list[Tensor]], list[list[int]]]:
    """Per head: the loss of every supervised label, and whether the head's first choice hits it."""
    config, ids = head.config, head.target_ids.tolist()
    terms: list[list[Tensor]] = [[] for _ in range(config.heads)]
    hits: list[list[int]] = [[] for _ in range(config.heads)]
    for b, length in enumerate(batch.lengths.tolist()):
        for t in range(length):
            for i in range(config.heads):
                label = t + 2 + i
                if label >= length or not batch.mask[b, label]:
                    continue
                token = int(batch.ids[b, label] if config.targets == "hard" else features.choice[b, label - 1])
                if token not in ids:
                    continue
                z = features.last[b, t]
                for block in head.blocks[i]:
                    inner = block.linear.weight @ z + block.linear.bias
                    z = z + inner / (1 + torch.exp(-inner))
                own = config.lm_head == "own"
                weight = head.lm_heads[i].weight if own else LOGIT_SCALE.get(family, 1.0) * lm_head.weight[head.target_ids]
                log_q = torch.log_softmax(weight @ z, 0)
                hits[i].append(int(ids[int(log_q.argmax())] == token))
                if config.targets == "hard":
                    terms[i].append(-log_q[ids.index(token)])
                else:
                    teacher = torch.softmax(logits_of(family, lm_head, features.last[b, label - 1], head.target_ids), 0)
                    q, accepted = log_q.exp(), 1 - (teacher - log_q.exp()).abs().sum() / 2
                    distances = {
                        "ce": -(teacher * log_q).sum(), "kl": (teacher * (teacher / q).log()).sum(), "tv": 1 - accepted,
                        "lk": -accepted.log(),
                    }  # fmt: skip
                    terms[i].append(distances[config.loss])
    return terms, hits


def naive_loss(terms: list[list[Tensor]], decay: float) -> Tensor:
    return sum(decay**i * torch.stack(term).mean() for i, term in enumerate(terms) if term)


@pytest.mark.usefixtures("keep_double")
@pytest.mark.parametrize("prune", [False, True], ids=["whole", "pruned"])
@pytest.mark.parametrize(("family", "lm_head", "targets", "kind"), [
    *(("llama", lm_head, "hard", "ce") for lm_head in ("own", "shared")),
    *(("llama", lm_head, "soft", kind) for lm_head in ("own", "shared") for kind in ("ce", "kl", "tv", "lk")),
    ("granite", "shared", "soft", "ce"),
    ("cohere", "shared", "hard", "ce"),
    ("gemma2", "own", "soft", "lk"),
    ("phi", "shared", "soft", "tv"),
])  # fmt: skip
def test_loss_counts_hits_and_gradients_equal_the_naive_loop(
    family: str, lm_head: str, targets: str, kind: str, prune: bool, batch: Batch, half_vocabulary: Tensor,
    tiny: Build, tiny_medusa: Build, features_of: Build,
) -> None:  # fmt: skip
    verifier = biased(tiny(family))
    ids = half_vocabulary if prune else None
    head = tiny_medusa(verifier, target_ids=ids, targets=targets, lm_head=lm_head, blocks=2, loss=kind)
    features = as_double(verifier, head, features_of(verifier, batch))
    parameters = [parameter for parameter in head.parameters() if parameter.requires_grad]

    terms, hits = naive_terms(family, head, batch, features, verifier.lm_head)
    naive_total = naive_loss(terms, 0.8)
    naive_gradients = torch.autograd.grad(naive_total, parameters)

    loss = head.loss(batch, features, verifier)
    assert loss.counts.tolist() == [len(term) for term in terms]
    assert loss.correct.tolist() == [sum(hit) for hit in hits]
    assert loss.sums.tolist() == pytest.approx([sum(term).item() for term in terms], abs=1e-6)
    assert loss.total().item() == pytest.approx(naive_total.item(), abs=1e-6)
    for mine, naively in zip(torch.autograd.grad(loss.total(), parameters), naive_gradients, strict=True):
        assert (mine - naively).abs().max() < 1e-6


@pytest.mark.parametrize("family", ["llama", "granite", "cohere", "gpt2"])
@pytest.mark.parametrize("lm_head", ["own", "shared"])
def test_a_fresh_head_gives_the_verifiers_own_logits_at_every_depth(
    family: str, lm_head: str, tiny: Build, ids_of: Build
) -> None:
    verifier = tiny(family)
    sizes = {"hidden_size": 32, "vocab_size": 96, "draft_vocab_size": 96}
    config = MedusaConfig(heads=3, blocks=2, lm_head=lm_head, targets="hard", decay=0.8, **sizes)
    head = MedusaHead(config)
    head.initialise(verifier)
    ids = torch.tensor([ids_of(5, 9)])
    own = verifier.model(input_ids=ids).logits.log_softmax(-1)[0, -1]
    session = head.begin(verifier, 1, 32)
    drafted = [session.observe(verifier.features(ids), ids, [9])]
    for level in range(2):
        drafted.append(session.expand(torch.tensor([[3]]), torch.tensor([[level - 1]]))[:, 0])
    for log_q in drafted:
        assert (log_q[0] - own).abs().max() < 1e-5


def test_a_fresh_head_reads_the_uncapped_logits_of_a_soft_capped_verifier(tiny: Build, ids_of: Build) -> None:
    verifier = tiny("gemma2")
    config = MedusaConfig(heads=1, blocks=1, lm_head="own", targets="hard", decay=1.0, hidden_size=32, vocab_size=96,
                          draft_vocab_size=96)  # fmt: skip
    head = MedusaHead(config)
    head.initialise(verifier)
    ids = torch.tensor([ids_of(6, 8)])
    features = verifier.features(ids)
    raw = head.lm_heads[0](head.blocks[0](features.last))
    assert (5.0 * torch.tanh(raw / 5.0) - verifier.model(input_ids=ids).logits).abs().max() < 1e-4


def test_soft_targets_are_the_capped_and_scaled_probabilities(
    tiny: Build, tiny_medusa: Build, features_of: Build, batch: Batch, half_vocabulary: Tensor
) -> None:
    for family in ("gemma2", "granite", "cohere"):
        verifier = tiny(family)
        head = tiny_medusa(verifier, target_ids=half_vocabulary, targets="soft")
        features = features_of(verifier, batch)
        own = verifier.model(input_ids=batch.ids).logits[..., half_vocabulary].softmax(-1)
        wanted, index = target_rows(head.supervised(batch, features))
        targets = head.targets(batch, features, verifier, wanted)
        used = (index >= 0).nonzero()
        assert len(used) == targets.shape[0] > 0
        for b, t in used.tolist():
            assert (targets[index[b, t]] - own[b, t]).abs().max() < 1e-5


def test_more_heads_than_tokens_is_no_error(tiny: Build, tiny_medusa: Build, batch_of: Build, features_of: Build) -> None:
    verifier = tiny("llama")
    batch = batch_of([[5, 10, 11]], [[(1, 3)]])
    loss = tiny_medusa(verifier, heads=6).loss(batch, features_of(verifier, batch), verifier)
    assert loss.counts.tolist() == [1, 0, 0, 0, 0, 0]
    assert torch.isfinite(loss.total())


@pytest.mark.parametrize("targets", ["hard", "soft"])
def test_padding_and_order_of_the_samples_change_nothing(
    targets: str, tiny: Build, tiny_medusa: Build, ids_of: Build, batch_of: Build, features_of: Build,
    half_vocabulary: Tensor,
) -> None:  # fmt: skip
    verifier = tiny("llama")
    head = tiny_medusa(verifier, target_ids=half_vocabulary, targets=targets)
    rows = [ids_of(seed, length) for seed, length in ROWS]

    def sums(order: list[int], pad: int) -> Tensor:
        batch = batch_of([rows[i] for i in order], [SPANS[i] for i in order], pad)
        loss = head.loss(batch, features_of(verifier, batch), verifier)
        return torch.stack([loss.sums, loss.counts, loss.correct])

    single = sums([0], 0) + sums([1], 0) + sums([2], 0)
    for order, pad in (([0, 1, 2], 0), ([2, 0, 1], 95), ([1, 2, 0], 44)):
        assert (sums(order, pad) - single).abs().max() < 1e-4


@pytest.mark.parametrize("lm_head", ["own", "shared"])
def test_nothing_supervised_gives_exactly_zero_and_finite_gradients(
    lm_head: str, tiny: Build, tiny_medusa: Build, batch_of: Build, features_of: Build
) -> None:
    verifier = tiny("llama")
    head = tiny_medusa(verifier, lm_head=lm_head)
    batch = batch_of([[5, 6, 7, 8]], [[]])
    loss = head.loss(batch, features_of(verifier, batch), verifier)
    loss.total().backward()
    assert loss.total().item() == 0.0
    assert loss.counts.tolist() == [0, 0, 0]
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None, name
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name


@pytest.mark.parametrize("lm_head", ["own", "shared"])
def test_first_draft_and_the_session_agree_with_the_naive_head(
    lm_head: str, batch: Batch, tiny: Build, tiny_medusa: Build, half_vocabulary: Tensor
) -> None:
    verifier = tiny("qwen3")
    head = tiny_medusa(verifier, target_ids=half_vocabulary, lm_head=lm_head)
    features = verifier.features(batch.ids)
    where = torch.zeros_like(batch.mask)
    where[0, [4, 9]] = where[2, 1] = True
    session = head.begin(verifier, 3, 64)
    counts = [5, 3, 2]
    levels = [session.observe(features, batch.ids, counts)]
    levels += [session.expand(torch.zeros(3, 2, dtype=torch.long), torch.zeros(3, 2).long())[:, m] for m in (0, 1)]
    for b, count in enumerate(counts):
        for i, log_q in enumerate(levels):
            z = features.last[b, count - 1]
            linear = head.blocks[i][0].linear
            z = z + torch.nn.functional.silu(linear.weight @ z + linear.bias)
            weight = head.lm_heads[i].weight if lm_head == "own" else verifier.lm_head.weight[half_vocabulary]
            assert (log_q[b] - (weight @ z).log_softmax(0)).abs().max() < 1e-5
    first = head.first_draft(batch, features, verifier, where)
    assert first.shape == (3, 48)
    assert (first[0] - levels[0][0]).abs().max() < 1e-5
    assert (first[2] - levels[0][2]).abs().max() < 1e-5


def test_a_session_keeps_the_rows_it_is_told(batch: Batch, tiny: Build, tiny_medusa: Build) -> None:
    verifier = tiny("llama")
    session = tiny_medusa(verifier).begin(verifier, 3, 64)
    session.observe(verifier.features(batch.ids), batch.ids, [5, 3, 2])
    before = session.log_q
    session.keep_rows([2, 0])
    after = session.expand(torch.zeros(2, 1, dtype=torch.long), torch.full((2, 1), -1))
    assert torch.equal(after[:, 0], before[[2, 0], 1])


def test_a_head_for_another_verifier_is_refused(tiny: Build, tiny_medusa: Build) -> None:
    head = tiny_medusa(tiny("llama"))
    with pytest.raises(UserError, match=r"llama do not fit: the head's vocabulary is 96, the verifier's 80"):
        head.begin(tiny("llama", vocab_size=80, eos_token_id=79), 1, 8)
    with pytest.raises(UserError, match=r"the head's hidden size is 32, the verifier's 16"):
        head.begin(tiny("llama", hidden_size=16), 1, 8)
