"""What goes wrong between a verifier's states and a trained head: masks, shifts, shapes, rotary, memory, leaks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedTokenizerFast

from headstart.errors import UserError
from headstart.heads import losses
from headstart.heads.base import DraftHead, target_rows
from headstart.heads.batch import Batch
from headstart.heads.verifier import Features, Verifier

Build = Callable[..., Any]
LAYERS = (1, 2, 3)


def where(supervised: Tensor) -> list[list[int]]:
    """Positions of the batch's only row that each depth supervises."""
    return [step[0].nonzero()[:, 0].tolist() for step in supervised]


def test_case_03_positions_and_labels_of_three_answer_tokens(
    tiny: Build, tiny_eagle3: Build, ids_of: Build, batch_of: Build, features_of: Build
) -> None:
    """T = 4: step 0 is supervised at T - 1 and T (labels T + 1, T + 2), step 1 at T - 1 alone, then nothing.

    The mask read at the position instead of the label would give T, T + 1, T + 2.
    """
    verifier = tiny("llama")
    batch = batch_of([ids_of(3, 10)], [[(4, 7)]])
    supervised = tiny_eagle3(verifier, target_ids=torch.arange(96)).supervised(batch, features_of(verifier, batch, LAYERS))
    assert where(supervised) == [[3, 4], [3], [], []]


@pytest.mark.parametrize("targets", ["hard", "soft"])
def test_case_04_labels_and_positions_of_one_answer(
    targets: str, tiny: Build, tiny_medusa: Build, batch_of: Build, features_of: Build
) -> None:
    """Four prompt tokens, the answer 10 11 12: label-index masking, nothing wraps around, nothing of the prompt."""
    verifier = tiny("llama")
    batch = batch_of([[20, 21, 22, 23, 10, 11, 12]], [[(4, 7)]])
    head, features = tiny_medusa(verifier, targets=targets), features_of(verifier, batch)
    supervised = head.supervised(batch, features)
    assert where(supervised) == [[2, 3, 4], [1, 2, 3], [0, 1, 2]]
    wanted, index = target_rows(supervised)
    learned = head.targets(batch, features, verifier, wanted)
    own = verifier.model(input_ids=batch.ids).logits[0].softmax(-1)
    for i, positions in enumerate(where(supervised)):
        rows = learned[[int(index[0, t + 1 + i]) for t in positions]]
        if targets == "hard":
            assert rows.tolist() == [10, 11, 12]
        else:
            assert (rows - own[3:6]).abs().max() < 1e-5


def test_case_04_labels_past_the_end_of_a_short_sample_are_ignored(
    tiny: Build, tiny_medusa: Build, batch_of: Build, features_of: Build
) -> None:
    verifier = tiny("llama")
    batch = batch_of([[20, 10, 11], [20, 10, 11, 12, 13, 14, 15]], [[(1, 3)], [(1, 7)]])
    supervised = tiny_medusa(verifier, heads=5).supervised(batch, features_of(verifier, batch))
    assert supervised.sum(-1).T.tolist() == [[1, 0, 0, 0, 0], [5, 4, 3, 2, 1]]


def test_case_08_the_head_size_is_the_verifiers_own(tiny: Build, tiny_eagle3: Build) -> None:
    """Qwen3 has 4 heads of 24 in a hidden size of 32."""
    for family, size in (("qwen3", 24), ("llama", 8)):
        verifier = tiny(family)
        head = tiny_eagle3(verifier)
        attention = head.midlayer.self_attn
        assert head.config.head_dim == verifier.facts.head_dim == size
        assert attention.q_proj.weight.shape == (4 * size, 64)
        assert attention.k_proj.weight.shape == attention.v_proj.weight.shape == (2 * size, 64)
        assert attention.o_proj.weight.shape == (32, 4 * size)
        assert head.fc.weight.shape == (32, 96)


@pytest.mark.parametrize("tied", [True, False])
def test_case_09_where_the_file_holds_both_the_configuration_decides(tied: bool, tiny: Build, tmp_path: Path) -> None:
    """A tied verifier whose file has another lm_head beside the embedding: tied or refused, never quietly untied."""
    tiny("llama", tie_word_embeddings=False).model.save_pretrained(tmp_path)
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    try:
        verifier = Verifier.load(str(tmp_path), device="cpu")
    except UserError as error:
        assert tied
        assert "lm_head" in str(error)  # noqa: PT017
        return
    table = verifier.model.get_input_embeddings().weight
    assert torch.equal(verifier.lm_head.weight, table if tied else table + 1)


def test_case_23_the_draft_rotates_with_the_verifiers_theta(tiny: Build, tiny_eagle3: Build) -> None:
    slow = tiny("llama", rope_parameters={"rope_type": "default", "rope_theta": 500_000.0})
    assert slow.facts.rope_parameters == {"rope_type": "default", "rope_theta": 500_000.0}
    position = torch.tensor([[5]])
    slow_cos, fast_cos = (tiny_eagle3(verifier).rotary(position)[0].flatten() for verifier in (slow, tiny("llama")))
    expected = torch.tensor([5 * 500_000.0 ** (-i / 4) for i in range(4)] * 2).cos()
    assert torch.allclose(slow_cos, expected)
    assert (slow_cos - fast_cos).abs().max() > 0.05


def test_case_25_a_partly_rotating_verifier_keeps_its_other_dimensions(tiny: Build, ids_of: Build) -> None:
    """StableLM, factor 0.25 of head size 8: two dimensions turn, six are cached as projected."""
    verifier = tiny("stablelm")
    projected: list[Tensor] = []
    handle = verifier.layers[0].self_attn.k_proj.register_forward_hook(lambda *args: projected.append(args[2]))
    cache = verifier.new_cache(1, 16)
    verifier.prefill([ids_of(4, 9)], cache)
    handle.remove()
    keys = projected[0].view(1, 9, 2, 8).transpose(1, 2)
    stored = cache.layers[0].keys[:, :, :9]
    assert torch.equal(stored[..., 2:], keys[..., 2:])
    assert (stored[:, :, 1:, :2] - keys[:, :, 1:, :2]).abs().max() > 1e-3


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_case_33_a_short_row_beside_a_long_one_is_finite_and_the_same(
    kind: str, attention: str, tiny: Build, tiny_medusa: Build, tiny_eagle3: Build, ids_of: Build, batch_of: Build
) -> None:
    """Lengths 3 (shorter than the steps) and 9, padded: loss and gradients are the sum of both rows alone."""
    verifier = tiny("llama")
    verifier.model.set_attn_implementation(attention)
    head: DraftHead = tiny_medusa(verifier) if kind == "medusa" else tiny_eagle3(verifier, target_ids=torch.arange(96))
    rows, spans = [ids_of(5, 3), ids_of(6, 9)], [[(1, 3)], [(4, 9)]]

    def run(picked: list[int]) -> tuple[Tensor, list[Tensor]]:
        batch = batch_of([rows[i] for i in picked], [spans[i] for i in picked])
        features = verifier.features(batch.ids, head.needs)
        features = Features(features.last, features.layers, verifier.logits(features.last).argmax(-1))
        loss = head.loss(batch, features, verifier)
        total = loss.total(torch.full_like(loss.counts, 7))
        return loss.sums.detach(), list(torch.autograd.grad(total, list(head.parameters()), allow_unused=True))

    parts = [run([0]), run([1])]
    sums, gradients = run([0, 1])
    assert torch.isfinite(sums).all()
    assert (sums - sum(part[0] for part in parts)).abs().max() < 1e-4
    for i, gradient in enumerate(gradients):
        alone = sum(part[1][i] for part in parts)
        assert torch.isfinite(gradient).all()
        assert (gradient - alone).abs().max() < 1e-5 * max(1.0, alone.abs().max().item())


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize(
    ("kind", "supervised"),
    [("medusa", 60), ("medusa", 500), ("medusa, shared", 60), ("medusa, soft", 60), ("eagle3", 60), ("eagle3, whole", 60)],
)
def test_case_35_no_tensor_of_all_tokens_times_the_vocabulary(
    kind: str, supervised: int, tiny: Build, tiny_medusa: Build, tiny_eagle3: Build, ids_of: Build, batch_of: Build
) -> None:
    """V = 32,000 and S = 512: [S, V] would be 16.4 million elements; a chunk of rows or the supervised ones may be."""
    vocabulary, draft = 32_000, 8_000
    verifier = tiny("llama", vocab_size=vocabulary, num_hidden_layers=4, max_position_embeddings=512, hidden_size=16)
    batch: Batch = batch_of([ids_of(7, 512, vocabulary)], [[(512 - supervised, 512)]])
    features = verifier.features(batch.ids, LAYERS if "eagle3" in kind else ())
    features = Features(features.last, features.layers, batch.ids.roll(-1, 1))
    few = torch.arange(0, vocabulary, 4)
    head: DraftHead = {
        "medusa": lambda: tiny_medusa(verifier),
        "medusa, shared": lambda: tiny_medusa(verifier, lm_head="shared"),
        "medusa, soft": lambda: tiny_medusa(verifier, target_ids=few, targets="soft"),
        "eagle3": lambda: tiny_eagle3(verifier, target_ids=few),
        "eagle3, whole": lambda: tiny_eagle3(verifier, target_ids=torch.arange(vocabulary)),
    }[kind]()
    pruned = kind in ("medusa, soft", "eagle3")
    with LargestTensor() as mode:
        loss = head.loss(batch, features, verifier)
        loss.total().backward()
    assert loss.counts[0] > 0
    rows = min(supervised, losses.CHUNK_ROWS)
    assert mode.elements <= max(rows * (draft if pruned else vocabulary), vocabulary * 16)
    assert mode.elements < 512 * vocabulary


@pytest.mark.parametrize("kind", ["medusa", "medusa, soft", "eagle3"])
def test_case_52_training_a_copy_of_the_verifiers_weights_leaves_the_verifier_alone(
    kind: str, tiny: Build, tiny_medusa: Build, tiny_eagle3: Build, ids_of: Build, batch_of: Build
) -> None:
    verifier = tiny("llama", tie_word_embeddings=True)
    before = verifier.fingerprint
    if kind.startswith("medusa"):
        head = tiny_medusa(verifier, targets="soft" if "soft" in kind else "hard")
        head.initialise(verifier)
    else:
        head = tiny_eagle3(verifier)
        head.initialise(verifier)
    batch = batch_of([ids_of(8, 20), ids_of(9, 12)], [[(3, 20)], [(2, 12)]])
    features = verifier.features(batch.ids, head.needs)
    assert not features.last.requires_grad
    assert not features.layers.requires_grad
    features = Features(features.last, features.layers, verifier.logits(features.last).argmax(-1))
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.1)
    weights = [parameter.detach().clone() for parameter in head.parameters()]
    for _ in range(2):
        optimizer.zero_grad()
        head.loss(batch, features, verifier).total().backward()
        optimizer.step()
    assert all(not torch.equal(old, new) for old, new in zip(weights, head.parameters(), strict=True))
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in verifier.model.parameters())
    assert not verifier.model.training
    del verifier.fingerprint
    assert verifier.fingerprint == before


def test_case_53_shifting_the_tokens_by_one_changes_every_step(
    tiny: Build, tiny_eagle3: Build, ids_of: Build, batch_of: Build, features_of: Build
) -> None:
    """Step k embeds the true token t + 1 + k; with everything else equal, other tokens give another loss."""
    verifier = tiny("llama")
    head = tiny_eagle3(verifier)
    batch = batch_of([ids_of(11, 16)], [[(2, 16)]])
    features = features_of(verifier, batch, LAYERS)
    moved = Batch(batch.ids.roll(1, 1), batch.mask, batch.lengths)
    right, wrong = (head.loss(given, features, verifier) for given in (batch, moved))
    assert right.counts.tolist() == wrong.counts.tolist()
    for a, b in zip(right.sums.tolist(), wrong.sums.tolist(), strict=True):
        assert abs(a - b) > 1e-2
