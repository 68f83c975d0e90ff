"""Answers written by the verifier: stored, resumed, turn by turn, on a tiny model with a tokenizer of bytes."""

import json

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from headstart.data.answer_store import AnswerStore, digest
from headstart.data.answers import complete, drawing, regenerate, split_turns
from headstart.data.chat import prompt_ids, render
from headstart.data.conversations import Conversation
from headstart.data.features import OnlineFeatures
from headstart.errors import UserError
from headstart.heads.generate import generate
from headstart.heads.verifier import Verifier

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
STOP = SPECIAL.index("<|im_end|>")
LIMIT = 12  # tokens an answer
LAYERS = (1, 3)


def byte_tokenizer(*merges):
    vocab = {token: i for i, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    for merge in merges:
        vocab["".join(merge)] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=CHATML)


def talking(folder, letters="abcdefgh ", stop=1.0, merges=()):
    """A random llama that writes letters only, saved beside its tokenizer; `stop` weighs how often it ends a turn."""
    tokenizer = byte_tokenizer(*merges)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.5, max_position_embeddings=512, bos_token_id=0, eos_token_id=STOP,
        pad_token_id=STOP,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
    spoken = [STOP, *(tokenizer.convert_tokens_to_ids("Ġ" if letter == " " else letter) for letter in letters)]
    silent = sorted(set(range(len(tokenizer))) - set(spoken))
    with torch.no_grad():
        model.lm_head.weight[silent] = 0.0
        model.lm_head.weight[STOP] *= stop
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Verifier.load(str(folder), device="cpu")


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    return talking(tmp_path_factory.mktemp("verifier"))


@pytest.fixture
def forwards(verifier, monkeypatch):
    """Rows of every forward pass of the verifier."""
    rows = []
    for name in ("decode", "features"):
        own = getattr(verifier, name)
        monkeypatch.setattr(verifier, name, lambda ids, *rest, own=own: rows.append(len(ids)) or own(ids, *rest))
    return rows


def chat(*texts, number=0, **fields):
    """User and assistant, turn and turn about."""
    messages = tuple({"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts))
    values = {"id": f"c-{number}", "category": "maths", "split": "train", "source": f"chat.jsonl:{number}"} | fields
    return Conversation(messages=messages, **values)


def questions(count):
    return [chat(f"what is {i} and {'why ' * (i % 4)}?", number=i) for i in range(count)]


def own_answers(verifier, conversation, limit=LIMIT):
    """(prompt ids, answer ids) of every turn, in order, one generation after the other."""
    messages, turns = [], []
    for message in conversation.messages:
        if message["role"] == "assistant":
            continue
        messages.append(message)
        prompt = prompt_ids(verifier.tokenizer, messages)
        (answer,) = generate(verifier, [prompt], limit)
        turns.append((prompt, answer))
        text = verifier.tokenizer.decode([token for token in answer if token != STOP])
        messages.append({"role": "assistant", "content": text})
    return turns


def test_answers_of_both_kinds_are_among_those_below(verifier):
    """Some end by themselves, some are cut: otherwise the tests here would show little."""
    ends = [own_answers(verifier, conversation)[0][1][-1] == STOP for conversation in questions(8)]
    assert {True, False} == set(ends)


@pytest.mark.parametrize("batch", [1, 3, 100])
def test_a_sample_is_the_prompt_and_the_verifiers_answer(batch, verifier, tmp_path):
    conversations = questions(8)
    answered = regenerate(verifier, conversations, AnswerStore(tmp_path, "f" * 16, LIMIT), LIMIT, batch)
    assert len(answered) == 8
    for conversation, found in zip(conversations, answered, strict=True):
        [(prompt, answer)] = own_answers(verifier, conversation)
        sample = found.sample
        assert sample.ids == prompt + answer
        assert sample.mask == [False] * len(prompt) + [True] * len(answer)
        assert (sample.id, sample.category, sample.split, sample.source, sample.cut) == (
            conversation.id, "maths", "train", conversation.source, 0,
        )  # fmt: skip
        assert found.features is None


def learned_text(verifier, sample):
    return verifier.tokenizer.decode([token for token, on in zip(sample.ids, sample.mask, strict=True) if on])


def test_the_stop_token_after_a_cut_answer_is_not_supervised(verifier, tmp_path):
    """The template closes the first turn of every chat, whether or not the verifier did."""
    conversations = [chat(f"what is {i}?", "OLD", "and?", number=i) for i in range(8)]
    ends = set()
    for conversation, found in zip(
        conversations, regenerate(verifier, conversations, AnswerStore(tmp_path, "f" * 16, LIMIT), LIMIT, 8), strict=True
    ):
        (_, answer), (prompt, last) = own_answers(verifier, conversation)
        assert verifier.tokenizer.decode(prompt).count("<|im_end|>") == 3
        assert learned_text(verifier, found.sample) == verifier.tokenizer.decode(answer + last)
        ends.add(answer[-1] == STOP)
    assert ends == {True, False}


def test_turns_are_answered_in_order(verifier, tmp_path):
    """The second question is asked after the verifier's own first answer, not the file's."""
    conversations = [
        chat("one?", "OLD", "two?", "OLDER", "three?", number=1),
        chat("four?", "OLD", number=2),
        chat("five?", number=3),
    ]
    answered = regenerate(verifier, conversations, AnswerStore(tmp_path, "f" * 16, LIMIT), LIMIT, 2)
    for conversation, found in zip(conversations, answered, strict=True):
        turns = own_answers(verifier, conversation)
        assert found.sample.ids == turns[-1][0] + turns[-1][1]
        learned = {len(prompt) + i for prompt, answer in turns for i in range(len(answer))}
        assert {i for i, on in enumerate(found.sample.mask) if on} == learned
        assert "OLD" not in verifier.tokenizer.decode(found.sample.ids)
    assert [len(own_answers(verifier, conversation)) for conversation in conversations] == [3, 1, 1]


def test_a_second_run_generates_nothing(verifier, forwards, tmp_path):
    conversations = [*questions(4), chat("one?", "OLD", "two?", number=9)]
    told = []
    first = regenerate(verifier, conversations, AnswerStore(tmp_path, "f" * 16, LIMIT), LIMIT, 2, None, told.append)
    learned = sum(len(answer) for c in conversations for _, answer in own_answers(verifier, c))
    assert sum(told) == learned
    assert forwards
    forwards.clear()
    again = regenerate(verifier, conversations, AnswerStore(tmp_path, "f" * 16, LIMIT), LIMIT, 2)
    assert (again, forwards) == (first, [])


def test_a_killed_run_goes_on_where_it_was(verifier, forwards, tmp_path):
    """The store has the answers of whole batches, and the line that a kill tore is written again."""
    conversations = questions(6)
    store = AnswerStore(tmp_path, "f" * 16, LIMIT)
    expected = regenerate(verifier, conversations, store, LIMIT, 2)
    lines = store.path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 6
    store.path.write_bytes(b"".join(lines[:4]) + lines[4][:-9])
    forwards.clear()
    resumed = AnswerStore(tmp_path, "f" * 16, LIMIT)
    assert len(resumed.answers) == 4
    assert regenerate(verifier, conversations, resumed, LIMIT, 1) == expected
    assert max(forwards) == 1  # two prompts, one a batch
    assert sum(forwards) <= 2 * LIMIT
    assert sorted(store.path.read_bytes().splitlines()) == sorted(line.rstrip() for line in lines)


def test_every_batch_is_stored_as_soon_as_it_is_done(verifier, tmp_path, monkeypatch):
    store = AnswerStore(tmp_path, "f" * 16, LIMIT)
    add = store.add

    def add_once(*arguments):
        if store.answers:
            raise KeyboardInterrupt
        add(*arguments)

    monkeypatch.setattr(store, "add", add_once)
    with pytest.raises(KeyboardInterrupt):
        regenerate(verifier, questions(6), store, LIMIT, 2)
    assert len(AnswerStore(tmp_path, "f" * 16, LIMIT).answers) == 2


def test_the_store_is_lines_of_json(tmp_path):
    store = AnswerStore(tmp_path / "new", "0123456789abcdefg", 64)
    assert store.path == tmp_path / "new" / "0123456789abcdef-64.jsonl"
    assert store.get([1, 2]) is None
    store.add([[1, 2], [12]], [[7, 8], []])
    store.add([[3]], [[9]])
    assert [store.get(prompt) for prompt in ([1, 2], [12], [3], [1], [1, 2, 3])] == [[7, 8], [], [9], None, None]
    rows = [json.loads(line) for line in store.path.read_text().splitlines()]
    assert rows == [{"prompt": digest(p), "answer": a} for p, a in (([1, 2], [7, 8]), ([12], []), ([3], [9]))]
    assert AnswerStore(tmp_path / "new", "0123456789abcdefg", 64).answers == store.answers


@pytest.mark.parametrize("torn", [b"{", b'{"prompt": "abc", "answer": [1, 2', b'{"prompt": "abc", "answer": [1, 2]}'])
def test_a_torn_last_line_is_cut_off(torn, tmp_path):
    store = AnswerStore(tmp_path, "f" * 16, 8)
    store.add([[1]], [[5]])
    whole = store.path.read_bytes()
    store.path.write_bytes(whole + torn)
    again = AnswerStore(tmp_path, "f" * 16, 8)
    assert again.answers == store.answers
    assert store.path.read_bytes() == whole
    again.add([[2]], [[6]])
    assert AnswerStore(tmp_path, "f" * 16, 8).answers == {digest([1]): [5], digest([2]): [6]}


def test_other_verifiers_and_other_limits_have_other_stores(tmp_path):
    AnswerStore(tmp_path, "a" * 16, 8).add([[1]], [[5]])
    assert AnswerStore(tmp_path, "b" * 16, 8).get([1]) is None
    assert AnswerStore(tmp_path, "a" * 16, 9).get([1]) is None


@pytest.mark.parametrize("batch", [1, 8])
def test_features_of_new_answers_are_those_of_a_forward_pass(batch, verifier, tmp_path):
    """Equal wherever training reads them: up to the last supervised token, which is never fed."""
    conversations = [
        *questions(5),
        chat("one?", "OLD", "two?", number=9),
        chat("one?", "OLD", "two?", "OLD", "three?", number=10),
    ]
    answered = regenerate(verifier, conversations, AnswerStore(tmp_path, "f" * 16, LIMIT), LIMIT, batch, LAYERS)
    source = OnlineFeatures(verifier, [found.sample for found in answered], LAYERS)
    for i, found in enumerate(answered):
        _, own = source.load([i])
        last = max(at for at, on in enumerate(found.sample.mask) if on)
        assert found.features.last.shape == own.last[0].shape
        torch.testing.assert_close(found.features.last[:last], own.last[0, :last], atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(found.features.layers[:last], own.layers[0, :last], atol=1e-3, rtol=1e-3)
        assert found.features.choice.tolist() == own.choice[0].tolist()


def test_an_earlier_answer_that_reads_back_as_other_tokens_is_not_supervised(tmp_path):
    """The verifier writes a, b where the tokenizer then reads ab: not its own choice. The last answer stays as written."""
    verifier = talking(tmp_path, "abc", stop=0.7, merges=[("a", "b"), ("b", "c")])
    conversations = [chat(f"{i}?", "OLD", f"again {i}?", number=i) for i in range(8)]
    answered = regenerate(verifier, conversations, AnswerStore(tmp_path, "f" * 16, 6), 6, 12, LAYERS)
    source = OnlineFeatures(verifier, [found.sample for found in answered], LAYERS)
    unchanged = []
    for i, found in enumerate(answered):
        sample, turns = found.sample, own_answers(verifier, conversations[i], limit=6)
        (first_prompt, first), (prompt, last) = turns
        assert sample.ids == prompt + last
        unchanged.append(prompt[: len(first_prompt) + len(first)] == first_prompt + first)
        supervised = set(range(len(prompt), len(sample.ids)))
        if unchanged[-1]:
            supervised |= set(range(len(first_prompt), len(first_prompt) + len(first)))
        assert {at for at, on in enumerate(sample.mask) if on} == supervised
        assert found.features.choice.tolist() == source.load([i])[1].choice[0].tolist()
    assert set(unchanged) == {True, False}


def test_a_system_message_and_an_answer_without_a_question(verifier, tmp_path):
    """An answer that the file begins with was asked by nobody: it goes, and a chat of nothing else goes with it."""
    system = Conversation("s", ({"role": "system", "content": "S"}, {"role": "user", "content": "Q"}), None, None, "f:1")
    leading = Conversation("l", ({"role": "assistant", "content": "OLD"}, {"role": "user", "content": "Q"}), None, None, "f:2")
    alone = Conversation("a", ({"role": "assistant", "content": "OLD"},), None, None, "f:3")
    answered = regenerate(verifier, [system, alone, leading], AnswerStore(tmp_path, "f" * 16, LIMIT), LIMIT, 2)
    texts = [verifier.tokenizer.decode(found.sample.ids) for found in answered]
    assert [found.sample.id for found in answered] == ["s", "l"]
    assert texts[0].startswith("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n")
    assert texts[1].startswith("<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("roles", "groups"),
    [
        ("u", ["u"]), ("ua", ["u"]), ("uau", ["u", "u"]), ("uaua", ["u", "u"]), ("suau", ["su", "u"]), ("auu", ["uu"]),
        ("uatau", ["u", "t", "u"]), ("uaau", ["u", "u"]), ("a", []), ("", []),
    ],
)  # fmt: skip
def test_split_turns(roles, groups):
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    messages = [{"role": names[role], "content": str(i)} for i, role in enumerate(roles)]
    assert ["".join(m["role"][0] for m in group) for group in split_turns(messages)] == groups


def test_complete_answers_what_has_no_last_answer_and_keeps_the_rest(verifier, tmp_path):
    rows = [chat("one?", "GIVEN", number=1), chat("two?", "GIVEN", "three?", number=2), chat("four?", number=3)]
    found = complete(verifier, rows, AnswerStore(tmp_path, "f" * 16, LIMIT), LIMIT, 2, LAYERS)
    assert [one.sample.id for one in found] == ["c-1", "c-2", "c-3"]
    whole = render(verifier.tokenizer, rows[0].messages)
    assert (found[0].sample.ids, found[0].sample.mask) == (whole.ids, whole.mask)
    for row, one in zip(rows[1:], found[1:], strict=True):
        prompt = prompt_ids(verifier.tokenizer, row.messages)
        (answer,) = generate(verifier, [prompt], LIMIT)
        assert one.sample.ids == prompt + answer
        assert one.sample.mask[len(prompt) :] == [True] * len(answer)
    assert learned_text(verifier, found[1].sample).startswith("GIVEN<|im_end|>")
    assert not any(found[2].sample.mask[: len(prompt)])
    assert [one.features is None for one in found] == [True, True, False]  # GIVEN need not be the verifier's choice


def test_a_conversation_the_template_refuses_is_told_with_its_line(tmp_path):
    verifier = talking(tmp_path)
    verifier.tokenizer.chat_template = (
        "{% if messages[0]['content'] == 'bad' %}{{ raise_exception('Not this one') }}{% endif %}" + CHATML
    )
    rows = [chat("bad", number=1), chat("one?", number=2), chat("bad", "GIVEN", number=3)]
    for write, left in ((regenerate, ["c-2"]), (complete, ["c-2"])):
        store = AnswerStore(tmp_path / "answers", "f" * 16, LIMIT)
        with pytest.raises(UserError, match=r"^chat.jsonl:1: no rendering: the chat template of .*: Not this one$"):
            write(verifier, rows, store, LIMIT, 2)
        told = []
        found = write(verifier, rows, store, LIMIT, 2, refuse=lambda bad, source, told=told: told.append((bad.reason, source)))
        assert [one.sample.id for one in found] == left
        assert sorted(told) == [("no rendering", "chat.jsonl:1"), ("no rendering", "chat.jsonl:3")]


def test_answers_are_drawn_by_dice_of_their_own(verifier, tmp_path):
    """The same seed gives the same answers, in whatever batch; another seed or temperature has answers of its own."""
    rows = questions(6)

    def drawn(name, batch, temperature=1.0, seed=0):
        store = AnswerStore(tmp_path / name, "f" * 16, LIMIT, temperature, seed)
        found = regenerate(verifier, rows, store, LIMIT, batch, LAYERS)
        assert all(one.features is None for one in found)  # a drawn token need not be the verifier's first choice
        return [one.sample.ids for one in found]

    one = drawn("a", 6)
    assert drawn("b", 1) == one
    assert drawn("c", 6, seed=1) != one
    assert drawn("d", 6, temperature=0.01) == [
        one.sample.ids for one in regenerate(verifier, rows, AnswerStore(tmp_path / "e", "f" * 16, LIMIT), LIMIT, 6)
    ]
    assert drawn("a", 6, seed=1) == drawn("c", 6, seed=1)  # the stores do not mix
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert names == {f"{'f' * 16}-{LIMIT}-t1.0-s0.jsonl", f"{'f' * 16}-{LIMIT}-t1.0-s1.jsonl"}


def test_draws_follow_the_distribution():
    """Chi-square of 20,000 draws against softmax(logits / T)."""
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, -torch.inf])
    prompts = [[i] for i in range(20_000)]
    choose = drawing(prompts, 0.8, 3)
    found = torch.bincount(choose(logits.expand(len(prompts), 5), list(range(len(prompts)))), minlength=5)
    expected = torch.softmax(logits[:4].double() / 0.8, -1) * len(prompts)
    assert found[4] == 0
    assert ((found[:4] - expected) ** 2 / expected).sum() < 16.27  # 0.1 % of 3 degrees of freedom


def test_a_prompt_that_comes_twice_is_asked_once(verifier, forwards, tmp_path):
    rows = [chat("what?", number=i) for i in range(4)]
    found = regenerate(verifier, rows, AnswerStore(tmp_path, "f" * 16, LIMIT), LIMIT, 4)
    assert len({tuple(one.sample.ids) for one in found}) == 1
    assert max(forwards) == 1
