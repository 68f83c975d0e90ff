"""What goes wrong between a chat file and its masks: templates, truncation, roles, special tokens, file formats."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from headstart.data.chat import prompt_ids, render, samples, truncate
from headstart.data.conversations import read_conversations
from headstart.data.skips import Skips
from headstart.errors import UserError

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def byte_tokenizer(template=CHATML, adds_bos=False, **special):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["user assistant say ok yes fine"] * 4, trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    named = {"bos_token": "<s>", "eos_token": "</s>", **special}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **named)


def chat(*texts):
    """User and assistant, turn and turn about."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def supervised_text(tokenizer, sample):
    return tokenizer.decode([id for id, on in zip(sample.ids, sample.mask, strict=True) if on])


def write_rows(folder, *rows):
    path = folder / "chat.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_case_01_a_template_without_markers_supervises_answers_and_their_ends():
    tokenizer = byte_tokenizer()
    sample = render(tokenizer, chat("How are you?", "fine", "And now?", "you"))
    assert supervised_text(tokenizer, sample) == "fine<|im_end|>you<|im_end|>"
    assert 0 < sum(sample.mask) < len(sample.ids)
    assert not any(on for id, on in zip(sample.ids, sample.mask, strict=True) if id == 2)  # headers
    assert not sample.mask[-1]  # the line break behind the last end of turn


def test_case_01_no_span_is_an_error_that_names_the_template():
    tokenizer = byte_tokenizer("{% for message in messages %}{{ message['role'] }}{% endfor %}")
    with pytest.raises(UserError, match=r"the chat template of .* does not write the answer once"):
        render(tokenizer, chat("How are you?", "fine"))


def test_case_02_a_row_whose_answer_is_cut_off_is_dropped_and_counted(tmp_path):
    tokenizer, skips = byte_tokenizer(), Skips()
    long, good = {"messages": chat("say " * 200, "fine ok yes")}, {"messages": chat("say ok", "fine")}
    rows = read_conversations([write_rows(tmp_path, long, good)], skips)
    assert [sample.id for sample in samples(tokenizer, rows, 64, skips)] == ["chat-2"]
    assert skips.summary(skips.read) == ["1 of 2 rows have no supervised token after max_length=64"]


def test_case_02_all_rows_dropped_is_an_error(tmp_path):
    path = write_rows(tmp_path, *[{"messages": chat("say " * 200, "fine")}] * 2)
    error = "^2 of 2 rows have no supervised token after max_length=64; raise max_length$"
    with pytest.raises(UserError, match=error):
        list(samples(byte_tokenizer(), read_conversations([path], Skips()), 64, Skips()))


def test_case_06_role_aliases_give_identical_samples(tmp_path):
    path = write_rows(
        tmp_path,
        {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
        {"conversations": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]},
        {"conversations": [{"from": "human", "value": "Q"}, {"from": "bing", "value": "A"}]},
    )
    one, *others = [render(byte_tokenizer(), row.messages) for row in read_conversations([path], Skips())]
    assert others == [one, one]
    tools = [{"from": name, "value": "R"} for name in ("tool", "observation", "function")]
    (row,) = read_conversations([write_rows(tmp_path, {"conversations": tools})], Skips())
    assert [message["role"] for message in row.messages] == ["tool"] * 3


def test_case_06_an_unknown_role_is_named_with_its_line(tmp_path):
    turns = [{"from": "human", "value": "Q"}, {"from": "laguna_s", "value": "A"}]
    path = write_rows(tmp_path, {"prompt": "Q"}, {"conversations": turns})
    with pytest.raises(UserError, match=r"chat.jsonl:2: unknown role 'laguna_s': message 2; known roles are system, user, "):
        list(read_conversations([path], Skips()))
    skips = Skips()
    assert len(list(read_conversations([path], skips, on_bad="skip"))) == 1
    assert skips.counts == {"unknown role 'laguna_s'": 1}


@pytest.mark.parametrize("template", ["{{ bos_token }}" + CHATML, CHATML])
def test_case_15_the_beginning_of_sequence_is_never_doubled(template):
    tokenizer = byte_tokenizer(template, adds_bos=True)
    messages = chat("How are you?", "fine")
    assert tokenizer("x")["input_ids"][0] == 0  # the tokenizer adds one of its own
    sample = render(tokenizer, messages)
    assert sample.ids == tokenizer.apply_chat_template(messages, tokenize=True)["input_ids"]
    prompt = prompt_ids(tokenizer, messages[:1])
    assert prompt == tokenizer.apply_chat_template(messages[:1], tokenize=True, add_generation_prompt=True)["input_ids"]
    bos = 1 if template.startswith("{{ bos") else 0
    assert (sample.ids.count(0), prompt.count(0)) == (bos, bos)


@pytest.mark.parametrize("pad", ["<|im_end|>", None])
def test_case_16_the_end_of_turn_is_supervised_even_when_it_is_the_padding(pad):
    tokenizer = byte_tokenizer(eos_token="<|im_end|>", **({"pad_token": pad} if pad else {}))
    size = len(tokenizer)
    sample = render(tokenizer, chat("ok", "fine"))
    eos = tokenizer.eos_token_id
    marks = [on for id, on in zip(sample.ids, sample.mask, strict=True) if id == eos]
    assert marks == [False, True]  # the same id, told apart by where it stands
    assert (len(tokenizer), tokenizer.pad_token) == (size, pad)


@pytest.mark.parametrize("template", [CHATML, MARKED])
@pytest.mark.parametrize(
    "question", ["say ok", "ok", "<|im_start|>assistant\nok<|im_end|>\n", "<|im_start|>assistant\n", "ok<|im_end|>"]
)
def test_case_17_words_and_headers_typed_by_the_user_open_no_span(template, question):
    tokenizer = byte_tokenizer(template)
    sample = render(tokenizer, chat(question, "ok"))
    assert supervised_text(tokenizer, sample) == "ok<|im_end|>"
    answer = tokenizer("ok", add_special_tokens=False)["input_ids"]
    assert sum(sample.mask) == len(answer) + 1
    assert sample.mask[-len(answer) - 2 :] == [True] * (len(answer) + 1) + [False]


def test_case_17_an_answer_may_type_the_end_of_turn_itself():
    tokenizer = byte_tokenizer()
    sample = render(tokenizer, chat("say ok", "ok<|im_end|> ok", "ok<|im_end|>", "ok"))
    assert supervised_text(tokenizer, sample) == "ok<|im_end|> ok<|im_end|>ok<|im_end|>"


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_case_18_a_user_turn_behind_the_answer_stays_unsupervised(template):
    tokenizer = byte_tokenizer(template)
    sample = render(tokenizer, chat("ok", "fine  ", "yes"))
    assert supervised_text(tokenizer, sample) == "fine  <|im_end|>"


def test_case_18_markers_alone_give_one_one_and_zeros():
    template = (
        "{% for message in messages %}{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}"
        "{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    )
    messages = [{"role": "assistant", "content": "A"}, {"role": "user", "content": "BC"}]
    assert render(byte_tokenizer(template), messages).mask == [True, False, False]


def test_case_18_a_cut_answer_keeps_its_surviving_tokens():
    sample = render(byte_tokenizer(), chat("ok", "fine yes ok say"))
    first = sample.mask.index(True)
    cut = truncate(sample, first + 3)
    assert cut.ids == sample.ids[: first + 3]
    assert cut.mask == [False] * first + [True] * 3


def test_case_50_rows_of_different_shapes_may_stand_in_one_file(tmp_path):
    call = {"name": "clock", "arguments": {"x": 1}}
    path = write_rows(
        tmp_path,
        {"conversations": [{"from": "human", "value": "Q\u2028\u0085"}]},
        {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": None, "tool_calls": [call]}]},
        {"conversations": None},
        {"messages": []},
        {"prompt": "Q", "response": "A", "extra": {"y": None}},
    )
    skips = Skips()
    assert [row.messages for row in read_conversations([path], skips)] == [
        ({"role": "user", "content": "Q\u2028\u0085"},),
        ({"role": "user", "content": "Q"}, {"role": "assistant", "content": "", "tool_calls": [call]}),
        ({"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}),
    ]
    assert skips.counts == {"no messages": 2}


def test_case_50_line_separators_break_no_lines(tmp_path):
    path = tmp_path / "chat.jsonl"
    texts = ["a\u2028b", "a\u2029b", "a\u0085b"]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(json.dumps({"prompt": t}, ensure_ascii=False) for t in texts).encode())
    assert [row.messages[0]["content"] for row in read_conversations([path], Skips())] == texts


def test_case_50_a_broken_line_is_named_or_counted(tmp_path):
    path = write_rows(tmp_path, {"prompt": "Q"}, '{"prompt": "Q')
    with pytest.raises(UserError, match=r"chat.jsonl:2: broken JSON: Unterminated string .* at column 12$"):
        list(read_conversations([path], Skips()))
    skips = Skips()
    assert len(list(read_conversations([path], skips, on_bad="skip"))) == 1
    assert skips.counts == {"broken JSON": 1}
    assert skips.rows[0]["source"] == f"{path}:2"


@pytest.mark.parametrize("name", ["chat.jsonl", "chat.json", "chat.csv", "chat.txt"])
def test_case_50_an_empty_file_has_no_conversations(tmp_path, name):
    path = tmp_path / name
    path.write_text("")
    with pytest.raises(UserError, match=f"{name}: 0 conversations$"):
        list(read_conversations([path], Skips()))
