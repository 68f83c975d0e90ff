"""What every head with decoder layers of its own must do when it drafts: EAGLE-1, HASS and multi-token prediction.

(EAGLE-3 has tests of its own, as it was the first.)
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.errors import UserError
from headstart.evaluation.decode import speculate
from headstart.evaluation.metrics import acceptance
from headstart.evaluation.tree import AnyTree, DynamicTree, StaticTree, chain
from headstart.heads.base import DraftHead
from headstart.heads.generate import generate
from headstart.heads.hub import load_head, save_head
from headstart.heads.recurrent import RecurrentHead
from headstart.heads.verifier import Features, Verifier

Build = Callable[..., Any]
STEPS = 4
FAMILIES = ["llama", "qwen3", "gpt2", "gemma2", "mistral"]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle1": ("tiny_eagle1", {"depth": 1}),
    "hass": ("tiny_eagle1", {"depth": 4, "top_tokens": 10}),
    "parallel": ("tiny_mtp", {"form": "parallel"}),
    "sequential": ("tiny_mtp", {"form": "sequential"}),
    "recursive": ("tiny_mtp", {"form": "recursive"}),
}
TREES: dict[str, AnyTree] = {
    "chain": chain(3),
    "static": StaticTree([[0], [1], [2], [0, 0], [0, 1], [1, 0], [2, 1], [0, 0, 0], [0, 1, 0], [2, 1, 1], [0, 0, 0, 0]]),
    "dynamic": DynamicTree(depth=4, top_k=3, nodes=12),
}


@pytest.fixture(params=KINDS)
def new_head(request: pytest.FixtureRequest) -> Build:
    fixture, fields = KINDS[request.param]
    build = request.getfixturevalue(fixture)
    return lambda verifier, **more: build(verifier, **fields | more)


def said_in_training(head: Any, batch: Any, features: Features, verifier: Verifier, b: int, t: int) -> list[Tensor]:
    """log q at (t, step k) as the loss has it."""
    if isinstance(head, RecurrentHead):
        where = torch.zeros_like(batch.mask)
        where[b, t] = True
        _, states = head.training_states(batch, features, verifier, where, STEPS)
        return [head.log_q(state[b, 0], verifier) for state in states]
    states = list(head.states(batch, features) if head.config.form == "parallel" else head.states(batch, features, verifier))
    return [head.verifier_log_q(block.norm(state[b, t]), verifier) for block, state in zip(head.blocks, states, strict=True)]


def drafted(head: DraftHead, verifier: Verifier, ids: Sequence[int], t: int, tokens: Sequence[int]) -> list[Tensor]:
    """Really draft from t: the last committed position is t, ids[t + 1] is the root, then `tokens` one below the other."""
    session = head.begin(verifier, 1, len(ids) + len(tokens) + 2)
    given = torch.tensor([ids])
    found = [session.observe(verifier.features(given[:, : t + 1]), given[:, 1 : t + 2], [t + 1])[0]]
    for depth, token in enumerate(tokens):
        found.append(session.expand(torch.tensor([[token]]), torch.tensor([[depth - 1]]))[0, 0])
    return found


@pytest.mark.parametrize("family", [*FAMILIES, "llama3rope", "granite"])
def test_case_54_training_logits_equal_really_drafting(
    family: str, new_head: Build, tiny: Build, ids_of: Build, batch_of: Build, features_of: Build
) -> None:
    """Pins mask, rotary positions and shifts: depth k at t as it is trained equals the k-th level drafted from t."""
    verifier = tiny(family)
    head = new_head(verifier)
    rows = [ids_of(31, 12), ids_of(32, 9)]
    batch = batch_of(rows, [[(3, 12)], [(2, 9)]])
    features = features_of(verifier, batch)
    for b, row in enumerate(rows):
        for t in range(len(row) - 1 - STEPS):
            trained = said_in_training(head, batch, features, verifier, b, t)
            found = drafted(head, verifier, row, t, row[t + 2 : t + 1 + STEPS])
            for k in range(STEPS):
                assert (trained[k] - found[k]).abs().max() < 1e-5 * max(1.0, trained[k].abs().max().item()), (b, t, k)


def test_the_first_draft_is_that_of_training(
    new_head: Build, tiny: Build, ids_of: Build, batch_of: Build, features_of: Build
) -> None:
    verifier = tiny("llama")
    head = new_head(verifier)
    rows = [ids_of(31, 12), ids_of(32, 9)]
    batch = batch_of(rows, [[(3, 12)], [(2, 9)]])
    features = features_of(verifier, batch)
    where = torch.zeros_like(batch.mask)
    wanted = [(0, 0), (0, 7), (1, 5)]
    for b, t in wanted:
        where[b, t] = True
    first = head.first_draft(batch, features, verifier, where)
    for log_q, (b, t) in zip(first, wanted, strict=True):
        assert (log_q - drafted(head, verifier, rows[b], t, [])[0]).abs().max() < 1e-4
        assert (log_q - said_in_training(head, batch, features, verifier, b, t)[0]).abs().max() < 1e-4


LEVELS = [
    ([11, 12, 13], [-1, -1, -1]),
    ([21, 22, 23, 24], [2, 0, 0, 1]),  # indices among all nodes expanded so far
    ([31, 32], [6, 3]),
]


def test_every_node_of_a_tree_equals_its_path_drafted_alone(new_head: Build, tiny: Build, ids_of: Build) -> None:
    """Siblings never see each other; a level may expand some nodes only, in any order, with different counts."""
    verifier = tiny("llama")
    head = new_head(verifier)
    ids = ids_of(35, 7)
    given = torch.tensor([ids])
    session = head.begin(verifier, 1, 32)
    session.observe(verifier.features(given[:, :6]), given[:, 1:7], [6])
    paths: list[list[int]] = []
    for tokens, parents in LEVELS:
        found = session.expand(torch.tensor([tokens]), torch.tensor([parents]))
        paths += [[*(paths[parent] if parent >= 0 else []), token] for token, parent in zip(tokens, parents, strict=True)]
        for m, path in enumerate(paths[-len(tokens) :]):
            alone = drafted(head, verifier, ids, 5, path)[-1]
            assert (found[0, m] - alone).abs().max() < 1e-5 * max(1.0, alone.abs().max().item()), path
    assert paths[-1] == [13, 21, 32]


def test_observing_in_pieces_equals_observing_at_once(new_head: Build, tiny: Build, ids_of: Build) -> None:
    """Rounds of 4, 1, 1 and 3 committed tokens, with rejected drafts in between that must leave no trace."""
    verifier = tiny("qwen3")
    head = new_head(verifier)
    ids = torch.tensor([ids_of(34, 10)])
    features = verifier.features(ids[:, :9])
    session = head.begin(verifier, 1, 32)
    start = 0
    for size in (4, 1, 1, 3):
        part = Features(features.last[:, start : start + size], features.layers[:, start : start + size])
        found = [session.observe(part, ids[:, start + 1 : start + size + 1], [size])]
        start += size
        for tokens, parents in LEVELS:
            found.append(session.expand(torch.tensor([tokens]), torch.tensor([parents])))
    fresh = head.begin(verifier, 1, 32)
    at_once = [fresh.observe(features, ids[:, 1:], [9])]
    at_once += [fresh.expand(torch.tensor([tokens]), torch.tensor([parents])) for tokens, parents in LEVELS]
    for mine, whole in zip(found, at_once, strict=True):
        assert (mine - whole).abs().max() < 1e-5 * max(1.0, whole.abs().max().item())


def test_case_34_a_ragged_batch_equals_its_rows_alone(new_head: Build, tiny: Build, ids_of: Build) -> None:
    """Prompts of 2, 5 and 9 tokens, then rounds that commit a different number of tokens in each row; rows leave."""
    verifier = tiny("llama")
    head = new_head(verifier)
    rows = [ids_of(seed, 20) for seed in (41, 42, 43)]
    rounds = [[2, 5, 9], [3, 1, 2], [1, 4, 2]]
    levels = [([[5, 6], [7, 8], [9, 10]], [[-1, -1]] * 3), ([[15, 16], [17, 18], [19, 20]], [[1, 1], [0, 1], [1, 0]])]

    def run(members: list[int], keep: list[int] | None = None) -> list[Tensor]:
        """Everything the session says, a row of the batch each; `keep` drops rows before the last round."""
        session = head.begin(verifier, len(members), 40)
        starts, said = dict.fromkeys(members, 0), []
        for number, counts in enumerate(rounds):
            if number == 2 and keep is not None:
                session.keep_rows([members.index(row) for row in keep])
                said = [log_q[[members.index(row) for row in keep]] for log_q in said]
                members = keep
            size = max(counts[row] for row in members)
            last, following = [], torch.zeros(len(members), size, dtype=torch.long)
            for b, row in enumerate(members):
                start, count = starts[row], counts[row]
                states = verifier.features(torch.tensor([rows[row][: start + count]])).last[0, start:]
                last.append(torch.nn.functional.pad(states, (0, 0, 0, size - count), value=3.0))
                following[b, :count] = torch.tensor(rows[row][start + 1 : start + count + 1])
                starts[row] += count
            stacked = torch.stack(last)
            said.append(session.observe(Features(stacked, stacked[..., :0]), following, [counts[row] for row in members]))
            for tokens, parents in levels:
                found = session.expand(
                    torch.tensor([tokens[row] for row in members]), torch.tensor([parents[row] for row in members])
                )
                said.extend(found.unbind(1))
        return said

    alone = [run([row]) for row in range(3)]
    for members, keep in (([0, 1, 2], None), ([0, 1, 2], [2, 0])):
        for i, log_q in enumerate(run(members, keep)):
            for b, row in enumerate(keep or members):
                expected = alone[row][i][0]
                assert (log_q[b] - expected).abs().max() < 1e-5 * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("family", FAMILIES)
def test_trees_write_what_plain_decoding_writes(family: str, new_head: Build, tiny: Build, ids_of: Build) -> None:
    verifier = tiny(family)
    head = new_head(verifier)
    prompts = [ids_of(51, 7), ids_of(52, 3), ids_of(53, 12)]
    plain = generate(verifier, prompts, 20)
    for tree in TREES.values():
        answers, _ = speculate(verifier, head, tree, prompts, 20)
        assert [answer.tokens for answer in answers] == plain


def test_a_trained_head_is_accepted_and_changes_no_token(
    new_head: Build, tiny: Build, ids_of: Build, batch_of: Build, features_of: Build
) -> None:
    """Learned by heart, the verifier's own text is drafted rightly to the depth that was trained: the shifts are the same in
    training and drafting."""
    verifier = tiny("llama")
    head = new_head(verifier)
    prompts = [ids_of(61, 6), ids_of(62, 4)]
    answers = generate(verifier, prompts, 24)
    rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    batch = batch_of(rows, [[(len(prompt), len(row))] for prompt, row in zip(prompts, rows, strict=True)])
    features = features_of(verifier, batch)
    optimizer = torch.optim.AdamW(head.parameters(), lr=5e-3)
    for _ in range(150):
        optimizer.zero_grad()
        head.loss(batch, features, verifier).total().backward()
        optimizer.step()
    for tree in (chain(3), TREES["dynamic"]):
        decoded, _ = speculate(verifier, head, tree, prompts, 24)
        assert [answer.tokens for answer in decoded] == answers
        survival = acceptance([r for answer in decoded for r in answer.rounds], tree.depth)["survival"]
        assert survival[0] > 0.8
        assert survival[2] > (0.2 if head.config.depth == 1 else 0.5)


def test_a_head_comes_back_bit_identical(new_head: Build, tiny: Build, ids_of: Build, tmp_path: Path) -> None:
    verifier = tiny("llama3rope")
    head = new_head(verifier, target_ids=torch.arange(3, 93))
    save_head(head, tmp_path / "head")
    loaded = load_head(tmp_path / "head")
    assert type(loaded) is type(head)
    assert loaded.config == head.config
    assert loaded.target_ids.tolist() == list(range(3, 93))
    assert {name: tensor.tolist() for name, tensor in loaded.state_dict().items()} == {
        name: tensor.tolist() for name, tensor in head.state_dict().items()
    }
    ids = ids_of(71, 8)
    for mine, its in zip(*(drafted(one, verifier, ids, 4, [7, 9]) for one in (head, loaded)), strict=True):
        assert mine.shape == (90,)
        assert torch.equal(mine, its)


def test_a_session_has_no_gradient_and_says_float32_probabilities(new_head: Build, tiny: Build, ids_of: Build) -> None:
    verifier = tiny("gemma2")
    found = drafted(new_head(verifier), verifier, ids_of(36, 6), 3, [4, 5])
    assert not any(log_q.requires_grad for log_q in found)
    assert all(log_q.dtype == torch.float32 and log_q.shape == (96,) for log_q in found)
    assert all(abs(log_q.exp().sum().item() - 1) < 1e-5 for log_q in found)


def test_a_head_drafts_for_a_verifier_in_bfloat16(new_head: Build, tiny: Build, ids_of: Build) -> None:
    verifier = tiny("llama")
    head = new_head(verifier)
    exact = drafted(head, verifier, ids_of(36, 6), 3, [4, 5])
    verifier.model.to(torch.bfloat16)
    near = drafted(head, verifier, ids_of(36, 6), 3, [4, 5])
    for mine, its in zip(near, exact, strict=True):
        assert mine.dtype == torch.float32
        assert torch.minimum(mine.exp(), its.exp()).sum() > 0.8


def test_a_head_for_another_verifier_is_refused(new_head: Build, tiny: Build) -> None:
    head = new_head(tiny("llama"))
    with pytest.raises(UserError, match=r"llama do not fit: the head's hidden size is 32, the verifier's 16"):
        head.begin(tiny("llama", hidden_size=16), 1, 8)


def test_how_deep_each_form_drafts(tiny: Build, tiny_eagle1: Build, tiny_mtp: Build) -> None:
    verifier = tiny("llama")
    assert tiny_eagle1(verifier).depth is None
    assert [tiny_mtp(verifier, form).depth for form in ("parallel", "sequential", "recursive")] == [4, 4, None]
    assert [len(tiny_mtp(verifier, form).blocks) for form in ("parallel", "sequential", "recursive")] == [4, 4, 1]
