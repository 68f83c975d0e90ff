"""The doctor passes healthy heads of every kind and names each planted fault, with the first place where it shows."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.data.features import compute
from headstart.evaluation import decode, parity
from headstart.evaluation.diagnosis import Check, Diagnosis
from headstart.evaluation.doctor import examine
from headstart.evaluation.provenance_file import Provenance
from headstart.evaluation.record import made_with, template_digest
from headstart.evaluation.shown import shown
from headstart.heads import generate, medusa, mtp_parallel, recurrent
from headstart.heads.base import DraftHead
from headstart.heads.cache import Ancestry
from headstart.heads.eagle3 import Eagle3Head
from headstart.heads.medusa import MedusaHead, MedusaSession
from headstart.heads.recurrent import RecurrentHead, RecurrentSession
from headstart.heads.verifier import Features, Verifier

PROMPTS = [[3, 7, 11, 20, 5], [9, 2, 40], [30, 31, 32, 33, 34, 35, 36], [50]]
NAMES = ["a", "b", "c", "d"]
TOKENS = 14
KINDS = {
    "medusa": lambda build, verifier: build("medusa")(verifier),
    "medusa, soft, pruned": lambda build, verifier: build("medusa")(
        verifier, target_ids=build_half(), targets="soft", lm_head="shared"
    ),
    "eagle1": lambda build, verifier: build("eagle1")(verifier, noise=0.1),
    "eagle3": lambda build, verifier: build("eagle3")(verifier),
    "eagle3.1": lambda build, verifier: build("eagle3")(verifier, fc_norm=True, norm_output=True),
    **{
        f"mtp {form}": lambda build, verifier, form=form: build("mtp")(verifier, form)
        for form in ("parallel", "sequential", "recursive")
    },
}


def build_half() -> Tensor:
    return torch.arange(96)[torch.arange(96) % 2 == 1]  # with the stop token 95


@pytest.fixture
def build(request: pytest.FixtureRequest) -> Callable[[str], Any]:
    """`build("eagle3")` is the builder tiny_eagle3."""
    return lambda name: request.getfixturevalue(f"tiny_{name}")


@pytest.fixture
def verifier(tiny: Callable[..., Verifier]) -> Verifier:
    verifier = tiny("llama", initializer_range=0.25)
    verifier.facts = dataclasses.replace(verifier.facts, stop_ids=())
    return verifier


def diagnose(head: DraftHead, verifier: Verifier, record: dict[str, Any] | None = None) -> Diagnosis:
    data = {"samples": 1, "tokens": 2, "supervised": 1, "sha256": "0"}
    made = None if record is None else Provenance.model_validate({"data": data} | record)
    return examine(head.eval(), verifier, PROMPTS, NAMES, TOKENS, made)


def recorded(head: DraftHead, verifier: Verifier) -> dict[str, Any]:
    """What a run folder keeps, for the doctor."""
    its = {"name": verifier.name, "fingerprint": verifier.fingerprint, "dtype": "float32"}
    return {"verifier": its, "template": template_digest(verifier), "head": made_with(head, head.needs)}


def first(head: DraftHead, verifier: Verifier, record: dict[str, Any] | None = None) -> Check:
    found = diagnose(head, verifier, record).first
    assert found is not None
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_head_passes(kind: str, verifier: Verifier, build: Any) -> None:
    head = KINDS[kind](build, verifier)
    record = recorded(head, verifier)
    found = diagnose(head, verifier, record)
    assert found.first is None, found.first
    assert [(check.name, check.healthy) for check in found.checks] == [
        (name, True)
        for name in ("template", "verifier", "configuration", "vocabulary", "states", "rounds", "drafts", "mask", "labels")
    ]
    depths = head.depth or max(head.config.depth, 3)
    # each of the 4 answers of 14 tokens drafts its tokens 1..13 from a root before them: 13 - k at depth k
    assert found.accuracy["labels"] == [4 * (13 - k) for k in range(depths)]
    assert found.accuracy["training"] == found.accuracy["decoding"]


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "gemma3", "mistral", "granite", "stablelm"])
def test_a_healthy_head_of_any_family_passes(family: str, tiny: Callable[..., Verifier], build: Any) -> None:
    verifier = tiny(family, eos_token_id=None)
    for kind in ("medusa", "eagle3", "mtp sequential"):
        found = diagnose(KINDS[kind](build, verifier), verifier)
        assert found.first is None, (kind, found.first)


def test_accuracy_is_counted_by_hand(verifier: Verifier, build: Any) -> None:
    """Medusa's prediction at t, from transformers' own states, against the token at t + 2 + k of the greedy text."""
    head = build("medusa")(verifier).eval()
    with torch.no_grad():  # heads that read some of it right
        for blocks, lm_head in zip(head.blocks, head.lm_heads, strict=True):
            blocks[0].linear.weight.mul_(0.1)
            lm_head.weight.copy_(verifier.lm_head.weight)
    found = diagnose(head, verifier)
    hits, labels = [0] * 3, [0] * 3
    with torch.no_grad():
        for prompt in PROMPTS:
            text = list(prompt)
            for _ in range(TOKENS):
                text.append(int(verifier.model(torch.tensor([text])).logits[0, -1].argmax()))
            hidden = verifier.model(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0]
            for t in range(len(prompt) - 1, len(text) - 2):
                for k in range(min(3, len(text) - 2 - t)):
                    said = int(head.lm_heads[k](head.blocks[k](hidden[t])).argmax())
                    labels[k] += 1
                    hits[k] += said == text[t + 2 + k]
    assert sum(hits) > 0
    assert found.accuracy["labels"] == labels
    assert found.accuracy["decoding"] == [pytest.approx(h / n) for h, n in zip(hits, labels, strict=True)]


def test_without_a_record_what_needs_one_is_not_judged(verifier: Verifier, build: Any) -> None:
    found = diagnose(build("medusa")(verifier), verifier)
    assert [check.healthy for check in found.checks] == [None, None, None, True, True, True, True, True, True]
    assert found.first is None


class Words:
    chat_template = "{{ messages }}"


def test_another_chat_template_is_named(verifier: Verifier, build: Any) -> None:
    verifier.tokenizer = Words()
    head = build("medusa")(verifier)
    record = recorded(head, verifier)
    assert diagnose(head, verifier, record).first is None
    verifier.tokenizer.chat_template += " "
    found = first(head, verifier, record)
    assert (found.name, found.cause) == ("template", "template")


def test_another_verifier_of_the_same_sizes_is_named(verifier: Verifier, build: Any, tiny: Callable[..., Verifier]) -> None:
    """Everything fits and decodes; the head was trained for another one. What else changes the hash is no verdict."""
    head = build("medusa")(verifier)
    record = recorded(head, tiny("llama", seed=5))
    found = first(head, verifier, record)
    assert (found.name, found.cause) == ("verifier", "verifier")
    assert found.note == "llama has not the weights or the configuration of llama, which the head was trained for"
    for other, told in (
        ({"verifier": record["verifier"] | {"dtype": "bfloat16"}}, "weights hashed in bfloat16, here in float32"),
        ({"verifier": record["verifier"] | {"dtype": None}}, "a precision that provenance.json does not say"),
        ({"template": "0"}, "the chat template is part of its hash"),
    ):
        (check,) = [check for check in diagnose(head, verifier, record | other).checks if check.name == "verifier"]
        assert check.healthy is None
        assert told in check.note


@pytest.mark.parametrize(
    ("field", "value", "cause"),
    [
        ("layers", (0, 2, 3), "layer ids"),
        ("norm_output", True, "norm order"),
        ("rms_norm_eps", 1e-2, "norm order"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 5e5}, "positions"),
        ("num_key_value_heads", 1, "configuration"),
    ],
)
def test_a_changed_configuration_is_named(field: str, value: Any, cause: str, verifier: Verifier, build: Any) -> None:
    """As an edited head/config.json: training and decoding agree on it, and both differ from what was trained."""
    trained = build("eagle3")(verifier)
    record = recorded(trained, verifier)
    if field == "num_key_value_heads":
        record["head"]["config"][field] = value
        head = trained
    else:
        head = Eagle3Head(trained.config.model_copy(update={field: value}), trained.target_ids)
        head.load_state_dict(trained.state_dict())
    found = first(head, verifier, record)
    assert (found.name, found.cause) == ("configuration", cause)
    assert "trained" in found.note or "training" in found.note


def test_what_a_head_learns_by_may_change(verifier: Verifier, build: Any) -> None:
    head = build("eagle3")(verifier)
    record = recorded(head, verifier)
    head.config = head.config.model_copy(update={"decay": 0.5, "loss": "kl"})
    assert diagnose(head, verifier, record).first is None


def permuted(ids: Tensor) -> Tensor:
    return ids.flip(0)


def offsets(ids: Tensor) -> Tensor:
    return ids - torch.arange(len(ids))


def moved_by_one(ids: Tensor) -> Tensor:
    return ids - 1


def beyond(ids: Tensor) -> Tensor:
    return ids + 60


@pytest.mark.parametrize("fault", [permuted, offsets, moved_by_one, beyond], ids=lambda fault: fault.__name__)
def test_a_broken_vocabulary_map_is_named(fault: Any, verifier: Verifier, build: Any) -> None:
    head = build("eagle3")(verifier)
    record = recorded(head, verifier)
    head.target_ids = fault(head.target_ids)
    found = first(head, verifier, record)
    assert (found.name, found.cause) == ("vocabulary", "vocabulary map")
    assert (diagnose(head, verifier).first is None) == (fault is moved_by_one)  # nothing but the record knows that


class Late(Ancestry):
    """Drafted tokens one position too late."""

    def newest(self, lengths: list[int], count: int) -> tuple[Tensor, Tensor]:
        positions, seen = super().newest(lengths, count)
        return positions + 1, seen


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "eagle3.1", "mtp recursive"])
def test_positions_off_by_one_in_the_session(kind: str, verifier: Verifier, build: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(recurrent, "Ancestry", Late)
    found = first(KINDS[kind](build, verifier), verifier)
    assert (found.name, found.cause, found.depth) == ("drafts", "positions", 2)
    assert (found.text, found.position) == ("d", 0)  # the shortest prompt drafts first
    assert "decoding gives drafted tokens positions 1 too late" in found.note


def test_positions_off_by_one_in_training(verifier: Verifier, build: Any, monkeypatch: Any) -> None:
    head = build("eagle3")(verifier)
    calls = [0]

    class Early:
        """Rotary positions that forget the step: its second and later turns in one pass."""

        def __init__(self, rotary: Any) -> None:
            self.rotary = rotary

        def __call__(self, positions: Tensor) -> Any:
            calls[0] += 1
            return self.rotary(positions - (1 if calls[0] > 2 else 0))

    def states(self: RecurrentHead, *given: Any) -> Any:
        rotary, calls[0] = self.rotary, 0
        del self._modules["rotary"]
        self.__dict__["rotary"] = Early(rotary)
        try:
            return training_states(self, *given)
        finally:
            del self.__dict__["rotary"]
            self.rotary = rotary

    training_states = RecurrentHead.training_states
    monkeypatch.setattr(RecurrentHead, "training_states", states)
    found = first(head, verifier)
    assert (found.name, found.cause, found.depth) == ("drafts", "positions", 2)
    assert "training gives drafted tokens positions 1 too early" in found.note


class NormedStates(RecurrentSession):
    """The state handed to the next step after its norm, where training hands it on before."""

    def expand(self, ids: Tensor, parents: Tensor) -> Tensor:
        kept = self.states
        head: Any = self.head
        norm = head.norm if isinstance(head, Eagle3Head) else head.blocks[0].norm
        self.states = norm(kept)
        log_q = super().expand(ids, parents)
        self.states = torch.cat([kept, self.states[:, kept.shape[1] :]], 1)
        return log_q


@pytest.mark.parametrize("kind", ["eagle3", "mtp recursive"])
def test_a_norm_before_instead_of_after(kind: str, verifier: Verifier, build: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(recurrent, "RecurrentSession", NormedStates)
    found = first(KINDS[kind](build, verifier), verifier)
    assert (found.name, found.cause, found.depth) == ("drafts", "norm order", 2)
    assert "before the next step" in found.note


def test_a_norm_left_out_in_decoding(verifier: Verifier, build: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(mtp_parallel.ParallelSession, "__init__", without_norm(mtp_parallel.ParallelSession.__init__))
    found = first(build("mtp")(verifier, "parallel"), verifier)
    assert (found.name, found.cause, found.depth) == ("drafts", "norm order", 1)
    assert "without mtp.0.norm" in found.note


def without_norm(start: Any) -> Any:
    def init(self: Any, head: Any, *given: Any) -> None:
        import copy

        broken = copy.deepcopy(head)
        broken.blocks[0].norm.forward = lambda x: x
        start(self, broken, *given)

    return init


class OneBefore(MedusaSession):
    """The state before the last one."""

    def observe(self, features: Features, next_ids: Tensor, counts: list[int]) -> Tensor:
        return super().observe(features, next_ids, [max(count - 1, 1) for count in counts])


def test_a_state_of_another_position(verifier: Verifier, build: Any, monkeypatch: Any) -> None:
    """It shows where a round shows the head more than one token: after a prompt."""
    monkeypatch.setattr(medusa, "MedusaSession", OneBefore)
    found = first(build("medusa")(verifier), verifier)
    assert (found.name, found.cause, found.depth, found.text, found.position) == ("drafts", "positions", 1, "b", 2)
    assert "from position 1 where training drafts from 2" in found.note


class NextToken(RecurrentSession):
    """Embeds each token one too late."""

    def observe(self, features: Features, next_ids: Tensor, counts: list[int]) -> Tensor:
        return super().observe(features, torch.cat([next_ids[:, 1:], next_ids[:, -1:]], 1), counts)


def test_an_embedding_of_another_token(verifier: Verifier, build: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(recurrent, "RecurrentSession", NextToken)
    found = first(build("eagle1")(verifier), verifier)
    assert (found.name, found.cause, found.depth, found.position) == ("drafts", "token shift", 1, 0)
    assert "decoding embeds the token 1 too late" in found.note


def test_a_head_of_nan_is_said_to_be_one(verifier: Verifier, build: Any) -> None:
    """Both sides say the same, and neither is a number."""
    head = build("eagle3")(verifier)
    with torch.no_grad():
        head.lm_head.weight.fill_(float("inf"))
    found = first(head, verifier)
    assert (found.name, found.cause, found.depth) == ("drafts", "unknown", 1)
    assert found.note.startswith("log q is not a number in training already")


class Swapped(MedusaSession):
    """Columns in another order than target_ids."""

    def observe(self, features: Features, next_ids: Tensor, counts: list[int]) -> Tensor:
        super().observe(features, next_ids, counts)
        self.log_q = self.log_q.flip(-1)
        return self.log_q[:, 0]


def test_columns_in_another_order(verifier: Verifier, build: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(medusa, "MedusaSession", Swapped)
    found = first(build("medusa")(verifier), verifier)
    assert (found.name, found.cause, found.depth) == ("drafts", "vocabulary map", 1)


@pytest.mark.parametrize(("by", "word"), [(-1, "early"), (1, "late")])
@pytest.mark.parametrize("kind", ["medusa", "eagle1", "eagle3", "mtp sequential"])
def test_a_shifted_mask(kind: str, by: int, word: str, verifier: Verifier, build: Any, monkeypatch: Any) -> None:
    head = KINDS[kind](build, verifier)
    honest = type(head).supervised

    def supervised(self: Any, *given: Any) -> Tensor:
        right = honest(self, *given)
        return torch.stack([torch.stack([shift(row, by) for row in depth]) for depth in right])

    monkeypatch.setattr(type(head), "supervised", supervised)
    found = first(head, verifier)
    assert (found.name, found.cause, found.depth) == ("mask", "mask shift", 1)
    assert f"the mask is read 1 too {word}" in found.note


def shift(row: Tensor, by: int) -> Tensor:
    """row[t + by]"""
    at = torch.arange(len(row)) + by
    return torch.where((at >= 0) & (at < len(row)), row[at.clamp(0, len(row) - 1)], False)


def test_a_mask_that_is_never_shifted(verifier: Verifier, build: Any, monkeypatch: Any) -> None:
    head = build("medusa")(verifier)
    monkeypatch.setattr(MedusaHead, "supervised", lambda self, batch, features: batch.mask.expand(3, -1, -1).clone())
    found = first(head, verifier)
    assert (found.name, found.cause, found.depth) == ("mask", "mask shift", 1)


@pytest.mark.parametrize(("by", "word"), [(-1, "before"), (1, "behind")])
def test_labels_off_by_one_in_the_loss(by: int, word: str, verifier: Verifier, build: Any, monkeypatch: Any) -> None:
    """The mask is right and the drafts are, but the loss rewards the neighbours."""
    head = build("medusa")(verifier)
    with torch.no_grad():  # a head that has learned that
        for blocks, lm_head in zip(head.blocks, head.lm_heads, strict=True):
            blocks[0].linear.weight.zero_()
            lm_head.weight.copy_(verifier.lm_head.weight)
    monkeypatch.setattr(
        MedusaHead, "targets",
        lambda self, batch, features, verifier, wanted: torch.roll(batch.ids, -1 - by, 1)[wanted],
    )  # fmt: skip
    found = first(head, verifier)
    assert (found.name, found.cause) == ("labels", "mask shift")
    assert f"those {word} the tokens drafted" in found.note


def test_a_loss_that_takes_columns_for_ids(verifier: Verifier, build: Any, monkeypatch: Any) -> None:
    head = build("medusa")(verifier, target_ids=torch.arange(30, 96))
    with torch.no_grad():
        for blocks, lm_head in zip(head.blocks, head.lm_heads, strict=True):
            blocks[0].linear.weight.zero_()
            lm_head.weight.copy_(verifier.lm_head.weight[30:])
    monkeypatch.setattr(
        MedusaHead, "targets",
        lambda self, batch, features, verifier, wanted: torch.roll(batch.ids, -1, 1)[wanted].clamp(max=65),
    )  # fmt: skip
    found = first(head, verifier)
    assert (found.name, found.cause) == ("labels", "vocabulary map")


def test_other_layers_in_decoding(verifier: Verifier, build: Any, monkeypatch: Any) -> None:
    honest = generate.generate_with_features
    monkeypatch.setattr(
        parity, "generate_with_features", lambda v, prompts, tokens, layers: honest(v, prompts, tokens, (1, 3, 3))
    )
    found = first(build("eagle3")(verifier), verifier)
    assert (found.name, found.cause, found.text, found.position) == ("states", "layer ids", "a", 0)
    assert found.note == "decoding reads the states entering layer 3, training those entering layer 2"


def test_states_before_the_final_norm(verifier: Verifier, build: Any, monkeypatch: Any) -> None:
    honest = generate.generate_with_features

    def unnormed(v: Verifier, *given: Any) -> Any:
        answers, states = honest(v, *given)
        texts = [[*prompt, *answer][:-1] for prompt, answer in zip(PROMPTS, answers, strict=True)]
        kept: list[Tensor] = []
        handle = v.decoder.norm.register_forward_pre_hook(lambda _, args: kept.append(args[0][0]))
        for text in texts:
            v.features(torch.tensor([text]))
        handle.remove()
        return answers, [dataclasses.replace(f, last=last) for f, last in zip(states, kept, strict=True)]

    monkeypatch.setattr(parity, "generate_with_features", unnormed)
    found = first(build("medusa")(verifier), verifier)
    assert (found.name, found.cause, found.position) == ("states", "norm order", 0)


def test_positions_off_by_one_in_the_verifiers_decoding(verifier: Verifier, build: Any, monkeypatch: Any) -> None:
    honest = Verifier.decode

    def late(self: Verifier, ids: Tensor, tree: Tensor, depth: Tensor, *given: Any) -> Features:
        return honest(self, ids, tree, depth + (ids.shape[1] == 1 and len(ids) > 1), *given)

    monkeypatch.setattr(Verifier, "decode", late)
    found = first(build("medusa")(verifier), verifier)
    assert (found.name, found.cause, found.text, found.position) == ("states", "positions", "a", len(PROMPTS[0]))
    assert found.note == "the verifier decodes token 5 at position 6"


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_rounds_accept_what_is_known_and_show_every_state(family: str, tiny: Callable[..., Verifier], build: Any) -> None:
    """Three tokens a round; states against transformers' own, up to the last round's."""
    verifier = tiny(family, eos_token_id=None)
    texts = parity.write_texts(build("eagle3")(verifier), verifier, PROMPTS, TOKENS)
    found = shown(verifier, texts, (1, 3))
    for row, (prompt, states) in enumerate(zip(PROMPTS, found, strict=True)):
        ids = texts.batch.ids[row : row + 1, : len(prompt) + TOKENS]
        with torch.no_grad():
            own = verifier.model(ids, output_hidden_states=True).hidden_states
        size = len(states.last)
        assert size == len(prompt) + 12  # the prefill's token, four rounds of three, and a fifth whose states nobody asks for
        torch.testing.assert_close(states.last, own[-1][0, :size], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(states.layers, torch.cat([own[1], own[3]], -1)[0, :size], atol=1e-4, rtol=1e-4)

    stop = int(texts.batch.ids[1, len(PROMPTS[1])])  # the second answer ends at once
    verifier.facts = dataclasses.replace(verifier.facts, stop_ids=(stop,))
    texts = parity.write_texts(build("eagle3")(verifier), verifier, PROMPTS, TOKENS)
    assert [len(states.last) > 0 for states in shown(verifier, texts, (1, 3))] == [True, False, True, True]


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_states_of_the_wrong_nodes(kind: str, verifier: Verifier, build: Any, monkeypatch: Any) -> None:
    """The loop accepts the right tokens and hands on the states of their neighbours: the text is right, tau is not."""
    honest = decode.take_rows
    monkeypatch.setattr(decode, "take_rows", lambda x, rows: honest(x, (rows - 1).clamp(min=0)))
    found = first(KINDS[kind](build, verifier), verifier)
    assert (found.name, found.cause, found.text) == ("rounds", "unknown", "a")
    assert found.position == len(PROMPTS[0]) + 1  # the first draft that was accepted
    assert "show the head another state of token 6" in found.note


def test_features_of_another_text_part_without_a_known_cause(verifier: Verifier, build: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(
        parity, "compute", lambda v, batch, layers: compute(v, dataclasses.replace(batch, ids=batch.ids.flip(1)), layers)
    )
    found = first(build("medusa")(verifier), verifier)
    assert (found.name, found.cause) == ("states", "unknown")
