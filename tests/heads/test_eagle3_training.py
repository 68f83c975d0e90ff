"""EAGLE-3 training against a dense reference: every (sample, position, step) on its own, keys listed one by one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from exact_rotary import ExactRotary, turned
from family_logits import EMBEDDING_SCALE, biased, logits_of
from torch import Tensor, nn

from headstart.heads.base import target_rows
from headstart.heads.batch import Batch
from headstart.heads.eagle3 import Eagle3Head
from headstart.heads.verifier import Features, Verifier

Build = Callable[..., Any]
LAYERS = (1, 2, 3)


def rms(x: Tensor, norm: nn.RMSNorm) -> Tensor:
    return norm.weight * x / torch.sqrt((x * x).mean(-1) + norm.eps)[..., None]


class Reference:
    """One sample; `state(t, k)` is the pre-norm output of step k at position t."""

    def __init__(self, head: Eagle3Head, table: Tensor, ids: list[int], states: Tensor) -> None:
        self.head, self.layer, self.attention = head, head.midlayer, head.midlayer.self_attn
        self.table, self.ids = table, ids
        self.fused = [head.fc.weight @ (head.input_scale * self.normed(row)) for row in states]

    def normed(self, row: Tensor) -> Tensor:
        """EAGLE-3.1: each of the three states has a norm of its own."""
        if not self.head.config.fc_norm:
            return row
        return torch.cat([rms(row[32 * i : 32 * (i + 1)], norm) for i, norm in enumerate(self.head.fc_norm)])

    def fed(self, state: Tensor) -> Tensor:
        """EAGLE-3.1: what the next step reads has been through the last norm."""
        return rms(state, self.head.norm) if self.head.config.norm_output else state

    def joined(self, token: int, hidden: Tensor) -> Tensor:
        embedding = rms(self.table[token], self.layer.input_layernorm)
        return torch.cat([embedding, rms(hidden, self.layer.hidden_norm)])

    def key_value(self, x: Tensor, position: int) -> tuple[Tensor, Tensor]:
        split = (self.head.config.num_key_value_heads, self.head.config.head_dim)
        key = (self.attention.k_proj.weight @ x).reshape(split)
        return turned(key, position), (self.attention.v_proj.weight @ x).reshape(split)

    def attend(self, x: Tensor, position: int, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        heads, size = self.head.config.num_attention_heads, self.head.config.head_dim
        queries = turned((self.attention.q_proj.weight @ x).reshape(heads, size), position)
        shared = heads // self.head.config.num_key_value_heads
        out = []
        for h in range(heads):
            scores = torch.stack([(queries[h] * key[h // shared]).sum() / size**0.5 for key, _ in seen])
            weights = torch.exp(scores - scores.max())
            values = torch.stack([value[h // shared] for _, value in seen])
            out.append((weights[:, None] * values).sum(0) / weights.sum())
        return self.attention.o_proj.weight @ torch.cat(out)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        hidden = hidden + attended
        x = rms(hidden, self.layer.post_attention_layernorm)
        gate = self.layer.mlp.gate_proj.weight @ x
        return hidden + self.layer.mlp.down_proj.weight @ (gate * torch.sigmoid(gate) * (self.layer.mlp.up_proj.weight @ x))

    def states(self, t: int, steps: int) -> list[Tensor]:
        seen = [self.key_value(self.joined(self.ids[u + 1], self.fused[u]), u) for u in range(t + 1)]
        x = self.joined(self.ids[t + 1], self.fused[t])
        found = [self.finish(self.fused[t], self.attend(x, t, seen))]
        for k in range(1, steps):
            before = self.fed(found[-1])
            x = self.joined(self.ids[t + 1 + k], before)
            seen.append(self.key_value(x, t + k))
            found.append(self.finish(before, self.attend(x, t + k, seen)))
        return found

    def log_q(self, state: Tensor) -> Tensor:
        return torch.log_softmax(self.head.lm_head.weight @ rms(state, self.head.norm), 0)


def distance(p: Tensor, log_q: Tensor, loss: str) -> Tensor:
    if loss == "tv":
        return (p - log_q.exp()).abs().sum() / 2
    if loss == "lk":
        return -torch.log(1 - (p - log_q.exp()).abs().sum() / 2)
    return -(p * log_q).sum() + ((p * p.log()).sum() if loss == "kl" else 0.0)


def supervised_steps(mask: list[bool], choices: list[int], drafted: list[int], t: int, depth: int) -> list[int]:
    """Steps whose tokens t + 1 .. t + 2 + k are all one answer's and whose teacher's choice can be drafted."""
    steps = []
    for k in range(depth):
        if t + 2 + k >= len(mask) or not all(mask[t + 1 : t + 3 + k]):
            break
        if choices[t + 1 + k] in drafted:
            steps.append(k)
    return steps


def reference_terms(
    head: Eagle3Head, batch: Batch, features: Features, teacher_logits: Tensor, table: Tensor
) -> tuple[list[list[Tensor]], list[int]]:
    depth, drafted = head.config.depth, head.target_ids.tolist()
    terms: list[list[Tensor]] = [[] for _ in range(depth)]
    hits = [0] * depth
    for b, length in enumerate(batch.lengths.tolist()):
        reference = Reference(head, table, batch.ids[b, :length].tolist(), features.layers[b, :length])
        mask, choices = batch.mask[b, :length].tolist(), teacher_logits[b, :length].argmax(-1).tolist()
        for t in range(length):
            steps = supervised_steps(mask, choices, drafted, t, depth)
            states = reference.states(t, max(steps) + 1) if steps else []
            for k in steps:
                teacher = torch.softmax(teacher_logits[b, t + 1 + k][head.target_ids], 0)
                log_q = reference.log_q(states[k])
                terms[k].append(distance(teacher, log_q, head.config.loss))
                hits[k] += int(log_q.argmax() == teacher.argmax())
    return terms, hits


def as_double(verifier: Verifier, head: Eagle3Head, features: Features) -> Features:
    verifier.model.double()
    head.double()
    head.rotary = ExactRotary(head.config.head_dim)
    return Features(features.last.double(), features.layers.double(), features.choice)


def rows_and_spans(ids_of: Build) -> tuple[list[list[int]], list[list[tuple[int, int]]]]:
    rows = [ids_of(21, 18), ids_of(22, 8), ids_of(23, 12)]
    return rows, [[(2, 5), (7, 18)], [(3, 8)], [(1, 3), (5, 12)]]


@pytest.mark.usefixtures("keep_double")
@pytest.mark.parametrize(
    ("family", "whole", "flags"),
    [
        ("llama", False, {}),
        ("llama", True, {}),
        ("qwen3", False, {}),
        ("gpt2", False, {}),
        ("llama", False, {"fc_norm": True}),
        ("llama", False, {"norm_output": True}),
        ("qwen3", True, {"fc_norm": True, "norm_output": True}),
        ("llama", False, {"loss": "kl"}),
        ("llama", False, {"loss": "tv"}),
        ("llama", False, {"loss": "lk"}),
        ("gemma2", False, {}),
        ("granite", True, {"loss": "lk"}),
        ("cohere", False, {"fc_norm": True}),
        ("phi", False, {"loss": "kl"}),
    ],
)
def test_loss_counts_hits_and_gradients_equal_the_dense_reference(
    family: str,
    whole: bool,
    flags: dict[str, Any],
    tiny: Build,
    tiny_eagle3: Build,
    ids_of: Build,
    batch_of: Build,
    features_of: Build,
) -> None:
    verifier = biased(tiny(family))
    head = tiny_eagle3(verifier, target_ids=torch.arange(96) if whole else None, **flags)
    batch = batch_of(*rows_and_spans(ids_of))
    features = as_double(verifier, head, features_of(verifier, batch, LAYERS))
    teacher_logits = logits_of(family, verifier.lm_head, features.last)
    table = verifier.model.get_input_embeddings().weight * EMBEDDING_SCALE.get(family, 1.0)
    names, parameters = zip(*head.named_parameters(), strict=True)

    terms, hits = reference_terms(head, batch, features, teacher_logits, table)
    naive_total = sum(0.8**k * torch.stack(term).mean() for k, term in enumerate(terms) if term)
    naive_gradients = torch.autograd.grad(naive_total, parameters)

    loss = head.loss(batch, features, verifier)
    assert min(len(term) for term in terms) > 0
    assert loss.counts.tolist() == [len(term) for term in terms]
    assert loss.correct.tolist() == hits
    assert loss.sums.tolist() == pytest.approx([sum(term).item() for term in terms], rel=1e-6)
    assert loss.total().item() == pytest.approx(naive_total.item(), rel=1e-6)
    for name, mine, naively in zip(names, torch.autograd.grad(loss.total(), parameters), naive_gradients, strict=True):
        assert (mine - naively).abs().max() < 1e-6 * max(1.0, naively.abs().max().item()), name


@pytest.mark.parametrize("family", ["gemma2", "granite", "cohere"])
def test_the_teacher_is_the_capped_and_scaled_distribution(
    family: str, tiny: Build, tiny_eagle3: Build, ids_of: Build, batch_of: Build, features_of: Build
) -> None:
    verifier = tiny(family)
    head = tiny_eagle3(verifier)
    batch = batch_of(*rows_and_spans(ids_of))
    features = features_of(verifier, batch, LAYERS)
    own = verifier.model(input_ids=batch.ids).logits[..., head.target_ids].softmax(-1)
    wanted, index = target_rows(head.supervised(batch, features))
    teacher = head.teacher(features, verifier, wanted)
    used = (index >= 0).nonzero().tolist()
    assert len(used) == teacher.shape[0] > 0
    for b, t in used:
        assert (teacher[index[b, t]] - own[b, t]).abs().max() < 1e-5


def test_two_answers_never_share_a_draft(
    tiny: Build, tiny_eagle3: Build, ids_of: Build, batch_of: Build, features_of: Build
) -> None:
    """Answers at 2..5 and 7..11: no step starts in one and predicts in the other."""
    verifier = tiny("llama")
    head = tiny_eagle3(verifier, target_ids=torch.arange(96))
    batch = batch_of([ids_of(4, 12)], [[(2, 6), (7, 12)]])
    supervised = head.supervised(batch, features_of(verifier, batch, LAYERS))
    expected = [[1, 2, 3, 6, 7, 8, 9], [1, 2, 6, 7, 8], [1, 6, 7], [6]]
    assert [step[0].nonzero()[:, 0].tolist() for step in supervised] == expected


def test_a_position_whose_teacher_chooses_outside_the_draft_vocabulary_is_not_supervised(
    tiny: Build, tiny_eagle3: Build, ids_of: Build, batch_of: Build, features_of: Build
) -> None:
    verifier = tiny("llama")
    batch = batch_of([ids_of(8, 10)], [[(2, 10)]])
    features = features_of(verifier, batch, LAYERS)
    choices = verifier.model(input_ids=batch.ids).logits[0].argmax(-1).tolist()
    missing = choices[5]  # the teacher of step 0 at 4, of step 1 at 3, of step 2 at 2, of step 3 at 1
    head = tiny_eagle3(verifier, target_ids=torch.tensor([i for i in range(96) if i != missing]))
    supervised = head.supervised(batch, features)[:, 0]
    for k in range(4):
        expected = [t for t in range(1, 8 - k) if choices[t + 1 + k] != missing]
        assert 4 - k not in expected
        assert supervised[k].nonzero()[:, 0].tolist() == expected


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_case_33_a_padded_batch_equals_its_rows_alone(
    family: str, tiny: Build, tiny_eagle3: Build, ids_of: Build, batch_of: Build, features_of: Build
) -> None:
    verifier = tiny(family)
    head = tiny_eagle3(verifier)
    rows, spans = rows_and_spans(ids_of)

    def run(picked: list[int], pad: int) -> tuple[Tensor, Tensor, list[Tensor]]:
        batch = batch_of([rows[i] for i in picked], [spans[i] for i in picked], pad)
        loss = head.loss(batch, features_of(verifier, batch, LAYERS), verifier)
        gradients = torch.autograd.grad(loss.total(torch.full((4,), 10)), list(head.parameters()))
        return loss.sums.detach(), loss.counts, list(gradients)

    single = [run([i], 0) for i in range(3)]
    for order, pad in (([0, 1, 2], 0), ([2, 0, 1], 95)):
        sums, counts, gradients = run(order, pad)
        torch.testing.assert_close(sums, sum(one[0] for one in single), rtol=1e-5, atol=1e-5)
        assert counts.tolist() == sum(one[1] for one in single).tolist()
        for i, gradient in enumerate(gradients):
            alone = sum(one[2][i] for one in single)
            assert (gradient - alone).abs().max() < 1e-5 * max(1.0, alone.abs().max().item())


@pytest.mark.parametrize("spans", [[[], []], [[(9, 10)], []]], ids=["no answer", "an answer of one token"])
def test_nothing_supervised_gives_exactly_zero_and_zero_gradients(
    spans: list[Any], tiny: Build, tiny_eagle3: Build, ids_of: Build, batch_of: Build, features_of: Build
) -> None:
    verifier = tiny("llama")
    head = tiny_eagle3(verifier)
    batch = batch_of([ids_of(1, 10), ids_of(2, 4)], spans)
    loss = head.loss(batch, features_of(verifier, batch, LAYERS), verifier)
    loss.total().backward()
    assert loss.total().item() == 0.0
    assert loss.counts.tolist() == [0, 0, 0, 0]
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None, name
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name


def test_a_batch_shorter_than_the_steps_is_no_error(
    tiny: Build, tiny_eagle3: Build, batch_of: Build, features_of: Build
) -> None:
    verifier = tiny("llama")
    head = tiny_eagle3(verifier, target_ids=torch.arange(96), depth=6)
    batch = batch_of([[5, 10, 11]], [[(1, 3)]])
    loss = head.loss(batch, features_of(verifier, batch, LAYERS), verifier)
    assert loss.counts.tolist() == [1, 0, 0, 0, 0, 0]
    assert torch.isfinite(loss.total())


@pytest.mark.parametrize("hinted", [False, True])
def test_case_14_micro_batches_under_joint_counts_equal_one_big_batch(
    hinted: bool, tiny: Build, tiny_eagle3: Build, ids_of: Build, batch_of: Build, features_of: Build
) -> None:
    verifier = tiny("llama")
    head = tiny_eagle3(verifier)
    rows, spans = rows_and_spans(ids_of)
    batches = [batch_of(rows, spans), batch_of(rows[:1], spans[:1]), batch_of(rows[1:], spans[1:])]
    features = [features_of(verifier, batch, LAYERS) for batch in batches]
    joint = head.supervised(batches[0], features[0]).flatten(1).sum(1)
    if hinted:
        batches[1:] = [replace(batch, counts=joint) for batch in batches[1:]]
    big, *parts = (head.loss(batch, states, verifier) for batch, states in zip(batches, features, strict=True))
    assert joint.tolist() == (parts[0].counts + parts[1].counts).tolist()
    total = parts[0].total(joint) + parts[1].total(joint)
    assert total.item() == pytest.approx(big.total().item(), rel=1e-6)
    whole = torch.autograd.grad(big.total(), list(head.parameters()))
    for mine, other in zip(whole, torch.autograd.grad(total, list(head.parameters())), strict=True):
        assert (mine - other).abs().max() < 1e-5 * max(1.0, mine.abs().max().item())


def test_case_53_each_step_embeds_the_true_next_token(
    tiny: Build, tiny_eagle3: Build, ids_of: Build, batch_of: Build, features_of: Build
) -> None:
    """Changing token t + 1 + k alone changes step k at t and later steps, and no earlier step at t."""
    verifier = tiny("llama")
    head = tiny_eagle3(verifier)
    batch = batch_of([ids_of(11, 10)], [[(2, 10)]])
    features = features_of(verifier, batch, LAYERS)
    where = torch.zeros_like(batch.mask)
    where[0, 4] = True
    _, states = head.training_states(batch, features, verifier, where, 4)
    for k in range(4):
        ids = batch.ids.clone()
        ids[0, 5 + k] = ids[0, 5 + k] % 94 + 1
        _, changed = head.training_states(Batch(ids, batch.mask, batch.lengths), features, verifier, where, 4)
        moved = [bool((a - b).abs().max() > 1e-4) for a, b in zip(states, changed, strict=True)]
        assert moved == [step >= k for step in range(4)]

    shifted = Batch(batch.ids.roll(1, 1), batch.mask, batch.lengths)
    ours, theirs = (head.loss(x, features, verifier).sums for x in (batch, shifted))
    assert all(abs(a - b) > 1e-2 for a, b in zip(ours.tolist(), theirs.tolist(), strict=True))


def test_the_start_takes_the_verifiers_rows_times_its_logit_scale(tiny: Build, tiny_eagle3: Build) -> None:
    for family, factor in (("llama", 1.0), ("granite", 1 / 8), ("cohere", 0.0625)):
        verifier = tiny(family)
        head = tiny_eagle3(verifier)
        before = head.midlayer.self_attn.q_proj.weight.clone()
        head.initialise(verifier)
        assert torch.allclose(head.lm_head.weight, verifier.lm_head.weight[head.target_ids] * factor)
        assert torch.equal(head.midlayer.self_attn.q_proj.weight, before)


def test_the_start_is_near_the_uniform_distribution(
    tiny: Build, tiny_eagle3: Build, ids_of: Build, batch_of: Build, features_of: Build
) -> None:
    """Rows a hundred times as large start no surer: logits vary by about one, the loss is about ln Q."""
    verifier = tiny("llama")
    with torch.no_grad():
        verifier.lm_head.weight *= 100
    head = tiny_eagle3(verifier)
    head.initialise(verifier)
    batch = batch_of([ids_of(13, 30)], [[(2, 30)]])
    log_q = head.first_draft(batch, features_of(verifier, batch, LAYERS), verifier, batch.mask)
    assert 0.3 < log_q.std(-1).mean().item() < 3


@pytest.mark.parametrize("pruned", [False, True])
def test_under_autocast_loss_and_gradients_stay_near_those_of_float32(
    pruned: bool, tiny: Build, tiny_eagle3: Build, half_vocabulary: torch.Tensor, ids_of: Build, batch_of: Build,
    features_of: Build,
) -> None:  # fmt: skip
    verifier = tiny("llama")
    head = tiny_eagle3(verifier, target_ids=half_vocabulary if pruned else torch.arange(96))
    batch = batch_of([ids_of(13, 30)], [[(2, 30)]])
    features = features_of(verifier, batch, LAYERS)
    found = []
    for half in (False, True):
        head.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = head.loss(batch, features, verifier)
        loss.total().backward()
        gradients = torch.cat([p.grad.flatten() for p in head.parameters()])
        assert gradients.dtype == loss.sums.dtype == torch.float32
        found.append((loss.total().item(), gradients))
    (exact, exact_gradients), (near, near_gradients) = found
    assert near == pytest.approx(exact, rel=1e-2)
    assert near != exact
    assert torch.cosine_similarity(near_gradients, exact_gradients, dim=0) > 0.99


def test_even_inputs_make_the_median_size_of_every_dimension_one(tiny: Build, tiny_eagle3: Build) -> None:
    """Sizes 1, 2, 4, 8 and 1,000 in one dimension: the outlier does not count. A dead dimension stays finite."""
    head = tiny_eagle3(tiny("llama"))
    column = torch.tensor([1.0, -2.0, 4.0, -8.0, 1000.0])
    states = column[:, None] * torch.linspace(0.1, 10.0, 96)
    states[:, 5] = 0.0
    head.even_inputs(states)
    medians = (states * head.input_scale).abs().median(0).values
    assert torch.allclose(medians[torch.arange(96) != 5], torch.ones(95))
    assert head.input_scale[5].item() == pytest.approx(1000.0)


def test_even_inputs_come_after_the_norms_of_eagle31(tiny: Build, tiny_eagle3: Build) -> None:
    head = tiny_eagle3(tiny("llama"), fc_norm=True)
    states = torch.randn(50, 96, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.1, 30.0, 96)
    head.even_inputs(states)
    parts = [rms(states[:, 32 * i : 32 * (i + 1)], norm) for i, norm in enumerate(head.fc_norm)]
    medians = (torch.cat(parts, -1) * head.input_scale).abs().median(0).values
    assert torch.allclose(medians, torch.ones(96), atol=1e-5)


def test_the_input_scale_is_a_constant_that_folds_into_fc(
    tiny: Build, tiny_eagle3: Build, ids_of: Build, batch_of: Build, features_of: Build
) -> None:
    verifier = tiny("llama")
    head = tiny_eagle3(verifier)
    batch = batch_of([ids_of(13, 9)], [[(2, 9)]])
    features = features_of(verifier, batch, LAYERS)
    head.even_inputs(features.layers[0])
    assert "input_scale" not in dict(head.named_parameters())
    scaled = head.first_draft(batch, features, verifier, batch.mask)
    with torch.no_grad():
        head.fc.weight *= head.input_scale
        head.input_scale.fill_(1.0)
    assert (head.first_draft(batch, features, verifier, batch.mask) - scaled).abs().max() < 1e-5


def test_first_draft_equals_the_reference_in_row_order(
    tiny: Build, tiny_eagle3: Build, ids_of: Build, batch_of: Build, features_of: Build
) -> None:
    verifier = tiny("llama")
    head = tiny_eagle3(verifier)
    rows, spans = rows_and_spans(ids_of)
    batch = batch_of(rows, spans)
    features = features_of(verifier, batch, LAYERS)
    where = torch.zeros_like(batch.mask)
    wanted = [(0, 5), (0, 9), (2, 1), (2, 8)]
    for b, t in wanted:
        where[b, t] = True
    drafted = head.first_draft(batch, features, verifier, where)
    as_double(verifier, head, features)
    table = verifier.model.get_input_embeddings().weight
    for log_q, (b, t) in zip(drafted, wanted, strict=True):
        reference = Reference(head, table, rows[b], features.layers[b].double())
        assert (log_q - reference.log_q(reference.states(t, 1)[0])).abs().max() < 1e-4
