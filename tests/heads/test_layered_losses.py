"""EAGLE-1, HASS and multi-token prediction: losses against a float64 walk over samples, positions and steps, written from
the papers' formulas: one query, one list of keys, one row at a time."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from exact_rotary import ExactRotary, turned
from family_logits import EMBEDDING_SCALE, biased, logits_of
from torch import Tensor, nn

from headstart.heads.base import DraftHead
from headstart.heads.batch import Batch
from headstart.heads.losses import chunked_terms
from headstart.heads.packed import PackedLinear, pack_linears
from headstart.heads.verifier import Features, Verifier

Build = Callable[..., Any]
SPANS = [[(2, 5), (7, 18)], [(3, 8)], [(1, 3), (5, 12)]]
FORMS = ["parallel", "sequential", "recursive"]


def rms(x: Tensor, norm: nn.RMSNorm) -> Tensor:
    return norm.weight * x / torch.sqrt((x * x).mean() + norm.eps)


class Layer:
    """A decoder layer at one token: `z` is the residual stream, normed for attention unless the layer has no such norm."""

    def __init__(self, layer: Any, config: Any) -> None:
        self.layer, self.config = layer, config

    def normed(self, z: Tensor) -> Tensor:
        return rms(z, self.layer.input_layernorm) if "input_layernorm" in dict(self.layer.named_children()) else z

    def key_value(self, z: Tensor, position: int) -> tuple[Tensor, Tensor]:
        shape = (self.config.num_key_value_heads, self.config.head_dim)
        x = self.normed(z)
        key = turned((self.layer.self_attn.k_proj.weight @ x).reshape(shape), position)
        return key, (self.layer.self_attn.v_proj.weight @ x).reshape(shape)

    def output(self, z: Tensor, position: int, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        heads, size = self.config.num_attention_heads, self.config.head_dim
        queries = turned((self.layer.self_attn.q_proj.weight @ self.normed(z)).reshape(heads, size), position)
        shared = heads // self.config.num_key_value_heads
        read = []
        for h in range(heads):
            weights = torch.softmax(torch.stack([key[h // shared] @ queries[h] / size**0.5 for key, _ in seen]), 0)
            read.append(sum(w * value[h // shared] for w, (_, value) in zip(weights, seen, strict=True)))
        z = z + self.layer.self_attn.o_proj.weight @ torch.cat(read)
        x = rms(z, self.layer.post_attention_layernorm)
        gate = self.layer.mlp.gate_proj.weight @ x
        return z + self.layer.mlp.down_proj.weight @ (gate * torch.sigmoid(gate) * (self.layer.mlp.up_proj.weight @ x))


class Naive:
    """One sample under one head: `states(t)` are what depths 0, 1, .. at position t say before the verifier's lm_head."""

    def __init__(self, head: Any, table: Tensor, ids: list[int], last: Tensor) -> None:
        self.head, self.config, self.table, self.ids, self.last = head, head.config, table, ids, last
        self.cache: dict[tuple[int, int], Tensor] = {}

    def states(self, t: int, depths: int) -> list[Tensor]:
        if self.config.kind == "eagle1":
            return self.recurrent(Layer(self.head.layer, self.config), t, depths)
        if self.config.form == "recursive":
            states = self.recurrent(Layer(self.head.mtp[0].layer, self.config), t, depths)
            return [rms(state, self.head.mtp[0].norm) for state in states]
        return [rms(self.module(i, t), self.head.mtp[i].norm) for i in range(depths)]

    def joined(self, i: int, token: int, hidden: Tensor) -> Tensor:
        if self.config.kind == "eagle1":
            return self.head.fc.weight @ torch.cat([self.table[token], hidden])
        block = self.head.mtp[i]
        parts = [rms(hidden, block.hidden_norm), rms(self.table[token], block.embedding_norm)]
        return block.proj.weight @ torch.cat(parts)

    def recurrent(self, layer: Layer, t: int, depths: int) -> list[Tensor]:
        inputs = [self.joined(0, self.ids[u + 1], self.last[u]) for u in range(t + 1)]
        seen = [layer.key_value(z, u) for u, z in enumerate(inputs)]
        found = [layer.output(inputs[t], t, seen)]
        for k in range(1, depths):
            z = self.joined(0, self.ids[t + 1 + k], found[-1])
            seen.append(layer.key_value(z, t + k))
            found.append(layer.output(z, t + k, seen))
        return found

    def into(self, i: int, t: int) -> Tensor:
        """The residual stream that enters module i at t."""
        if self.config.form == "parallel":
            return self.last[t]
        return self.joined(i, self.ids[t + 1 + i], self.last[t] if i == 0 else self.module(i - 1, t))

    def module(self, i: int, t: int) -> Tensor:
        if (i, t) not in self.cache:
            layer = Layer(self.head.mtp[i].layer, self.config)
            seen = [layer.key_value(self.into(i, u), u) for u in range(t + 1)]
            self.cache[i, t] = layer.output(self.into(i, t), t, seen)
        return self.cache[i, t]


def smooth_l1(error: Tensor) -> Tensor:
    size = error.abs()
    return torch.where(size < 1, size * size / 2, size - 0.5).mean()


def eagle1_terms(
    family: str, head: Any, batch: Batch, features: Features, table: Tensor, lm_head: nn.Linear
) -> Iterator[tuple[int, Tensor, bool, list[float]]]:
    """(step, loss, whether the first choice agrees, its parts) of every supervised position."""
    ids = head.target_ids
    for b, length in enumerate(batch.lengths.tolist()):
        naive = Naive(head, table, batch.ids[b, :length].tolist(), features.last[b])
        for t in range(length - 2):
            for k in range(head.config.depth):
                label = t + 2 + k
                # in an answer, and drafted from its first token or later: t >= T - 1
                if not any(start <= label < end and t >= start - 1 for start, end in SPANS[b]):
                    continue
                goal = features.last[b, t + 1 + k]
                if int(logits_of(family, lm_head, goal).argmax()) not in ids:
                    continue
                f = naive.states(t, k + 1)[k]
                p = torch.softmax(logits_of(family, lm_head, goal, ids), 0)
                log_q = torch.log_softmax(logits_of(family, lm_head, f, ids), 0)
                parts = [smooth_l1(f - goal), -(p * log_q).sum()]
                if head.config.top_tokens:
                    best = p.argsort(descending=True)[: head.config.top_tokens]
                    parts.append(-sum(p[i] * log_q[i] for i in best))
                loss = parts[0] + head.config.cross_entropy * parts[1] + sum(parts[2:])
                yield k, loss, bool(log_q.argmax() == p.argmax()), [part.item() for part in parts]


def mtp_terms(
    family: str, head: Any, batch: Batch, features: Features, table: Tensor, lm_head: nn.Linear
) -> Iterator[tuple[int, Tensor, bool, list[float]]]:
    ids = head.target_ids.tolist()
    for b, length in enumerate(batch.lengths.tolist()):
        naive = Naive(head, table, batch.ids[b, :length].tolist(), features.last[b])
        for t in range(length - 2):
            for k in range(head.config.depth):
                label = t + 2 + k
                if label >= length or not batch.mask[b, label] or int(batch.ids[b, label]) not in ids:
                    continue
                log_q = torch.log_softmax(logits_of(family, lm_head, naive.states(t, k + 1)[k], head.target_ids), 0)
                column = ids.index(int(batch.ids[b, label]))
                yield k, -log_q[column], int(log_q.argmax()) == column, []


def check(family: str, head: Any, verifier: Verifier, batch: Batch, features: Features, weights: list[float]) -> None:
    """Counts, hits, sums, parts, total and every gradient of the head's loss equal the naive walk's."""
    verifier.model.double()
    head.double().eval()
    head.rotary = ExactRotary(head.config.head_dim)
    features = Features(features.last.double(), features.layers.double(), features.choice)
    table = verifier.model.get_input_embeddings().weight * EMBEDDING_SCALE.get(family, 1.0)
    walk = eagle1_terms if head.kind == "eagle1" else mtp_terms
    found = list(walk(family, head, batch, features, table, verifier.lm_head))
    of_depth = [[one for one in found if one[0] == k] for k in range(head.config.depth)]
    assert min(map(len, of_depth)) > 0
    naive_total = sum(w * torch.stack([one[1] for one in its]).mean() for w, its in zip(weights, of_depth, strict=True))
    parameters = list(head.parameters())
    naive_gradients = torch.autograd.grad(naive_total, parameters)

    loss = head.loss(batch, features, verifier)
    assert loss.counts.tolist() == [len(its) for its in of_depth]
    assert loss.correct.tolist() == [sum(one[2] for one in its) for its in of_depth]
    assert loss.sums.tolist() == pytest.approx([sum(one[1].item() for one in its) for its in of_depth], rel=1e-6)
    for number, part in enumerate(loss.parts.values()):
        assert part.tolist() == pytest.approx([sum(one[3][number] for one in its) for its in of_depth], rel=1e-6)
    assert loss.total().item() == pytest.approx(naive_total.item(), rel=1e-6)
    gradients = torch.autograd.grad(loss.total(), parameters)
    for (name, _), mine, naively in zip(head.named_parameters(), gradients, naive_gradients, strict=True):
        assert naively.abs().max() > 0, name
        assert (mine - naively).abs().max() < 1e-6 * max(1.0, naively.abs().max().item()), name


@pytest.fixture
def batch(ids_of: Build, batch_of: Build) -> Batch:
    return batch_of([ids_of(21, 18), ids_of(22, 8), ids_of(23, 12)], SPANS)


@pytest.mark.usefixtures("keep_double")
@pytest.mark.parametrize("hass", [False, True], ids=["eagle1", "hass"])
@pytest.mark.parametrize(
    ("family", "pruned"),
    [
        ("llama", False),
        ("llama", True),
        ("qwen3", False),
        ("gpt2", False),
        ("gemma2", False),
        ("granite", True),
        ("cohere", False),
        ("phi", True),
    ],
)
def test_eagle1_loss_parts_and_gradients_equal_the_naive_walk(
    family: str, pruned: bool, hass: bool, batch: Batch, tiny: Build, tiny_eagle1: Build, features_of: Build,
    half_vocabulary: Tensor,
) -> None:  # fmt: skip
    verifier = biased(tiny(family))
    fields = {"depth": 3, "top_tokens": 10, "decay": 0.5, "cross_entropy": 0.3} if hass else {}
    head = tiny_eagle1(verifier, target_ids=half_vocabulary if pruned else None, **fields)
    names = ["regression", "cross_entropy", "top_tokens"] if hass else ["regression", "cross_entropy"]
    features = features_of(verifier, batch)
    assert list(head.loss(batch, features, verifier).parts) == names
    check(family, head, verifier, batch, features, [1.0, 0.5, 0.25] if hass else [1.0])


@pytest.mark.usefixtures("keep_double")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("family", "pruned"),
    [
        ("llama", False),
        ("llama", True),
        ("qwen3", False),
        ("gpt2", False),
        ("gemma2", False),
        ("granite", True),
        ("phi", False),
    ],
)
def test_mtp_loss_and_gradients_equal_the_naive_walk(
    family: str, pruned: bool, form: str, batch: Batch, tiny: Build, tiny_mtp: Build, features_of: Build,
    half_vocabulary: Tensor,
) -> None:  # fmt: skip
    """Gloeckle sums over heads; DeepSeek-V3 has λ / D; FastMTP has 0.6^k, normalised: 1, .6, .36 of 1.96."""
    verifier = biased(tiny(family))
    decay, weight = {"parallel": (1.0, 1.0), "sequential": (1.0, 0.3), "recursive": (0.6, 1.0)}[form]
    head = tiny_mtp(verifier, form, target_ids=half_vocabulary if pruned else None, depth=3, decay=decay, weight=weight)
    weights = {"parallel": [1.0] * 3, "sequential": [0.3 / 3] * 3, "recursive": [1 / 1.96, 0.6 / 1.96, 0.36 / 1.96]}[form]
    check(family, head, verifier, batch, features_of(verifier, batch), weights)


@pytest.mark.parametrize(
    ("form", "expected"),
    [("parallel", [0.3, 0.15, 0.075]), ("sequential", [0.6 / 3.5, 0.3 / 3.5, 0.15 / 3.5]),
     ("recursive", [0.6 / 3.5, 0.3 / 3.5, 0.15 / 3.5])],
)  # fmt: skip
def test_decay_and_weight_of_every_form(form: str, expected: list[float], tiny: Build, tiny_mtp: Build) -> None:
    """λ = 0.3, decay ½: a weighted sum, or a mean by weights that are normalised."""
    head = tiny_mtp(tiny("llama"), form, depth=3, decay=0.5, weight=0.3)
    assert head.weights().tolist() == pytest.approx(expected)


def test_case_58_eagle1_takes_means_over_values_and_positions(
    batch: Batch, tiny: Build, tiny_eagle1: Build, features_of: Build
) -> None:
    """An error of 2 in every value costs 1.5, one of a half 1/8; the cross-entropy weighs a tenth; sums become means."""
    verifier = tiny("llama")
    head = tiny_eagle1(verifier)
    goal = features_of(verifier, batch).last[0, :6]
    for error, cost in ((2.0, 1.5), (-0.5, 0.125)):
        found, _ = head.terms(goal + error, goal, verifier)
        assert found[0].item() == pytest.approx(6 * cost, rel=1e-5)
    loss = head.loss(batch, features_of(verifier, batch), verifier)
    regression, cross_entropy = (part.item() / loss.counts.item() for part in loss.parts.values())
    assert loss.total().item() == pytest.approx(regression + 0.1 * cross_entropy, rel=1e-5)


def test_eagle1_never_drafts_across_the_start_of_an_answer(
    tiny: Build, tiny_eagle1: Build, ids_of: Build, batch_of: Build, features_of: Build
) -> None:
    """Answers at 2..5 and 7..11: labels t + 2, from t = T - 1 on."""
    verifier = tiny("llama")
    head = tiny_eagle1(verifier, depth=2)
    batch = batch_of([ids_of(4, 12)], [[(2, 6), (7, 12)]])
    supervised = head.supervised(batch, features_of(verifier, batch))
    assert [step[0].nonzero()[:, 0].tolist() for step in supervised] == [[1, 2, 3, 6, 7, 8, 9], [1, 2, 6, 7, 8]]


def test_mtp_reads_the_mask_at_the_label(
    tiny: Build, tiny_mtp: Build, ids_of: Build, batch_of: Build, features_of: Build
) -> None:
    verifier = tiny("llama")
    batch = batch_of([ids_of(4, 9)], [[(3, 5), (7, 9)]])
    supervised = tiny_mtp(verifier, depth=3).supervised(batch, features_of(verifier, batch))
    assert [step[0].nonzero()[:, 0].tolist() for step in supervised] == [[1, 2, 5, 6], [0, 1, 4, 5], [0, 3, 4]]


HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle1": ("tiny_eagle1", {}),
    "hass": ("tiny_eagle1", {"depth": 3, "top_tokens": 10}),
    **{form: ("tiny_mtp", {"form": form, "depth": 3}) for form in FORMS},
}


@pytest.fixture(params=HEADS)
def new_head(request: pytest.FixtureRequest) -> Callable[[Verifier], DraftHead]:
    fixture, fields = HEADS[request.param]
    build = request.getfixturevalue(fixture)
    return lambda verifier, **more: build(verifier, **fields | more)


@pytest.mark.parametrize("spans", [[[], []], [[(0, 1)], []]], ids=["no answer", "a first token"])
def test_nothing_supervised_gives_exactly_zero_and_zero_gradients(
    spans: list[Any], new_head: Build, tiny: Build, ids_of: Build, batch_of: Build, features_of: Build
) -> None:
    verifier = tiny("llama")
    head = new_head(verifier)
    batch = batch_of([ids_of(1, 10), ids_of(2, 4)], spans)
    loss = head.loss(batch, features_of(verifier, batch), verifier)
    loss.total().backward()
    assert loss.total().item() == 0.0
    assert loss.counts.tolist() == [0] * head.config.depth
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None, name
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name


def test_a_batch_shorter_than_the_depth_is_no_error(new_head: Build, tiny: Build, batch_of: Build, features_of: Build) -> None:
    verifier = tiny("llama")
    head = new_head(verifier)
    batch = batch_of([[5, 10, 11]], [[(1, 3)]])
    loss = head.loss(batch, features_of(verifier, batch), verifier)
    assert loss.counts.tolist() == [1, 0, 0][: head.config.depth]
    assert torch.isfinite(loss.total())


def test_padding_order_and_micro_batches_change_nothing(
    new_head: Build, batch: Batch, tiny: Build, ids_of: Build, batch_of: Build, features_of: Build
) -> None:
    verifier = tiny("llama")
    head = new_head(verifier)
    rows = [ids_of(21, 18), ids_of(22, 8), ids_of(23, 12)]

    def run(picked: list[int], pad: int) -> tuple[Tensor, Tensor, list[Tensor]]:
        batch = batch_of([rows[i] for i in picked], [SPANS[i] for i in picked], pad)
        loss = head.loss(batch, features_of(verifier, batch), verifier)
        joint = torch.full((head.config.depth,), 10)
        return loss.sums.detach(), loss.counts, list(torch.autograd.grad(loss.total(joint), list(head.parameters())))

    single = [run([i], 0) for i in range(3)]
    for order, pad in (([0, 1, 2], 0), ([2, 0, 1], 95)):
        sums, counts, gradients = run(order, pad)
        torch.testing.assert_close(sums, sum(one[0] for one in single), rtol=1e-4, atol=1e-4)
        assert counts.tolist() == sum(one[1] for one in single).tolist()
        for i, gradient in enumerate(gradients):
            alone = sum(one[2][i] for one in single)
            assert (gradient - alone).abs().max() < 1e-4 * max(1.0, alone.abs().max().item())


def test_the_verifier_gets_no_gradient_and_autocast_changes_little(
    new_head: Build, batch: Batch, tiny: Build, features_of: Build
) -> None:
    verifier = tiny("llama")
    head = new_head(verifier)
    features = features_of(verifier, batch)
    found = []
    for half in (False, True):
        head.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = head.loss(batch, features, verifier)
        loss.total().backward()
        found.append((loss.total().item(), torch.cat([p.grad.flatten() for p in head.parameters()])))
    assert all(p.grad is None for p in verifier.model.parameters())
    assert found[1][1].dtype == torch.float32
    assert found[1][0] == pytest.approx(found[0][0], rel=2e-2)
    assert found[1][0] != found[0][0]
    assert torch.cosine_similarity(found[0][1], found[1][1], dim=0) > 0.98


def test_a_packed_verifier_teaches_the_same(new_head: Build, batch: Batch, tiny: Build, features_of: Build) -> None:
    """Through the whole lm_head, as `Verifier.load` lays it out on a CPU."""
    verifier = tiny("llama")
    head = new_head(verifier)
    features = features_of(verifier, batch)
    found = []
    for _ in range(2):
        total = head.loss(batch, features, verifier).total()
        found.append([total.detach(), *torch.autograd.grad(total, list(head.parameters()))])
        pack_linears(verifier.model)
    assert type(verifier.lm_head) is PackedLinear
    for plain, packed in zip(*found, strict=True):
        assert (plain - packed).abs().max() < 1e-5 * max(1.0, plain.abs().max().item())


def test_a_verifier_in_bfloat16_teaches_float32_heads(new_head: Build, batch: Batch, tiny: Build, features_of: Build) -> None:
    """As the training loop has it: states and lm_head in bfloat16, autocast, weights and gradients in float32."""
    verifier = tiny("llama")
    head = new_head(verifier)
    exact = head.loss(batch, features_of(verifier, batch), verifier).total().item()
    features = features_of(verifier, batch)
    verifier.model.to(torch.bfloat16)
    features = Features(features.last.bfloat16(), features.layers, features.choice)
    with torch.autocast("cpu", torch.bfloat16):
        loss = head.loss(batch, features, verifier)
    loss.total().backward()
    assert {loss.sums.dtype, *(p.grad.dtype for p in head.parameters())} == {torch.float32}
    assert loss.total().item() == pytest.approx(exact, rel=3e-2)


def test_noise_is_uniform_and_only_while_training(batch: Batch, tiny: Build, tiny_eagle1: Build, features_of: Build) -> None:
    verifier = tiny("llama")
    features = features_of(verifier, batch)
    head = tiny_eagle1(verifier, noise=0.1)
    torch.manual_seed(0)
    noise = (head.noisy(batch, features).last - features.last)[batch.mask]
    assert noise.abs().max() <= 0.1 + 1e-6
    assert noise.abs().max() > 0.098
    assert noise.mean().abs() < 0.005
    assert noise.var().item() == pytest.approx(0.2**2 / 12, rel=0.1)
    losses = [head.loss(batch, features, verifier).total().item() for _ in range(2)]
    assert losses[0] != losses[1]
    assert head.eval().noisy(batch, features) is features
    quiet = tiny_eagle1(verifier).loss(batch, features, verifier).total().item()
    assert head.loss(batch, features, verifier).total().item() == quiet
    assert losses[0] != quiet


def test_noise_by_length_is_that_of_512_tokens(batch: Batch, tiny: Build, tiny_eagle1: Build, features_of: Build) -> None:
    """Samples of 18, 8 and 12 tokens: 512 / length times 0.001."""
    verifier = tiny("llama")
    features = features_of(verifier, batch)
    noisy = tiny_eagle1(verifier, noise=0.001, noise_by_length=True).noisy(batch, features).last
    for row, length in enumerate((18, 8, 12)):
        largest = (noisy - features.last)[row, :length].abs().max().item()
        assert 0.97 < largest / (0.001 * 512 / length) <= 1.001


def test_the_regression_goal_has_no_noise(batch: Batch, tiny: Build, tiny_eagle1: Build, features_of: Build) -> None:
    """A layer that says nothing (f = 0) has the same loss whatever the noise on its inputs."""
    verifier = tiny("llama")
    features = features_of(verifier, batch)
    head = tiny_eagle1(verifier, noise=5.0)
    with torch.no_grad():
        head.fc.weight.zero_()
    first, second = (head.loss(batch, features, verifier).parts["regression"].item() for _ in range(2))
    assert first == second > 0


@pytest.mark.parametrize("chunk", [1, 7, 40, 41])
def test_case_35_every_chunk_size_of_mixed_terms_is_the_same(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(40, 5, generator=generator, dtype=torch.float64)
    goal = torch.randn(40, 5, generator=generator, dtype=torch.float64)
    weights = torch.tensor([0.3, 2.0], dtype=torch.float64)

    def terms(part: Tensor, its: slice) -> tuple[Tensor, Tensor]:
        return torch.stack([(part * goal[its]).sin().sum(), part.pow(3).sum()]), (part > goal[its]).all(1).sum()

    monkeypatch.setattr("headstart.heads.losses.CHUNK_ROWS", chunk)
    mine = hidden.clone().requires_grad_()
    loss, parts, hits = chunked_terms(mine, terms, weights)
    (loss * 0.7).backward()
    whole = hidden.clone().requires_grad_()
    found = torch.stack([(whole * goal).sin().sum(), whole.pow(3).sum()])
    ((0.3 * found[0] + 2 * found[1]) * 0.7).backward()
    assert parts.tolist() == pytest.approx(found.tolist())
    assert loss.item() == pytest.approx(0.3 * found[0].item() + 2 * found[1].item())
    assert hits.item() == (hidden > goal).all(1).sum().item()
    assert (mine.grad - whole.grad).abs().max() < 1e-9


def test_mtp_starts_near_the_uniform_distribution(batch: Batch, tiny: Build, tiny_mtp: Build, features_of: Build) -> None:
    for family, scale in (("llama", 100.0), ("granite", 1.0), ("cohere", 1.0)):
        verifier = tiny(family)
        with torch.no_grad():
            verifier.lm_head.weight *= scale
        for form in FORMS:
            head = tiny_mtp(verifier, form)
            head.initialise(verifier)
            log_q = head.first_draft(batch, features_of(verifier, batch), verifier, batch.mask)
            assert 0.3 < log_q.std(-1).mean().item() < 3
