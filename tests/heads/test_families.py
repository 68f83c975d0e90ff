"""Every family of verifiers with every kind of head: one training step, and text that is the verifier's, token for token."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headstart.errors import UserError
from headstart.evaluation.decode import speculate
from headstart.evaluation.tree import AnyTree, DynamicTree, StaticTree, chain
from headstart.heads.verifier import Verifier

Build = Callable[..., Any]
FAMILIES = ["llama", "llama3rope", "llama_biased", "llama_tied", "llama_wide", "qwen2", "qwen2_hybrid", "qwen3", "qwen3_moe",
            "mistral", "mixtral", "gemma", "gemma2", "gemma3", "phi", "phi3", "stablelm", "gpt_neox", "gpt2", "granite",
            "cohere", "cohere2", "olmo2", "olmo3", "gpt_oss", "deepseek_v3"]  # fmt: skip
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "medusa": ("tiny_medusa", {}),
    "medusa_shared": ("tiny_medusa", {"lm_head": "shared", "targets": "soft"}),
    "eagle1": ("tiny_eagle1", {}),
    "hass": ("tiny_eagle1", {"depth": 3, "top_tokens": 10}),
    "eagle3": ("tiny_eagle3", {}),
    "eagle3.1": ("tiny_eagle3", {"fc_norm": True, "norm_output": True}),
    "parallel": ("tiny_mtp", {"form": "parallel"}),
    "sequential": ("tiny_mtp", {"form": "sequential"}),
    "recursive": ("tiny_mtp", {"form": "recursive"}),
}
TREES: dict[str, AnyTree] = {
    "chain": chain(3),
    "static": StaticTree([[0], [1], [2], [0, 0], [0, 1], [1, 0], [2, 1], [0, 0, 0]]),
    "dynamic": DynamicTree(depth=3, top_k=3, nodes=9),
}
PROMPTS_OF = [(51, 7), (52, 3)]  # seed, tokens


def every_tree() -> list[Any]:
    """Each pair of a family and a kind with one of the trees; with the other two in the slow run."""
    return [
        pytest.param(family, kind, tree, marks=[] if (f + k) % len(TREES) == t else [pytest.mark.slow])
        for f, family in enumerate(FAMILIES)
        for k, kind in enumerate(HEADS)
        for t, tree in enumerate(TREES)
    ]


@pytest.fixture(scope="module")
def shared() -> dict[str, tuple[Verifier, list[list[int]]]]:
    """One verifier of each family and its greedy text, for all tests here: they only read it."""
    return {}


@pytest.fixture
def known(shared: dict[str, Any], tiny: Build, ids_of: Build) -> Build:
    """`known(family)`: the verifier, and what it writes by full forward passes of transformers alone."""

    def get(family: str) -> tuple[Verifier, list[list[int]]]:
        if family not in shared:
            verifier = tiny(family)
            verifier.facts = dataclasses.replace(verifier.facts, stop_ids=())
            shared[family] = verifier, [greedy(verifier, ids_of(*its), 8) for its in PROMPTS_OF]
        return shared[family]

    return get


@pytest.fixture
def head_of(request: pytest.FixtureRequest) -> Build:
    def build(kind: str, verifier: Verifier) -> Any:
        fixture, fields = HEADS[kind]
        return request.getfixturevalue(fixture)(verifier, **fields)

    return build


@torch.no_grad()
def greedy(verifier: Verifier, prompt: list[int], tokens: int) -> list[int]:
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(int(verifier.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("family", FAMILIES)
def test_states_and_logits_are_those_of_transformers(family: str, known: Build, ids_of: Build) -> None:
    """Through soft-capping, scaled logits and biases; the embeddings are what enters the first layer, but for positions."""
    verifier, _ = known(family)
    ids = torch.tensor([ids_of(1, 11), ids_of(2, 11)])
    with torch.no_grad():
        own = verifier.model(input_ids=ids, output_hidden_states=True, use_cache=False)
    features = verifier.features(ids, (1, 3))
    assert torch.equal(features.last, own.hidden_states[-1])
    assert torch.equal(features.layers, torch.cat([own.hidden_states[1], own.hidden_states[3]], -1))
    scale = max(1.0, own.logits.abs().max().item())
    assert (verifier.logits(features.last) - own.logits).abs().max() < 1e-5 * scale
    if family != "gpt2":
        assert torch.allclose(verifier.embed(ids), own.hidden_states[0], atol=1e-6)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_training_step_lowers_the_loss_as_much_as_the_gradient_says(
    family: str, kind: str, known: Build, head_of: Build, ids_of: Build, batch_of: Build, features_of: Build
) -> None:
    """A step along the gradient that should take a ten-thousandth off the loss does."""
    verifier, _ = known(family)
    head = head_of(kind, verifier)
    batch = batch_of([ids_of(21, 18), ids_of(22, 9)], [[(2, 18)], [(3, 9)]])
    features = features_of(verifier, batch, head.needs)
    loss = head.loss(batch, features, verifier)
    assert loss.counts.min() > 0
    loss.total().backward()
    before, parameters = loss.total().item(), list(head.parameters())
    steepness = 0.0
    for name, parameter in head.named_parameters():
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().max() > 0, name
        steepness += parameter.grad.double().square().sum().item()
    with torch.no_grad():
        for parameter in parameters:
            parameter -= parameter.grad * (1e-4 * before / steepness)
        after = head.loss(batch, features, verifier).total().item()
    assert before - after == pytest.approx(1e-4 * before, rel=0.1)


@pytest.mark.parametrize(("family", "kind", "tree"), every_tree())
def test_trees_write_what_the_verifier_writes(
    family: str, kind: str, tree: str, known: Build, head_of: Build, ids_of: Build
) -> None:
    verifier, texts = known(family)
    prompts = [ids_of(*its) for its in PROMPTS_OF]
    answers, _ = speculate(verifier, head_of(kind, verifier), TREES[tree], prompts, 8)
    assert [answer.tokens for answer in answers] == texts


def model_of(model_type: str, **config: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config))


def test_embeddings_of_another_size_are_refused(sizes: dict[str, Any]) -> None:
    model = model_of("opt", **sizes, ffn_dim=64, word_embed_proj_dim=16)
    with pytest.raises(UserError, match=r"^verifier opt: hidden states of 32, but embeddings of 16 and an lm_head for 16; not"):
        Verifier(model, None, "opt")


@pytest.mark.parametrize("model_type", ["bloom", "mpt", "xlstm"])
def test_a_verifier_without_a_length_limit_or_a_rollback_is_refused_in_one_line(model_type: str, sizes: dict[str, Any]) -> None:
    """Their positions are a bias on scores, or their memory a state."""
    own = {key: size for key, size in sizes.items() if key not in ("max_position_embeddings", "initializer_range")}
    widths = {"mpt": {"d_model": 32, "n_heads": 4, "n_layers": 4}, "xlstm": {"num_heads": 4}}
    with pytest.raises(UserError, match=model_type) as caught:
        Verifier(model_of(model_type, **own | widths.get(model_type, {})), None, model_type)
    assert "\n" not in str(caught.value)
