import random
from itertools import groupby

import pytest
from transformers import ByT5Tokenizer

from headstart.data.chat import Sample, prompt_ids, render, samples, truncate
from headstart.data.conversations import Conversation
from headstart.data.skips import Skips
from headstart.errors import UserError


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def tool(text):
    return {"role": "tool", "content": text}


def supervised(tokenizer, sample):
    """The text of each run of supervised tokens."""
    groups = groupby(zip(sample.ids, sample.mask, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([id for id, _ in group]) for on, group in groups if on]


def conversation(*messages, line=1):
    return Conversation(f"chat-{line}", messages, "writing", "train", f"chat.jsonl:{line}")


CALL = {"type": "function", "function": {"name": "clock", "arguments": {"zone": "</s><|im_end|>"}}}
TWO_TURNS = [user("How are you?"), assistant("fine"), user("ok  "), assistant("you say  ")]
THOUGHT = [
    user("ok?"),
    assistant("<think>\nyes\n</think>\n\nfine"),
    user("no?"),
    assistant("<think>\nno\n</think>\n\nyou"),
]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("chatml", ["fine<|im_end|>", "you say  <|im_end|>"]),
        ("marked", ["fine<|im_end|>", "you say  <|im_end|>"]),
        ("marked without end", ["fine<|im_end|>", "you say  <|im_end|>"]),
        ("marked with header", ["fine<|im_end|>", "you say  <|im_end|>"]),
        ("marked with line break", ["fine<|im_end|>", "you say  <|im_end|>"]),
        ("llama2", [" fine </s>", " you say </s>"]),
        ("merging", [" fine</s>", " you say  </s>"]),
        ("llama3", ["fine</s>", "you say</s>"]),
        ("phi", ["fine<|end|>", "you say  <|end|>"]),
        ("plain", [" fine", " you say  "]),
        ("harmony", ["fine", "you say  </s>"]),
        ("thinking", ["fine<|im_end|>", "<think>\n\n</think>\n\nyou say  <|im_end|>"]),
        ("opening", ["fine</s>", "you say  </s>"]),
        ("announcing", ["fine<|end|>", "you say  <|end|>"]),
        ("filling", ["</think>fine</s>", "</think>you say  </s>"]),
    ],
)
def test_each_kind_of_template_supervises_the_answers_and_their_ends(make_tokenizer, template, expected):
    tokenizer = make_tokenizer(template)
    sample = render(tokenizer, TWO_TURNS)
    assert sample.ids == tokenizer.apply_chat_template(TWO_TURNS)["input_ids"]
    assert supervised(tokenizer, sample) == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("chatml", ["<think>\nyes\n</think>\n\nfine<|im_end|>", "<think>\nno\n</think>\n\nyou<|im_end|>"]),
        ("thinking", ["fine<|im_end|>", "<think>\nno\n</think>\n\nyou<|im_end|>"]),
        ("opening", ["\n\nfine</s>", "\n\nyou</s>"]),
    ],
)
def test_a_turn_whose_thinking_is_dropped_is_supervised_as_it_stands(make_tokenizer, template, expected):
    tokenizer = make_tokenizer(template)
    sample = render(tokenizer, THOUGHT)
    assert sample.ids == tokenizer.apply_chat_template(THOUGHT)["input_ids"]
    assert supervised(tokenizer, sample) == expected


def test_tool_calls_are_supervised_and_tool_results_are_not(make_tokenizer):
    tokenizer = make_tokenizer("thinking")
    call = '<tool_call>\n{"name": "clock", "arguments": {"zone": "</s><|im_end|>"}}\n</tool_call>'
    thought = "<think>\nyes\n</think>\n\n"
    once = [user("ok?"), assistant(thought, tool_calls=[CALL]), tool("12 <|im_end|>"), assistant("12")]
    assert supervised(tokenizer, render(tokenizer, once)) == [
        f"{thought}{call}<|im_end|>",
        "<think>\n\n</think>\n\n12<|im_end|>",
    ]
    # A later question makes the template drop the thinking: the prompts of the first turns are no prefixes any more.
    again = [*once, user("you?"), assistant("", tool_calls=[CALL, CALL]), tool("13"), assistant("13")]
    assert supervised(tokenizer, render(tokenizer, again)) == [
        f"{call}<|im_end|>",
        "12<|im_end|>",
        f"{call}\n{call}<|im_end|>",
        "<think>\n\n</think>\n\n13<|im_end|>",
    ]


REASONING = (
    "{%- if tools %}{{ '<|im_start|>system\n' + tools | map('tojson') | join('\n') + '<|im_end|>\n' }}{%- endif %}"
    "{%- set ns = namespace(last=-1) %}{%- for message in messages if message.role == 'user' %}"
    "{%- set ns.last = messages.index(message) %}{%- endfor %}{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{%- if message.reasoning_content is string and loop.index0 > ns.last %}"
    "{{ '<think>\n' + message.reasoning_content.strip('\n') + '\n</think>\n\n' }}{%- endif %}{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}{{ '\n<tool_call>\n' }}{{ call.function | tojson }}{{ '\n</tool_call>' }}"
    "{%- endfor %}{{ '<|im_end|>\n' }}"
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{%- endif %}"
    "{{ '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{%- endif %}"
    "{%- else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)


@pytest.mark.parametrize("later", [False, True])
def test_reasoning_in_a_field_of_its_own_and_several_tool_results(make_tokenizer, later):
    """A later question makes the template drop all reasoning before it; results of tools share one turn of the user."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = REASONING
    chat = [
        user("ok?"),
        assistant("", reasoning_content="yes", tool_calls=[CALL, CALL]),
        tool("12"),
        tool("13"),
        assistant("fine", reasoning_content="no"),
    ]
    chat += [user("and?"), assistant("you", reasoning_content="say")] if later else []
    tools = [{"name": "clock"}]
    sample = render(tokenizer, chat, tools)
    assert sample.ids == tokenizer.apply_chat_template(chat, tools=tools)["input_ids"]
    calls = '\n<tool_call>\n{"name": "clock", "arguments": {"zone": "</s><|im_end|>"}}\n</tool_call>' * 2
    if later:
        expected = [f"{calls}<|im_end|>", "fine<|im_end|>", "<think>\nsay\n</think>\n\nyou<|im_end|>"]
    else:
        expected = [f"<think>\nyes\n</think>\n\n{calls}<|im_end|>", "<think>\nno\n</think>\n\nfine<|im_end|>"]
    assert supervised(tokenizer, sample) == expected


def test_a_tool_call_that_the_template_leaves_out_is_refused(make_tokenizer):
    with pytest.raises(UserError, match="leaves out the tool call of message 2"):
        render(make_tokenizer("chatml"), [user("ok?"), assistant("", tool_calls=[CALL]), tool("12"), assistant("12")])


def test_a_conversation_may_begin_with_the_assistant(make_tokenizer):
    tokenizer = make_tokenizer()
    sample = render(tokenizer, [assistant("fine"), assistant("ok"), user("yes")])
    assert supervised(tokenizer, sample) == ["fine<|im_end|>", "ok<|im_end|>"]


def random_text(choose):
    pieces = [
        "fine",
        " ",
        "\n",
        "ok ",
        "<|im_end|>",
        "<|im_start|>assistant\n",
        "é",
        "😀",
        "你好",
        "<tool_call>",
        "user",
    ]
    return "".join(choose.choices(pieces, k=choose.randint(1, 5)))


def test_random_chats_agree_with_a_template_that_has_markers(make_tokenizer):
    plain, marked = make_tokenizer("chatml"), make_tokenizer("marked")
    choose = random.Random(0)
    for _ in range(150):
        roles = choose.choices(["user", "assistant", "system", "tool"], weights=[3, 3, 1, 1], k=choose.randint(1, 6))
        chat = [{"role": role, "content": choose.choice(["", random_text(choose)])} for role in roles]
        sample = render(plain, chat)
        assert sample == render(marked, chat)
        assert sample.ids == plain.apply_chat_template(chat)["input_ids"]


def test_random_thoughts_and_calls_agree_with_a_template_that_has_markers(make_tokenizer):
    plain, marked = make_tokenizer("thinking"), make_tokenizer("thinking marked")
    choose = random.Random(1)
    for _ in range(100):
        chat = []
        for _ in range(choose.randint(1, 3)):
            chat.append(user(random_text(choose)))
            for _ in range(choose.randint(0, 2)):
                calls = [CALL] * choose.randint(1, 2)
                chat += [assistant(random_answer(choose), tool_calls=calls), tool(random_text(choose))]
            chat.append(assistant(random_answer(choose)))
        sample = render(plain, chat)
        assert sample == render(marked, chat)
        assert sample.ids == plain.apply_chat_template(chat)["input_ids"]


def random_answer(choose):
    return choose.choice(["", f"<think>\n{random_text(choose)}\n</think>\n\n"]) + random_text(choose)


def test_a_tokenizer_without_offsets_gives_the_same_texts(make_tokenizer):
    slow = ByT5Tokenizer(extra_ids=0, additional_special_tokens=["<|im_start|>", "<|im_end|>"])
    slow.chat_template = make_tokenizer().chat_template
    assert not slow.is_fast
    sample = render(slow, TWO_TURNS)
    assert sample.ids == slow.apply_chat_template(TWO_TURNS)["input_ids"]
    assert supervised(slow, sample) == ["fine<|im_end|>", "you say  <|im_end|>"]


def test_tools_reach_the_template(make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ tools | tojson if tools else '' }}" + tokenizer.chat_template
    tools = [{"name": "clock"}]
    sample = render(tokenizer, TWO_TURNS, tools)
    assert sample.ids == tokenizer.apply_chat_template(TWO_TURNS, tools=tools)["input_ids"]
    assert tokenizer.decode(prompt_ids(tokenizer, TWO_TURNS[:1], tools)).startswith('[{"name": "clock"}]<|im_start|>')
    assert supervised(tokenizer, sample) == ["fine<|im_end|>", "you say  <|im_end|>"]


def test_the_prompt_ends_where_the_supervised_tokens_begin(make_tokenizer):
    tokenizer = make_tokenizer()
    sample = render(tokenizer, TWO_TURNS)
    prompt = prompt_ids(tokenizer, TWO_TURNS[:3])
    assert prompt == tokenizer.apply_chat_template(TWO_TURNS[:3], add_generation_prompt=True)["input_ids"]
    assert sample.ids[: len(prompt)] == prompt
    assert sample.mask[len(prompt) - 1 : len(prompt) + 1] == [False, True]


def test_a_changed_template_is_asked_anew(make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    render(tokenizer, TWO_TURNS)
    tokenizer.chat_template = make_tokenizer("phi").chat_template
    assert supervised(tokenizer, render(tokenizer, TWO_TURNS)) == ["fine<|end|>", "you say  <|end|>"]


@pytest.mark.parametrize(
    ("template", "messages", "error"),
    [
        ("strict", TWO_TURNS, "the chat template of .* refuses the conversation: Only turn and turn about"),
        ("silent", TWO_TURNS, "the chat template of .* does not write the answer once"),
        ("deaf", [user("ok"), assistant("a"), tool("12"), assistant("b")], r"hides where message 3 \(tool\) stands"),
        ("chatml", [{"role": "user"}, assistant("a")], "the chat template of .* refuses the conversation: .*content"),
    ],
)
def test_what_cannot_be_masked_exactly_is_refused(make_tokenizer, template, messages, error):
    with pytest.raises(UserError, match=error):
        render(make_tokenizer(template), messages)


def test_two_answers_in_a_row_are_two_turns(make_tokenizer):
    for template, end in {"chatml": "<|im_end|>", "marked": "<|im_end|>", "harmony": ""}.items():
        tokenizer = make_tokenizer(template)
        sample = render(tokenizer, [user("ok"), assistant("fine"), assistant("yes")])
        assert supervised(tokenizer, sample) == ["fine" + end, "yes" + (end or "</s>")]


def test_an_empty_answer_is_its_end_of_turn(make_tokenizer):
    for template in ("chatml", "marked"):
        tokenizer = make_tokenizer(template)
        assert supervised(tokenizer, render(tokenizer, [user("ok"), assistant("")])) == ["<|im_end|>"]


def test_markers_that_mark_nothing_are_refused(make_tokenizer):
    tokenizer = make_tokenizer("marked")
    tokenizer.chat_template = "{% generation %}{% endgeneration %}" + make_tokenizer("chatml").chat_template
    with pytest.raises(UserError, match=r"the chat template of .* leaves nothing of the assistant's turns to learn from"):
        render(tokenizer, TWO_TURNS)


def test_a_tokenizer_without_a_template_is_refused(make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    for function in (prompt_ids, render):
        with pytest.raises(UserError, match="has no chat template; use an instruct model's"):
            function(tokenizer, TWO_TURNS)


def test_truncation_cuts_on_the_right_and_counts_what_it_cut():
    sample = Sample([5, 6, 7, 8], [False, True, True, False])
    assert truncate(sample, 4) is sample
    assert truncate(sample, 2) == Sample([5, 6], [False, True], cut=2)
    assert truncate(truncate(sample, 2), 1) == Sample([5], [False], cut=3)
    assert [truncate(sample, length).has_supervised for length in (1, 2)] == [False, True]


def test_samples_carry_what_the_conversation_says_of_itself(make_tokenizer):
    (sample,) = samples(make_tokenizer(), [conversation(*TWO_TURNS, line=7)], 2048, Skips())
    assert (sample.id, sample.category, sample.split, sample.source) == ("chat-7", "writing", "train", "chat.jsonl:7")


def test_prompts_without_answers_are_counted_apart(make_tokenizer):
    skips = Skips()
    kept = list(samples(make_tokenizer(), [conversation(user("ok")), conversation(*TWO_TURNS, line=2)], 2048, skips))
    assert [sample.id for sample in kept] == ["chat-2"]
    assert skips.rows == [{"source": "chat.jsonl:1", "reason": "no assistant turn"}]
    with pytest.raises(UserError, match=r"^1 of 1 rows have no assistant turn; let the verifier answer the prompts first$"):
        list(samples(make_tokenizer(), [conversation(user("ok"))], 2048, Skips()))


def test_a_chat_the_template_refuses_names_its_line(make_tokenizer):
    with pytest.raises(UserError, match=r"^chat.jsonl:3: no rendering: the chat template of .*: Only turn and turn about$"):
        list(samples(make_tokenizer("strict"), [conversation(*TWO_TURNS, line=3)], 2048, Skips()))
    skips = Skips()
    with pytest.raises(UserError, match=r"^1 of 1 rows have no rendering$"):
        list(samples(make_tokenizer("strict"), [conversation(*TWO_TURNS, line=3)], 2048, skips, on_bad="skip"))
    assert skips.counts == {"no rendering": 1}


def test_no_conversations_at_all_is_an_error(make_tokenizer):
    with pytest.raises(UserError, match=r"^0 conversations$"):
        list(samples(make_tokenizer(), [], 2048, Skips()))
