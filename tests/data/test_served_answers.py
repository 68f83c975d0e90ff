"""Answers from a server that fails on purpose: error statuses, silence, garbage, dropped connections, answers out of order."""

import pytest
from rude_server import rude_server

from headstart.data import chat_server
from headstart.data.chat import render, sample_of
from headstart.data.chat_server import ChatServer
from headstart.data.conversations import Conversation
from headstart.data.served_answers import serve, served_store
from headstart.data.skips import Skips
from headstart.errors import UserError


@pytest.fixture
def rude(monkeypatch):
    monkeypatch.setattr(chat_server, "FIRST_PAUSE", 0.002)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with rude_server() as server:
        yield server


def client(rude, model="m", temperature=0.0, retries=6, timeout=60.0, answer_tokens=32, seed=0):
    return ChatServer(rude.url, model, answer_tokens, temperature, seed, 8, timeout, retries)


def chat(number, *texts, **fields):
    messages = tuple({"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts))
    return Conversation(f"c-{number}", messages, None, None, f"chat.jsonl:{number}", **fields)


def asked(server, conversations, folder, concurrency=8, complete=False, skips=None):
    with server:
        return serve(server, conversations, served_store(folder, server), concurrency, complete, skips or Skips())


def said(conversation):
    return [message["content"] for message in conversation.messages]


FAULTS = [
    [500],
    [503, 502, 500],
    [429],
    [408, 429, 500],
    ["drop"],
    ["torn"],
    [b"<html>busy</html>", b"\xff\xfe", b'"text"', b"{}", b'{"choices": []}'],
    [b'{"choices": [{"message": {"content": null}}]}', b'{"choices": [{"message": 7}]}'],
    ["drop", 500, "torn", b"[", 429],
]


def test_every_answer_comes_through_and_the_order_is_kept(rude, tmp_path):
    rows = [chat(i, f"q{i}", "OLD") for i in range(40)]
    rude.faults = {f"q{i}": FAULTS[i % 12] if i % 12 < len(FAULTS) else [0.02 * (3 - i % 3)] for i in range(40)}
    found = asked(client(rude, timeout=60.0), rows, tmp_path)
    assert [said(one) for one in found] == [[f"q{i}", f"answer to q{i}"] for i in range(40)]
    assert [(one.id, one.source, one.cut_short) for one in found] == [(one.id, one.source, False) for one in rows]
    tries = {f"q{i}": len(rude.faults[f"q{i}"]) + 1 if i % 12 < len(FAULTS) else 1 for i in range(40)}
    assert rude.asked == tries
    assert 1 < rude.busiest <= 8


def test_a_silent_server_is_asked_again(rude, tmp_path):
    rude.faults["q1"] = ["silence"]
    (found,) = asked(client(rude, timeout=0.5), [chat(1, "q1")], tmp_path)
    assert said(found) == ["q1", "answer to q1"]
    assert rude.asked["q1"] >= 2


def test_what_is_asked(rude, tmp_path, monkeypatch):
    monkeypatch.setenv(chat_server.KEY, "secret")
    tools = [{"type": "function", "function": {"name": "clock"}}]
    call = {"type": "function", "function": {"name": "clock", "arguments": {"zone": "X"}}}
    messages = (
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "12"},
    )
    row = Conversation("c", messages, None, None, "f:1", tools)
    (found,) = asked(client(rude, temperature=0.5, seed=9), [row], tmp_path, complete=True)
    assert rude.bodies == [
        {
            "model": "m",
            "messages": [
                messages[0],
                {**messages[1], "tool_calls": [
                    {"id": "call_0", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "X"}'}}]},
                messages[2],
            ],
            "tools": tools,
            "max_tokens": 32,
            "temperature": 0.5,
            "seed": 9,
        }
    ]  # fmt: skip
    assert rude.keys == ["Bearer secret"]
    assert found.messages == (*messages, {"role": "assistant", "content": "answer to 12"})


def test_turns_are_answered_in_order_and_calls_come_back_as_templates_take_them(rude, tmp_path):
    call = {"id": "x", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "X"}'}}
    rude.replies["q2"] = {"message": {"content": None, "tool_calls": [call]}, "finish_reason": "tool_calls"}
    (found,) = asked(client(rude), [chat(1, "q1", "OLD", "q2")], tmp_path)
    assert [[m["content"] for m in body["messages"]] for body in rude.bodies] == [["q1"], ["q1", "answer to q1", "q2"]]
    function = {"name": "clock", "arguments": {"zone": "X"}}
    assert found.messages[-1] == {"role": "assistant", "content": "", "tool_calls": [{**call, "function": function}]}


def test_complete_asks_only_for_what_is_missing(rude, tmp_path):
    rows = [chat(1, "q1", "OLD"), chat(2, "q2", "OLD", "q3"), chat(3, "q4")]
    found = asked(client(rude), rows, tmp_path, complete=True)
    assert [said(one) for one in found] == [["q1", "OLD"], ["q2", "OLD", "q3", "answer to q3"], ["q4", "answer to q4"]]
    assert sorted(rude.asked) == ["q3", "q4"]


def test_refusals_and_cut_answers_are_marked_and_counted(rude, tmp_path):
    filtered = {"message": {"content": "I"}, "finish_reason": "content_filter"}
    declined = {"message": {"content": None, "refusal": "no"}, "finish_reason": "stop"}
    rude.replies |= {
        "q1": filtered,
        "q2": declined,
        "q3": "",
        "q5": {"message": {"content": "fine ok"}, "finish_reason": "length"},
    }
    rude.faults["q4"] = [400] * 9
    rows = [chat(i, f"q{i}", "OLD", "more") for i in (1, 3, 4, 5)] + [chat(6, "q6", "OLD", "q2")]
    skips = Skips()
    found = asked(client(rude), rows, tmp_path, skips=skips)
    assert [(said(one), one.cut_short) for one in found] == [
        (["q5", "fine ok"], True),  # and nobody asks on after half an answer
        (["q6", "answer to q6"], False),
    ]
    assert skips.dropped == 3
    assert skips.rows == [
        {"source": "chat.jsonl:1", "reason": "an answer that the server refuses to give"},
        {"source": "chat.jsonl:3", "reason": "an empty answer by the server"},
        {"source": "chat.jsonl:4", "reason": "a question that the server answers with status 400", "detail": '{"error": "no"}'},
        {"source": "chat.jsonl:5", "reason": "an answer cut short by answer_tokens"},
        {"source": "chat.jsonl:6", "reason": "an answer that the server refuses to give"},
    ]
    assert rude.asked["q4"] == 1  # the question is the fault: asking again would not help


@pytest.mark.parametrize(
    ("template", "text"),
    [("chatml", "fine ok"), ("marked", "fine ok"), ("llama3", "fine ok"), ("merging", " fine ok"), ("plain", " fine ok")],
)
def test_a_cut_answer_ends_its_sample(make_tokenizer, template, text):
    """The verifier never wrote the end of turn that the template puts there."""
    tokenizer = make_tokenizer(template)
    row = chat(1, "How are you?", "yes", "and?", "fine ok", cut_short=True)
    sample, whole = sample_of(tokenizer, row), render(tokenizer, row.messages)
    assert sample.ids == whole.ids[: len(sample.ids)]
    assert sample.mask == whole.mask[: len(sample.ids)]
    last = len(sample.mask) - 1 - sample.mask[::-1].index(False)
    assert tokenizer.decode(sample.ids[last + 1 :]) == text
    assert len(sample.ids) < len(whole.ids) or template == "plain"


def test_a_second_run_asks_nothing_and_a_killed_one_goes_on(rude, tmp_path):
    rows = [chat(i, f"q{i}", "OLD", "more") for i in range(6)]
    rude.faults["q4"] = [500] * 99
    with pytest.raises(
        UserError, match=r"^http://\S+/v1: no answer in 3 tries, the last was status 500; what was answered is kept"
    ):
        asked(client(rude, retries=2), rows, tmp_path, concurrency=1)
    assert rude.asked == {"q0": 1, "q1": 1, "q2": 1, "q3": 1, "more": 4, "q4": 3}  # and nothing after it
    rude.faults.clear()
    first = asked(client(rude), rows, tmp_path)
    assert rude.asked == {"q0": 1, "q1": 1, "q2": 1, "q3": 1, "more": 6, "q4": 4, "q5": 1}
    before = sum(rude.asked.values())
    assert asked(client(rude), rows, tmp_path) == first
    assert sum(rude.asked.values()) == before


@pytest.mark.parametrize("changed", [{"temperature": 0.7}, {"answer_tokens": 8}, {"model": "other"}])
def test_other_models_and_samplings_have_other_stores(rude, tmp_path, changed):
    asked(client(rude), [chat(1, "q1")], tmp_path)
    asked(client(rude, **changed), [chat(1, "q1")], tmp_path)
    assert rude.asked["q1"] == 2
    asked(client(rude, temperature=0.7, seed=1), [chat(1, "q1")], tmp_path)
    asked(client(rude, temperature=0.7, seed=2), [chat(1, "q1")], tmp_path)
    assert rude.asked["q1"] == 4


def test_the_server_is_asked_for_its_model(rude, tmp_path):
    asked(client(rude, model=None), [chat(1, "q1")], tmp_path)
    assert rude.bodies[0]["model"] == "m"
    rude.models = ["a", "b"]
    with pytest.raises(UserError, match=r"^data.answers.model: http://\S+ has a, b; name one$"):
        asked(client(rude, model=None), [chat(1, "q1")], tmp_path)


def test_a_server_of_no_use_is_one_line(rude, tmp_path):
    rude.faults["q1"] = [401]
    with pytest.raises(UserError, match=r'^http://127.0.0.1:\d+/v1: status 401: {"error": "no"}$'):
        asked(client(rude), [chat(1, "q1")], tmp_path)
    gone = ChatServer("http://127.0.0.1:9", "m", 8, 0.0, 0, 1, 1.0, 1)
    assert gone.url == "http://127.0.0.1:9/v1"  # the address alone is enough
    with pytest.raises(UserError, match=r"^http://127.0.0.1:9/v1: no answer in 2 tries, the last was ConnectError"):
        asked(gone, [chat(1, "q1")], tmp_path)


def test_pauses_grow_and_the_servers_own_wish_counts(rude, tmp_path, monkeypatch):
    monkeypatch.setattr(chat_server, "FIRST_PAUSE", 1.0)
    monkeypatch.setattr(chat_server.random, "uniform", lambda low, high: high)
    server, pauses = client(rude), []
    monkeypatch.setattr(server.stop, "wait", lambda seconds: pauses.append(seconds))
    rude.faults["q1"] = [500, 500, 429, 500, 500]
    asked(server, [chat(1, "q1")], tmp_path)
    assert pauses == [1.0, 2.0, 0.0, 8.0, 16.0]
