import csv
import json
import sys
import tracemalloc
from itertools import islice

import pytest

from headstart.data.conversations import read_conversations
from headstart.data.skips import Skips
from headstart.errors import UserError

CHAT = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
ROW = json.dumps({"messages": CHAT})


def write(folder, name, text):
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def read(path, skips=None, on_bad="error"):
    return list(read_conversations([path], skips or Skips(), on_bad))


def read_row(folder, row, skips=None):
    (found,) = read(write(folder, "chat.jsonl", json.dumps(row)), skips)
    return found


def messages(*pairs):
    return tuple({"role": role, "content": content} for role, content in pairs)


QA = messages(("user", "Q"), ("assistant", "A"))
Q = QA[:1]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]}, QA),
        ({"conversations": CHAT}, QA),
        ({"messages": CHAT}, QA),
        ({"conversation": CHAT}, QA),
        (CHAT, QA),
        ({"messages": [{"role": "User ", "content": "Q"}, {"role": "CHATGPT", "content": "A"}]}, QA),
        ({"conversations": CHAT, "system": "S"}, messages(("system", "S")) + QA),
        ({"conversations": [{"from": "system", "value": "T"}, *CHAT], "system": "S"}, messages(("system", "T")) + QA),
        ({"conversations": CHAT, "system": ""}, QA),
        ({"conversations": json.dumps(CHAT)}, QA),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Q"}, {"type": "text", "text": "!"}]}]},
         messages(("user", "Q!"))),
        ({"instruction": "Q", "output": "A"}, QA),
        ({"instruction": "Q", "input": "", "output": "A"}, QA),
        ({"instruction": "Q", "input": "I", "output": "A"}, messages(("user", "Q\n\nI"), ("assistant", "A"))),
        ({"instruction": "Q", "context": "I", "response": "A"}, messages(("user", "Q\n\nI"), ("assistant", "A"))),
        ({"instruction": "Q", "instances": [{"input": "", "output": "A"}]}, QA),
        ({"prompt": "Q", "response": "A"}, QA),
        ({"prompt": "Q", "completion": "A"}, QA),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, QA),
        ({"question": "Q", "answer": "A"}, QA),
        ({"system_prompt": "S", "question": "Q", "response": "A"}, messages(("system", "S")) + QA),
        ({"prompt": "Q"}, Q),
        ({"prompt": "Q", "response": None}, Q),
        ({"prompt": "no", "prompt_id": "7", "messages": CHAT}, QA),
        ({"messages": [{"role": "developer", "content": "S"}, *CHAT]}, messages(("system", "S")) + QA),
        ({"messages": [{"role": "user", "content": [{"type": "input_text", "text": "Q"}]},
                       {"role": "assistant", "content": [{"type": "output_text", "text": "A"}]}]}, QA),
        ({"turns": ["Q"]}, Q),
        ({"turns": CHAT}, QA),
        ("Q", Q),
    ],
)  # fmt: skip
def test_rows_of_each_shape(tmp_path, row, expected):
    assert read_row(tmp_path, row).messages == expected


def test_the_row_says_what_it_is(tmp_path):
    path = write(tmp_path, "set.jsonl", "\n".join(json.dumps(row) for row in [
        {"prompt": "Q"},
        {"id": 7, "category": "math", "split": "test", "prompt": "Q"},
        {"question_id": 81, "turns": ["Q"]},
    ]))  # fmt: skip
    assert [(one.id, one.category, one.split, one.source) for one in read(path)] == [
        ("set-1", None, None, f"{path}:1"),
        ("7", "math", "test", f"{path}:2"),
        ("81", None, None, f"{path}:3"),
    ]


def test_tools_and_calls_keep_their_structure(tmp_path):
    call = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "X"}'}}
    row = {
        "tools": json.dumps([{"name": "clock"}]),
        "messages": [
            {"role": "user", "content": "Q", "tool_calls": None},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "R"},
            {"role": "tool", "content": "12", "tool_call_id": "c1"},
        ],
    }
    found = read_row(tmp_path, row)
    assert found.tools == [{"name": "clock"}]
    function = {"name": "clock", "arguments": {"zone": "X"}}  # text would be quoted once more by the template
    assert found.messages == (
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "", "tool_calls": [{**call, "function": function}], "reasoning_content": "R"},
        {"role": "tool", "content": "12", "tool_call_id": "c1"},
    )


CALL = {"type": "function", "function": {"name": "clock", "arguments": {"zone": "X"}}}


@pytest.mark.parametrize(
    ("turn", "calls"),
    [
        ({"role": "assistant", "content": None, "function_call": {"name": "clock", "arguments": '{"zone": "X"}'}}, [CALL]),
        ({"from": "function_call", "value": '{"name": "clock", "arguments": {"zone": "X"}}'}, [CALL]),
        ({"from": "function_call", "value": json.dumps([CALL["function"]] * 2)}, [CALL, CALL]),
    ],
)
def test_calls_of_older_styles_become_tool_calls(tmp_path, turn, calls):
    found = read_row(tmp_path, {"conversations": [CHAT[0], turn, {"from": "observation", "value": "12"}]})
    assert found.messages == (
        Q[0],
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "12"},
    )


def test_a_message_whose_content_is_null_is_counted_and_not_an_error(tmp_path):
    skips = Skips()
    empty = {"messages": [CHAT[0], {"role": "assistant", "content": None}]}
    path = write(tmp_path, "chat.jsonl", f"{json.dumps(empty)}\n{ROW}")
    assert [one.messages for one in read(path, skips)] == [QA]
    assert skips.rows == [
        {"source": f"{path}:1", "reason": "a message whose content is null", "detail": "message 2"},
    ]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"turns": ["Q", "Q2"]}, "later turns without answers"),
        ({"instruction": "Q", "instances": [{"output": "A"}, {"output": "B"}]}, "further instances"),
        (
            {"prompt": {"role": "prompter", "text": "Q", "replies": [
                {"role": "assistant", "text": "A", "replies": []}, {"role": "assistant", "text": "B", "replies": []},
            ]}},
            "further replies",
        ),
    ],
)  # fmt: skip
def test_what_is_left_out_of_a_row_is_noted(tmp_path, row, reason):
    skips = Skips()
    found = read_row(tmp_path, row, skips)
    assert found.messages in (Q, QA)
    assert (skips.read, skips.dropped, skips.counts) == (1, 0, {reason: 1})
    assert skips.rows == [{"source": found.source, "reason": reason}]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"messages": ', ":1: broken JSON: Expecting value at column 14"),
        ("[" * 100_000, ":1: broken JSON: nested too deeply"),
        ("7", ":1: no conversation: a JSON object is expected, not 7"),
        ('{"from": 1' + "0" * 5000 + "}", ":1: broken JSON: a number of more digits than can be read"),
        ('{"messages": [{"from": "function_call", "value": "12"}]}',
         ":1: tool calls that are no list of objects: message 1"),
        ('{"text": "Q"}', ":1: unknown keys: text; one of conversations, messages, "),
        ("{}", ":1: unknown keys: none; one of "),
        ('{"messages": "Q"}', ':1: messages that are no list: "Q"'),
        ('{"messages": ["Q"]}', ':1: a message that is no object: message 1 is "Q"'),
        ('{"messages": [{"content": "Q"}]}', ":1: a message without a role: message 1"),
        ('{"messages": [{"role": "user", "content": "Q"}, {"role": "user"}]}', ":1: a message without text: message 2"),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
         ":1: content that is not text: message 1 has a part of type 'image_url'"),
        ('{"messages": [{"role": "assistant", "tool_calls": "x"}]}',
         ":1: tool calls that are no list of objects: message 1"),
        ('{"prompt": "Q", "tools": [7]}', ":1: tools that are no list of objects: [7]"),
        ('{"prompt": 7}', ":1: something that is not text: the prompt is 7"),
        ('{"prompt": "Q", "response": {"a": 1}}', ':1: something that is not text: the answer is {"a": 1}'),
        (r'{"prompt": "\ud83d"}', ":1: broken text: half of a surrogate pair"),
        (b'{"prompt": "\xff"}', ":1: bytes that are not UTF-8: byte 13 of the line is 0xff"),
    ],
)  # fmt: skip
def test_a_bad_row_is_one_line_and_can_be_skipped(tmp_path, text, error):
    path = write(tmp_path, "chat.jsonl", text)
    with pytest.raises(UserError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}{error}")
    assert "\n" not in str(caught.value)
    path.write_bytes(path.read_bytes() + b"\n" + ROW.encode())
    skips = Skips()
    assert [one.messages for one in read(path, skips, on_bad="skip")] == [QA]
    assert (skips.read, skips.dropped) == (2, 1)
    assert skips.rows[0]["source"] == f"{path}:1"
    assert error.startswith(f":1: {skips.rows[0]['reason']}")


def test_text_files_hold_a_prompt_a_line(tmp_path):
    path = write(tmp_path, "prompts.txt", "\ufeffone\r\n\n  two\u2028still two \n")
    assert [(one.id, one.messages) for one in read(path)] == [
        ("prompts-1", messages(("user", "one"))),
        ("prompts-3", messages(("user", "two\u2028still two"))),
    ]


def test_a_csv_file_has_a_header_and_cells_of_any_length(tmp_path):
    path = tmp_path / "chat.csv"
    long = "A" * 200_000
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows(
            [["prompt", "response", "category"], ["Q\n2", "A", ""], [], ["Q", "", "math"], ["Q", long, ""]]
        )
    assert [(one.id, one.category, one.messages) for one in read(path)] == [
        ("chat-2", None, messages(("user", "Q\n2"), ("assistant", "A"))),
        ("chat-4", "math", Q),
        ("chat-6", None, messages(("user", "Q"), ("assistant", long))),
    ]


@pytest.mark.parametrize(("name", "mark"), [("chat.csv", ";"), ("chat.csv", "\t"), ("chat.tsv", "\t")])
def test_a_table_of_other_separators(tmp_path, name, mark):
    path = write(tmp_path, name, f'\ufeffprompt{mark}response\r\n"Q, {mark}"{mark}A, B\r\n')
    assert [one.messages for one in read(path)] == [messages(("user", f"Q, {mark}"), ("assistant", "A, B"))]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("prompt\nQ,R\n", ":2: broken CSV: 2 cells under a header of 1 columns"),
        ("prompt\nQ\rR\n", ":2: broken CSV: new-line character seen in unquoted field"),
        (b"prompt\nQ\n\xe9\n", ":3: bytes that are not UTF-8: byte 1 of the line is 0xe9"),
        ("prompt\n", ": 0 conversations"),
    ],
)
def test_a_broken_csv_file_is_one_line(tmp_path, text, error):
    path = write(tmp_path, "chat.csv", text)
    with pytest.raises(UserError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}{error}")


@pytest.mark.parametrize("name", ["chat.json", "chat.JSON"])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_array_is_read_element_by_element(tmp_path, name, indent, monkeypatch):
    monkeypatch.setattr("headstart.data.readers._CHUNK", 16)
    rows = [{"prompt": f"Q{i} é \u2028 {'long ' * i}"} for i in range(20)]
    path = write(tmp_path, name, "\ufeff \n" + json.dumps(rows, indent=indent, ensure_ascii=False) + "\n")
    assert [one.messages[0]["content"] for one in read(path)] == [row["prompt"] for row in rows]
    assert [one.id for one in read(path)][:2] == ["chat-1", "chat-2"]


def test_a_json_file_may_hold_json_lines(tmp_path):
    assert [one.messages for one in read(write(tmp_path, "chat.json", f"\n{ROW}\n{ROW}"))] == [QA, QA]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[]", ": 0 conversations"),
        ("", ": 0 conversations"),
        (" \n", ": 0 conversations"),
        (f"[{ROW}, ", ":2: broken JSON: row 2 of the array: Expecting value"),
        (f"[{ROW}, {{", ":2: broken JSON: row 2 of the array: Expecting property name"),
        (f"[{ROW} {ROW}]", ":1: broken JSON: row 1 of the array: expecting ',' or the end of the array after it"),
        (f"[{ROW}", ":1: broken JSON: row 1 of the array: expecting ',' or the end of the array after it"),
        (f"[{ROW}]\n[{ROW}]", ":1: broken JSON: row 1 of the array: expecting ',' or the end of the array after it"),
        (b'["\xff"]', ": not UTF-8: invalid start byte"),
    ],
)
def test_a_broken_json_array_is_one_line(tmp_path, text, error):
    path = write(tmp_path, "chat.json", text)
    with pytest.raises(UserError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}{error}")


def test_parquet_files_invent_no_keys(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [
        {"id": "a", "messages": CHAT},
        {"messages": [{"role": "assistant", "tool_calls": [{"name": "clock", "arguments": {"x": 1}}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"name": "clock", "arguments": {"y": 2}}]}]},
        {"messages": None},
        {"messages": [{"role": "assistant", "content": None}]},
    ]
    path = tmp_path / "chat.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    skips = Skips()
    found = read(path, skips)
    assert [one.id for one in found] == ["a", "chat-2", "chat-3"]
    assert found[0].messages == QA
    assert found[1].messages[0]["tool_calls"] == [{"name": "clock", "arguments": {"x": 1}}]
    assert found[2].messages[0]["tool_calls"] == [{"name": "clock", "arguments": {"y": 2}}]
    assert skips.counts == {"no messages": 1, "a message whose content is null": 1}
    with pytest.raises(UserError, match=r"x.parquet: not a readable Parquet file"):
        read(write(tmp_path, "x.parquet", "no"))


def test_parquet_without_its_package_names_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        UserError, match=r"x.parquet: reading Parquet needs the package pyarrow: pip install 'headstart\[data\]'$"
    ):
        read(write(tmp_path, "x.parquet", ""))


def test_files_that_cannot_be_read_are_told_at_once(tmp_path):
    good = write(tmp_path, "good.jsonl", ROW)
    for path, error in [
        (tmp_path / "none.jsonl", "none.jsonl: no such file"),
        (tmp_path, "is a folder; name the chat files inside it"),
        (write(tmp_path, "chat.docx", "x"), "chat.docx: unknown kind of file; known are .jsonl, .ndjson, .json, .csv"),
    ]:
        with pytest.raises(UserError, match=error):
            read_conversations([good, path], Skips())  # nothing is read yet
    with pytest.raises(UserError, match="no chat files are given"):
        read_conversations([], Skips())


def test_several_files_are_one_stream_and_each_must_give_something(tmp_path):
    one, other = write(tmp_path, "a.jsonl", ROW), write(tmp_path, "b.txt", "Q")
    assert [found.id for found in read_conversations([one, str(other)], Skips())] == ["a-1", "b-1"]
    empty = write(tmp_path, "c.jsonl", '{"messages": []}\n')
    stream = read_conversations([one, empty], Skips())
    assert next(stream).id == "a-1"
    with pytest.raises(UserError, match=r"c.jsonl: 0 conversations in 1 rows; 1 have no messages$"):
        next(stream)


def test_reading_is_lazy_and_memory_stays_flat(tmp_path):
    row = json.dumps({"messages": [{"role": "user", "content": "Q" * 500}]})
    path = write(tmp_path, "chat.jsonl", f"{row}\n" * 4_000 + "broken")
    array = write(tmp_path, "chat.json", "[" + f"{row}," * 4_000 + "broken")
    for source in (path, array):
        tracemalloc.start()
        assert sum(1 for _ in islice(read_conversations([source], Skips()), 4_000)) == 4_000
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1_000_000  # bytes; each file has 2 MB


def test_skips_can_be_written_and_told(tmp_path):
    skips = Skips()
    skips.drop("broken JSON", "a:1", "at column 2")
    skips.drop("broken JSON", "a:2")
    skips.note("later turns without answers", "a:3")
    skips.write(tmp_path / "skipped.jsonl")
    assert [json.loads(line) for line in (tmp_path / "skipped.jsonl").read_text().splitlines()] == [
        {"source": "a:1", "reason": "broken JSON", "detail": "at column 2"},
        {"source": "a:2", "reason": "broken JSON"},
        {"source": "a:3", "reason": "later turns without answers"},
    ]
    assert skips.summary(9) == ["2 of 9 rows have broken JSON", "1 of 9 rows have later turns without answers"]
