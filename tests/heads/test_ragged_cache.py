"""Tree passes, commits and rollbacks against transformers' own forward pass over each path alone."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from headstart.errors import UserError
from headstart.heads.cache import RaggedCache, additive, visible
from headstart.heads.verifier import Features, Verifier

Build = Callable[..., Any]
FAMILIES = ["llama", "llama3rope", "qwen2", "qwen2_hybrid", "qwen3", "gpt2", "gemma2", "gemma3", "mistral", "granite",
            "cohere", "olmo2", "phi3", "stablelm", "gpt_neox", "mixtral", "qwen3_moe"]  # fmt: skip
# breadth first, eight levels deep: deeper than the sliding windows of six
DEEP = [-1, 0, 0, 0, 1, 1, 2, 4, 6, 7, 7, 9, 10, 11, 13, 14, 14]


def ancestry(parents: Sequence[int]) -> tuple[Tensor, Tensor, list[list[int]]]:
    """tree [1, N, N], depth [1, N] and each node's path from the root, of parent indices."""
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    tree = torch.zeros(1, len(parents), len(parents), dtype=torch.bool)
    for node, path in enumerate(paths):
        tree[0, node, path] = True
    return tree, torch.tensor([[len(path) - 1 for path in paths]]), paths


def own_logits(verifier: Verifier, ids: Sequence[int]) -> Tensor:
    """Logits behind the last token, by a plain forward pass without any cache."""
    with torch.no_grad():
        return verifier.model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0, -1]


def tokens_at(verifier: Verifier, cache: RaggedCache, ids: Sequence[Sequence[int]], parents: Sequence[int]) -> Features:
    tree, depth, _ = ancestry(parents)
    return verifier.decode(torch.tensor(ids), tree, depth, cache, (1,))


def cache_argument(verifier: Verifier) -> str:
    """Its name changed within transformers 5."""
    return "cache" if "cache" in inspect.signature(verifier.model.forward).parameters else "past_key_values"


def assert_like_a_prefill(verifier: Verifier, cache: RaggedCache, rows: Sequence[Sequence[int]]) -> None:
    """Keys and values of every row are those that transformers stores for the same tokens."""
    assert cache.lengths == [len(row) for row in rows]
    assert cache.pending == 0
    for b, row in enumerate(rows):
        fresh = DynamicCache()  # built without a config it keeps everything, past any sliding window
        with torch.no_grad():
            verifier.model(input_ids=torch.tensor([list(row)]), use_cache=True, **{cache_argument(verifier): fresh})
        for mine, its in zip(cache.layers, fresh.layers, strict=True):
            for kept, stored in ((mine.keys, its.keys), (mine.values, its.values)):
                scale = max(1.0, stored.abs().max().item())
                assert (kept[b, :, : len(row)] - stored[0]).abs().max() < 1e-5 * scale


@pytest.mark.parametrize("family", FAMILIES)
def test_case_31_every_node_equals_its_path_run_alone(family: str, tiny: Build, ids_of: Build) -> None:
    """Two rows of different lengths, different tokens, one tree; windows of six are smaller than depth and prefix."""
    verifier = tiny(family)
    prompts = [ids_of(1, 11), ids_of(2, 4)]
    cache = verifier.new_cache(2, 40)
    verifier.prefill(prompts, cache)
    nodes = [ids_of(3, len(DEEP)), ids_of(4, len(DEEP))]
    logits = verifier.logits(tokens_at(verifier, cache, nodes, DEEP).last)
    assert cache.lengths == [11, 4]
    for b, prompt in enumerate(prompts):
        for node, path in enumerate(ancestry(DEEP)[2]):
            alone = own_logits(verifier, prompt + [nodes[b][i] for i in path])
            scale = max(1.0, alone.abs().max().item())
            assert (logits[b, node] - alone).abs().max() < 1e-5 * scale, (b, node)


@pytest.mark.parametrize("family", FAMILIES)
def test_case_26_and_32_after_a_scattered_commit_all_is_as_if_nothing_else_had_been_tried(
    family: str, tiny: Build, ids_of: Build
) -> None:
    """Accept nodes 0, 2, 4 of five in one row and 0, 1 in the other; then again; then plain decoding."""
    verifier = tiny(family)
    parents = [-1, 0, 0, 1, 2]
    rows = [ids_of(5, 9), ids_of(6, 5)]
    cache = verifier.new_cache(2, 40)
    verifier.prefill(rows, cache)
    for number, accepted in enumerate(([[0, 2, 4], [0, 1]], [[0], [0, 2, 4]], [[0, 1, 3], [0, 2]])):
        nodes = [ids_of(10 * number + b, 5) for b in (7, 8)]
        features = tokens_at(verifier, cache, nodes, parents)
        counts = [len(path) for path in accepted]
        cache.commit(torch.tensor([path + [0] * (3 - len(path)) for path in accepted]), counts)
        rows = [row + [nodes[b][i] for i in accepted[b]] for b, row in enumerate(rows)]
        assert_like_a_prefill(verifier, cache, rows)
        for b, row in enumerate(rows):
            own = verifier.features(torch.tensor([row]), (1,))
            scale = max(1.0, own.layers.abs().max().item())
            for i, node in enumerate(accepted[b]):  # states for the next draft, gathered by the same indices
                position = len(row) - counts[b] + i
                assert (features.layers[b, node] - own.layers[0, position]).abs().max() < 1e-5 * scale
    one = tokens_at(verifier, cache, [[5], [6]], [-1])
    for b, row in enumerate(rows):
        alone = own_logits(verifier, [*row, 5 + b])
        assert (verifier.logits(one.last[b, 0]) - alone).abs().max() < 1e-5 * max(1.0, alone.abs().max().item())


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "qwen2_hybrid"])
def test_case_26_a_rejection_past_the_window_is_rolled_back(family: str, tiny: Build, ids_of: Build) -> None:
    """Window 6: prefill 12, verify 5 in a chain, reject 3."""
    verifier = tiny(family)
    prompt, drafted = ids_of(9, 12), ids_of(10, 5)
    cache = verifier.new_cache(1, 32)
    verifier.prefill([prompt], cache)
    tokens_at(verifier, cache, [drafted], [-1, 0, 1, 2, 3])
    cache.advance([2])
    following = ids_of(11, 4)
    logits = verifier.logits(tokens_at(verifier, cache, [following], [-1, 0, 1, 2]).last)[0]
    for i in range(4):
        alone = own_logits(verifier, prompt + drafted[:2] + following[: i + 1])
        assert (logits[i] - alone).abs().max() < 1e-4


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mistral"])
def test_case_34_a_ragged_prefill_equals_each_prompt_alone(family: str, tiny: Build, ids_of: Build) -> None:
    verifier = tiny(family)
    prompts = [ids_of(12, 2), ids_of(13, 5), ids_of(14, 9)]
    cache = verifier.new_cache(3, 16)
    features, ids = verifier.prefill(prompts, cache, (1, 3))
    assert ids.tolist() == [prompt + [0] * (9 - len(prompt)) for prompt in prompts]
    assert_like_a_prefill(verifier, cache, prompts)
    for b, prompt in enumerate(prompts):
        own = verifier.features(torch.tensor([prompt]), (1, 3))
        scale = max(1.0, own.layers.abs().max().item())
        assert (features.last[b, : len(prompt)] - own.last[0]).abs().max() < 1e-5 * scale
        assert (features.layers[b, : len(prompt)] - own.layers[0]).abs().max() < 1e-5 * scale


def test_keep_rows_drops_and_reorders_sequences(tiny: Build, ids_of: Build) -> None:
    verifier = tiny("llama")
    prompts = [ids_of(15, 3), ids_of(16, 7), ids_of(17, 5)]
    cache = verifier.new_cache(3, 16)
    verifier.prefill(prompts, cache)
    cache.keep_rows([2, 0])
    kept = [prompts[2], prompts[0]]
    assert_like_a_prefill(verifier, cache, kept)
    logits = verifier.logits(tokens_at(verifier, cache, [[8], [9]], [-1]).last)[:, 0]
    for b, row in enumerate(kept):
        assert (logits[b] - own_logits(verifier, [*row, 8 + b])).abs().max() < 1e-4


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_case_31_siblings_share_a_position(family: str, tiny: Build, ids_of: Build) -> None:
    """Eight cached tokens, a root, two children, a grandchild of each: positions 8 9 9 10 10."""
    verifier = tiny(family)
    cache = verifier.new_cache(1, 16)
    verifier.prefill([ids_of(18, 8)], cache)
    seen: list[list[int]] = []
    handle = verifier.decoder.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["position_ids"].tolist()[0]), with_kwargs=True
    )
    tokens_at(verifier, cache, [[1, 2, 3, 4, 5]], [-1, 0, 0, 1, 2])
    handle.remove()
    assert seen == [[8, 9, 9, 10, 10]]


def test_a_tree_of_its_own_for_every_row(tiny: Build, ids_of: Build) -> None:
    verifier = tiny("mistral")
    prompts = [ids_of(19, 10), ids_of(20, 7)]
    cache = verifier.new_cache(2, 32)
    verifier.prefill(prompts, cache)
    shapes = [[-1, 0, 0, 2, 3], [-1, 0, 1, 2, 0]]
    trees, depths, paths = zip(*map(ancestry, shapes), strict=True)
    nodes = [ids_of(21, 5), ids_of(22, 5)]
    features = verifier.decode(torch.tensor(nodes), torch.cat(trees), torch.cat(depths), cache)
    for b, prompt in enumerate(prompts):
        for node, path in enumerate(paths[b]):
            alone = own_logits(verifier, prompt + [nodes[b][i] for i in path])
            assert (verifier.logits(features.last[b, node]) - alone).abs().max() < 1e-4


def test_a_cache_that_is_too_small_says_so(tiny: Build, ids_of: Build) -> None:
    verifier = tiny("llama")
    cache = verifier.new_cache(1, 6)
    verifier.prefill([ids_of(23, 5)], cache)
    with pytest.raises(AssertionError, match="cache of 6 slots is too small for 7 tokens"):
        tokens_at(verifier, cache, [[1, 2]], [-1, 0])


def seen_naively(lengths: list[int], tree: Tensor, depth: Tensor, window: int | None) -> Tensor:
    batch, queries, tokens = len(lengths), tree.shape[-2], tree.shape[-1]
    out = torch.zeros(batch, queries, max(lengths) + tokens, dtype=torch.bool)
    for b in range(batch):
        of_row, depths = tree[b % tree.shape[0]], depth[b % depth.shape[0]].tolist()
        for i in range(queries):
            position = lengths[b] + depths[tokens - queries + i]
            for slot in range(lengths[b] + tokens):
                if slot < lengths[b]:
                    key_position, linked = slot, True
                else:
                    key_position, linked = lengths[b] + depths[slot - lengths[b]], bool(of_row[i, slot - lengths[b]])
                out[b, i, slot] = linked and (window is None or position - key_position < window)
    return out


@pytest.mark.parametrize("window", [None, 1, 2, 6, 50])
@pytest.mark.parametrize("lengths", [[0], [7], [3, 3], [9, 2, 5], [0, 4]])
def test_visible_slots_equal_the_naive_loop(lengths: list[int], window: int | None) -> None:
    tree, depth, _ = ancestry(DEEP)
    for queries in (len(DEEP), 5, 1):  # the last ones only: a tree written level by level
        mine = visible(lengths, tree[:, -queries:], depth, window)
        assert torch.equal(mine, seen_naively(lengths, tree[:, -queries:], depth, window))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_case_33_hidden_slots_get_a_finite_bias(dtype: torch.dtype) -> None:
    seen = torch.tensor([[[True, False], [False, False]]])
    mask = additive(seen, dtype)
    assert mask.shape == (1, 1, 2, 2)
    assert mask.dtype == dtype
    assert mask[0, 0, 0].tolist() == [0.0, torch.finfo(dtype).min]
    assert torch.isfinite(mask).all()
    assert torch.isfinite(mask.softmax(-1)).all()  # a row that sees nothing stays finite


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_case_33_rows_of_three_and_nine_tokens_stay_finite_and_equal(attention: str, tiny: Build, ids_of: Build) -> None:
    verifier = tiny("llama")
    verifier.model.set_attn_implementation(attention)
    prompts = [ids_of(24, 3), ids_of(25, 9)]
    cache = verifier.new_cache(2, 16)
    features, _ = verifier.prefill(prompts, cache, (2,))
    assert torch.isfinite(features.last).all()
    for b, prompt in enumerate(prompts):
        logits = verifier.logits(features.last[b, len(prompt) - 1])
        assert (logits - own_logits(verifier, prompt)).abs().max() < 1e-4


def longrope(factor: float) -> dict[str, Any]:
    short, long = [1.0] * 4, [factor] * 4
    return {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": short, "long_factor": long,
            "original_max_position_embeddings": 10}  # fmt: skip


PLAIN = {"num_key_value_heads": 2, "intermediate_size": 64, "head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
OTHERS: dict[str, dict[str, Any]] = {
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "smollm3": PLAIN | {"no_rope_layers": [1, 1, 1, 0]},
    "gpt_oss": PLAIN | {"sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2,
                        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "deepseek_v3": EXPERTS | {"num_key_value_heads": 4, "intermediate_size": 64, "head_dim": 4, "n_routed_experts": 4,
                              "n_group": 2, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4,
                              "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1},
    "bloom": {},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 4, "max_seq_len": 256},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 6},
    "gemma4_text": PLAIN | {"sliding_window": 6, "vocab_size_per_layer_input": 96},
    "phi3": {"num_key_value_heads": 2, "intermediate_size": 64, "original_max_position_embeddings": 10,
             "rope_parameters": longrope(2.0)},
}  # fmt: skip


@pytest.mark.parametrize("model_type", OTHERS)
def test_case_31_and_34_any_other_build_is_right_or_refused(model_type: str, sizes: dict[str, Any], ids_of: Build) -> None:
    """Windows, positions and rotary factors that no known field announces must not pass in silence."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes | OTHERS[model_type]))
    try:
        verifier = Verifier(model, None, model_type)
    except UserError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    prompts, nodes, parents = [ids_of(1, 11), ids_of(2, 4)], [ids_of(3, 6), ids_of(4, 6)], [-1, 0, 0, 1, 2, 3]
    cache = verifier.new_cache(2, 32)
    verifier.prefill(prompts, cache)
    logits = verifier.logits(tokens_at(verifier, cache, nodes, parents).last)
    for b, prompt in enumerate(prompts):
        for node, path in enumerate(ancestry(parents)[2]):
            alone = own_logits(verifier, prompt + [nodes[b][i] for i in path])
            assert (logits[b, node] - alone).abs().max() < 1e-5 * max(1.0, alone.abs().max().item()), (b, node)
