"""EAGLE-3 drafting: what it was trained on, what a tree level sees, and what a batch changes (nothing)."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.errors import UserError
from headstart.heads.batch import Batch
from headstart.heads.eagle3 import Eagle3Head
from headstart.heads.layers import RotaryPositions
from headstart.heads.verifier import Features, Verifier

Build = Callable[..., Any]
LAYERS = (1, 2, 3)
STEPS = 4
VERIFIERS = ["llama", "llama3rope", "qwen3", "gpt2", "gemma2", "gemma3", "mistral", "granite", "cohere", "stablelm"]


def chain(head: Eagle3Head, verifier: Verifier, ids: Sequence[int], t: int, tokens: Sequence[int]) -> list[Tensor]:
    """Really draft from t: the last committed position is t, ids[t + 1] is the root, then `tokens` one below the other."""
    session = head.begin(verifier, 1, len(ids) + len(tokens) + 2)
    given = torch.tensor([ids])
    features = verifier.features(given[:, : t + 1], LAYERS)
    found = [session.observe(features, given[:, 1 : t + 2], [t + 1])[0]]
    for depth, token in enumerate(tokens):
        found.append(session.expand(torch.tensor([[token]]), torch.tensor([[depth - 1]]))[0, 0])
    return found


@pytest.mark.parametrize(
    ("family", "flags"),
    [*((family, {}) for family in VERIFIERS), ("llama", {"norm_output": True}),
     ("qwen3", {"fc_norm": True, "norm_output": True})],
)  # fmt: skip
def test_case_54_training_logits_equal_really_drafting(
    family: str, flags: dict[str, bool], tiny: Build, tiny_eagle3: Build, ids_of: Build, batch_of: Build, features_of: Build
) -> None:
    """Pins mask, rotary positions and shifts at once: step k at t equals k steps of the drafting loop from t."""
    verifier = tiny(family)
    head = tiny_eagle3(verifier, **flags)
    rows = [ids_of(31, 14), ids_of(32, 9)]
    batch = batch_of(rows, [[(3, 14)], [(2, 9)]])
    features = features_of(verifier, batch, LAYERS)
    queries = torch.zeros_like(batch.mask)
    for b, row in enumerate(rows):
        queries[b, : len(row) - 1 - STEPS] = True
    positions, states = head.training_states(batch, features, verifier, queries, STEPS)
    compared = 0
    for b, row in enumerate(rows):
        for slot, t in enumerate(positions[b].tolist()):
            if t < 0:
                continue
            drafted = chain(head, verifier, row, t, row[t + 2 : t + 1 + STEPS])
            for k in range(STEPS):
                trained = head.log_q(states[k][b, slot], verifier)
                assert (trained - drafted[k]).abs().max() < 1e-5, (b, t, k)
                compared += 1
    assert compared == STEPS * (9 + 4)


def test_case_54_a_wrong_draft_token_is_felt_by_the_next_step_alone(tiny: Build, tiny_eagle3: Build, ids_of: Build) -> None:
    verifier = tiny("llama")
    head = tiny_eagle3(verifier)
    ids = ids_of(33, 8)
    right, wrong = chain(head, verifier, ids, 5, [7, 8, 9]), chain(head, verifier, ids, 5, [7, 44, 9])
    assert torch.equal(right[0], wrong[0])
    assert torch.equal(right[1], wrong[1])
    assert (right[2] - wrong[2]).abs().max() > 1e-2
    assert (right[3] - wrong[3]).abs().max() > 1e-2


def test_observing_in_pieces_equals_observing_at_once(tiny: Build, tiny_eagle3: Build, ids_of: Build) -> None:
    """Rounds of 4, 1 and 3 committed tokens, with rejected drafts in between that must leave no trace."""
    verifier = tiny("qwen3")
    head = tiny_eagle3(verifier)
    ids = torch.tensor([ids_of(34, 9)])
    features = verifier.features(ids[:, :8], LAYERS)
    session = head.begin(verifier, 1, 32)
    start = 0
    for size in (4, 1, 3):
        part = Features(features.last[:, start : start + size], features.layers[:, start : start + size])
        pieces = session.observe(part, ids[:, start + 1 : start + size + 1], [size])
        start += size
        session.expand(torch.tensor([[5, 6, 7]]), torch.full((1, 3), -1))
        session.expand(torch.tensor([[8, 9]]), torch.tensor([[2, 0]]))
    at_once = head.begin(verifier, 1, 32).observe(features, ids[:, 1:], [8])
    assert (pieces - at_once).abs().max() < 1e-5


@pytest.mark.parametrize("flags", [{}, {"fc_norm": True, "norm_output": True}], ids=["3", "3.1"])
def test_every_node_of_a_tree_equals_its_path_drafted_alone(
    flags: dict[str, bool], tiny: Build, tiny_eagle3: Build, ids_of: Build
) -> None:
    """Siblings never see each other; a level may expand some nodes only, in any order, with different counts."""
    verifier = tiny("llama")
    head = tiny_eagle3(verifier, **flags)
    ids = ids_of(35, 7)
    given = torch.tensor([ids])
    session = head.begin(verifier, 1, 32)
    session.observe(verifier.features(given[:, :6], LAYERS), given[:, 1:7], [6])
    levels = [
        ([11, 12, 13], [-1, -1, -1]),
        ([21, 22, 23, 24], [2, 0, 0, 1]),  # indices among all nodes expanded so far
        ([31, 32], [6, 3]),
        ([41, 42, 43], [7, 8, 8]),
    ]
    paths: list[list[int]] = []
    for tokens, parents in levels:
        drafted = session.expand(torch.tensor([tokens]), torch.tensor([parents]))
        paths += [[*(paths[parent] if parent >= 0 else []), token] for token, parent in zip(tokens, parents, strict=True)]
        for m, path in enumerate(paths[-len(tokens) :]):
            alone = chain(head, verifier, ids, 5, path)[-1]
            assert (drafted[0, m] - alone).abs().max() < 1e-5, path
    assert paths[-1] == [13, 21, 32, 43]


def test_case_34_a_ragged_batch_equals_its_rows_alone(tiny: Build, tiny_eagle3: Build, ids_of: Build) -> None:
    """Prompts of 2, 5 and 9 tokens, then rounds that commit a different number of tokens in each row."""
    verifier = tiny("llama")
    head = tiny_eagle3(verifier)
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
                members = keep
                said = [log_q[[0, 1, 2]][keep] for log_q in said]
            size = max(counts[row] for row in members)
            layers, following = [], torch.zeros(len(members), size, dtype=torch.long)
            for b, row in enumerate(members):
                start, count = starts[row], counts[row]
                states = verifier.features(torch.tensor([rows[row][: start + count]]), LAYERS).layers[0, start:]
                layers.append(torch.nn.functional.pad(states, (0, 0, 0, size - count), value=3.0))
                following[b, :count] = torch.tensor(rows[row][start + 1 : start + count + 1])
                starts[row] += count
            features = Features(torch.zeros(len(members), size, 32), torch.stack(layers))
            said.append(session.observe(features, following, [counts[row] for row in members]))
            for tokens, parents in levels:
                drafted = session.expand(
                    torch.tensor([tokens[row] for row in members]), torch.tensor([parents[row] for row in members])
                )
                said.extend(drafted.unbind(1))
        return said

    alone = [run([row]) for row in range(3)]
    together, fewer = run([0, 1, 2]), run([0, 1, 2], keep=[2, 0])
    for i, log_q in enumerate(together):
        for row in range(3):
            assert (log_q[row] - alone[row][i][0]).abs().max() < 1e-5
    for i, log_q in enumerate(fewer):
        for b, row in enumerate([2, 0]):
            assert (log_q[b] - alone[row][i][0]).abs().max() < 1e-5


@pytest.mark.parametrize("family", ["llama", "llama3rope", "qwen3", "mistral", "gemma2", "granite", "mixtral"])
def test_case_24_the_draft_rotates_as_the_verifier_does(family: str, tiny: Build, tiny_eagle3: Build) -> None:
    verifier = tiny(family)
    head = tiny_eagle3(verifier)
    positions = torch.tensor([[0, 1, 5, 31, 32, 200]])
    own = verifier.decoder.rotary_emb
    cos, sin = own(torch.zeros(1), positions)
    assert torch.allclose(head.rotary.rotary.inv_freq, own.inv_freq)
    for mine, its in zip(head.rotary(positions), (cos, sin), strict=True):
        assert torch.allclose(mine[:, 0], its)


def test_case_24_scaling_is_not_lost(tiny: Build, tiny_eagle3: Build) -> None:
    plain, scaled = tiny_eagle3(tiny("llama")), tiny_eagle3(tiny("llama3rope"))
    assert not torch.allclose(plain.rotary.rotary.inv_freq, scaled.rotary.rotary.inv_freq)
    yarn = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    verifier = tiny("llama", rope_parameters=yarn)
    own = verifier.decoder.rotary_emb
    positions = torch.tensor([[3, 90]])
    mine, its = tiny_eagle3(verifier).rotary(positions), own(torch.zeros(1), positions)
    assert own.attention_scaling != 1.0
    assert torch.allclose(mine[0][:, 0], its[0])
    assert torch.allclose(mine[1][:, 0], its[1])


@pytest.mark.parametrize("family", ["stablelm", "gpt_neox"])
def test_case_25_the_draft_of_a_partly_rotating_verifier_rotates_every_dimension(
    family: str, tiny: Build, tiny_eagle3: Build
) -> None:
    verifier = tiny(family)
    assert verifier.facts.rope_parameters["partial_rotary_factor"] == 0.25
    head = tiny_eagle3(verifier)
    speeds = head.rotary.rotary.inv_freq
    assert speeds.tolist() == pytest.approx([10_000.0 ** (-i / 4) for i in range(4)])  # head size 8
    cos, _ = head.rotary(torch.tensor([[5]]))
    assert cos.shape == (1, 1, 1, 8)


def test_rotary_positions_follow_their_formula_and_theta() -> None:
    for theta in (10_000.0, 500_000.0):
        rotary = RotaryPositions(8, {"rope_type": "default", "rope_theta": theta}, 64)
        cos, sin = rotary(torch.tensor([[0, 5]]))
        angles = [5 * theta ** (-i / 4) for i in range(4)] * 2
        assert cos[0, 0, 1].tolist() == pytest.approx(torch.tensor(angles).cos().tolist(), abs=1e-6)
        assert sin[0, 0, 1].tolist() == pytest.approx(torch.tensor(angles).sin().tolist(), abs=1e-6)
        assert cos[0, 0, 0].tolist() == [1.0] * 8


def test_a_verifier_without_rotary_gets_the_plain_one(tiny: Build, tiny_eagle3: Build) -> None:
    head = tiny_eagle3(tiny("gpt2"))
    assert head.config.rope_parameters is None
    assert head.rotary.rotary.inv_freq.tolist() == pytest.approx([10_000.0 ** (-i / 4) for i in range(4)])


def test_a_session_writes_no_gradient_and_moves_no_weight(tiny: Build, tiny_eagle3: Build, ids_of: Build) -> None:
    verifier = tiny("llama")
    head = tiny_eagle3(verifier)
    drafted = chain(head, verifier, ids_of(36, 6), 3, [4, 5])
    assert not any(log_q.requires_grad for log_q in drafted)
    assert all(log_q.dtype == torch.float32 and log_q.shape == (48,) for log_q in drafted)
    assert all(abs(log_q.exp().sum().item() - 1) < 1e-5 for log_q in drafted)


def test_a_head_for_another_verifier_is_refused(tiny: Build, tiny_eagle3: Build) -> None:
    head = tiny_eagle3(tiny("llama"))
    with pytest.raises(UserError, match=r"llama do not fit: the head's hidden size is 32, the verifier's 16"):
        head.begin(tiny("llama", hidden_size=16), 1, 8)
    with pytest.raises(
        UserError, match=r"do not fit: the head reads the state that enters layer 3, the verifier's layers are 0 to 2"
    ):
        head.begin(tiny("llama", num_hidden_layers=3), 1, 8)


def test_training_states_of_no_query_are_empty(
    tiny: Build, tiny_eagle3: Build, ids_of: Build, batch_of: Build, features_of: Build
) -> None:
    verifier = tiny("llama")
    batch: Batch = batch_of([ids_of(1, 5)], [[]])
    rows, states = tiny_eagle3(verifier).training_states(
        batch, features_of(verifier, batch, LAYERS), verifier, torch.zeros_like(batch.mask), 3
    )
    assert rows.shape == (1, 0)
    assert [state.shape for state in states] == [(1, 0, 32)] * 3
