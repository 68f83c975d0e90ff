import io
import json

import pytest
from rich.console import Console

from headstart.data.inspection import inspect_file
from headstart.errors import UserError


def row(*texts):
    return json.dumps({"messages": [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(texts)]})


def inspect(folder, tokenizer, lines, max_length=2048, limit=1, **more):
    path = folder / "chat.jsonl"
    path.write_text("\n".join(lines))
    return inspect_file([path], tokenizer, max_length, limit, **more)


def printed(inspection, **more):
    console = Console(file=io.StringIO(), width=100, **more)
    console.print(inspection)
    return console.file.getvalue()


LINES = [
    row("How are you?", "fine", "ok?", "you"),
    row("ok?", "yes"),
    row("ok?", "yes"),
    row("ok?"),
    '{"messages": null}',
    row("say ok " * 40, "ok"),
    row("ok?", "yes " * 60),
]


def test_the_json_counts_every_row_and_shows_the_first(tmp_path, make_tokenizer):
    tokenizer = make_tokenizer()
    told = inspect(tmp_path, tokenizer, LINES, max_length=50).to_json()
    assert json.loads(json.dumps(told)) == told
    (example,) = told.pop("examples")
    messages = json.loads(LINES[0])["messages"]
    assert example["ids"] == tokenizer.apply_chat_template(messages)["input_ids"]
    assert example["supervised"] == ["fine<|im_end|>", "you<|im_end|>"]
    assert len(example["mask"]) == len(example["ids"])
    short = tokenizer.apply_chat_template(json.loads(LINES[1])["messages"])["input_ids"]
    longest = tokenizer.apply_chat_template(json.loads(LINES[5])["messages"])["input_ids"]
    cut = tokenizer.apply_chat_template(json.loads(LINES[6])["messages"])["input_ids"]
    answered = len(tokenizer("fine")["input_ids"] + tokenizer("you")["input_ids"]) + 2
    prompt = len(tokenizer.apply_chat_template(json.loads(LINES[6])["messages"][:1], add_generation_prompt=True)["input_ids"])
    skipped = {"no messages": 1, "no assistant turn": 1, "no supervised token after max_length=50": 1}
    assert told.pop("skipped") == skipped
    assert len(cut) > 50
    assert told == {
        "rows": 7,
        "samples": 4,
        "dropped": 3,
        "tokens": len(example["ids"]) + 2 * len(short) + 50,
        "supervised": answered + 2 * (len(tokenizer("yes")["input_ids"]) + 1) + 50 - prompt,
        "truncated": 1,
        "duplicates": 1,
        "longest": len(cut),
    }
    assert len(longest) > 50


def test_the_terminal_shows_supervised_text_in_green(tmp_path, make_tokenizer):
    inspection = inspect(tmp_path, make_tokenizer(), [row("[bold]é\x1b[31m", "fine 😀")])
    plain = printed(inspection)
    assert f"{tmp_path / 'chat.jsonl'}:1" in plain.replace("\n", "")
    assert "[bold]é␛[31m<|im_end|>" in plain
    assert "fine 😀<|im_end|>" in plain
    coloured = printed(inspection, force_terminal=True, color_system="standard")
    assert "\x1b[1;32mfine 😀<|im_end|>\x1b[0m" in coloured
    assert "\x1b[31m" not in coloured


def test_the_table_tells_the_share_and_the_reasons(tmp_path, make_tokenizer):
    inspection = inspect(tmp_path, make_tokenizer(), LINES, max_length=50, limit=0)
    assert inspection.examples == []
    lines = [" ".join(part.strip() for part in line.split("│")).strip() for line in printed(inspection).splitlines()]
    share = inspection.coverage.supervised / inspection.coverage.tokens
    for line in [
        "rows 7",
        "samples 4",
        "dropped rows 3",
        "left out: no messages 1",
        f"supervised tokens {inspection.coverage.supervised} ({share:.1%})",
        "duplicate samples 1",
        "truncated samples 1",
    ]:
        assert line in lines


def test_bad_rows_stop_the_inspection_unless_skipped(tmp_path, make_tokenizer):
    lines = ['{"broken', LINES[1]]
    with pytest.raises(UserError, match=r"chat.jsonl:1: broken JSON"):
        inspect(tmp_path, make_tokenizer(), lines)
    assert inspect(tmp_path, make_tokenizer(), lines, on_bad="skip").to_json()["skipped"] == {"broken JSON": 1}
