import io
import json
import re
from collections import Counter

import pytest
import torch
from rich.console import Console

from headstart.data.agreement import Agreement
from headstart.data.inspection import inspect_file
from headstart.data.inspection_view import lines, to_terminal, write_page
from headstart.errors import UserError


def row(*texts):
    return json.dumps({"messages": [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(texts)]})


def inspect(folder, tokenizer, lines, max_length=2048, limit=1, **more):
    path = folder / "chat.jsonl"
    path.write_text("\n".join(lines))
    return inspect_file([path], tokenizer, max_length, limit, **more)


def printed(inspection, **more):
    console = Console(file=io.StringIO(), width=100, **more)
    console.print(to_terminal(inspection))
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
    words = [tokenizer(f"{word}<|im_end|>")["input_ids"] for word in ("fine", "you", "yes")]
    different = {id for ids in (*words, cut[prompt:50]) for id in ids}
    assert told == {
        "rows": 7,
        "samples": 4,
        "dropped": 3,
        "tokens": len(example["ids"]) + 2 * len(short) + 50,
        "supervised": answered + 2 * (len(tokenizer("yes")["input_ids"]) + 1) + 50 - prompt,
        "truncated": 1,
        "cut_tokens": len(cut) - 50,
        "duplicates": 1,
        "longest": len(cut),
        "different": len(different),
        "draft_vocabulary": [],
        "agreement": None,
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
    told = [" ".join(part.strip() for part in line.split("│")).strip() for line in printed(inspection).splitlines()]
    share = inspection.coverage.supervised / inspection.coverage.tokens
    for line in [
        "rows 7",
        "samples 4",
        "dropped rows 3",
        "left out: no messages 1",
        f"supervised tokens {inspection.coverage.supervised} ({share:.1%})",
        "duplicate samples 1",
        f"truncated samples 1 ({inspection.coverage.cut} tokens cut)",
    ]:
        assert line in told


def test_the_page_is_complete_in_itself_and_trusts_no_text(tmp_path, make_tokenizer):
    inspection = inspect(tmp_path, make_tokenizer(), [row("<script>a</script>&", "fine <b>")])
    write_page(inspection, tmp_path / "new" / "page.html")
    page = (tmp_path / "new" / "page.html").read_text()
    assert "&lt;script&gt;a&lt;/script&gt;&amp;&lt;|im_end|&gt;" in page
    assert "<mark>fine &lt;b&gt;&lt;|im_end|&gt;</mark>" in page
    assert page.count("<mark>") == 2  # one explains the colour
    assert not re.search(r"<script|<b>|src=|href=|@import|url\(", page)
    for name, value in lines(inspection):
        assert f"<tr><td>{name}</td><td>{value}</td></tr>" in page
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/page.html: cannot be written: "):
        write_page(inspection, tmp_path / "file" / "page.html")


def test_the_coverage_of_draft_vocabularies(tmp_path, make_tokenizer):
    tokenizer = make_tokenizer()
    inspection = inspect(tmp_path, tokenizer, LINES, max_length=50, limit=9, sizes=[len(tokenizer), 8, 8])
    counts = Counter(id for one in inspection.examples for id, on in zip(one.sample.ids, one.sample.mask, strict=True) if on)
    special = {*tokenizer.all_special_ids, *tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])}
    others = sorted((count for id, count in counts.items() if id not in special), reverse=True)
    covered = sum(counts[id] for id in special) + sum(others[: 8 - len(special)])
    assert 0 < covered < counts.total()
    assert inspection.to_json()["draft_vocabulary"] == [
        {"size": 8, "coverage": covered / counts.total()},
        {"size": len(tokenizer), "coverage": 1.0},
    ]
    assert f"covers {covered / counts.total():.2%}" in printed(inspection)
    with pytest.raises(UserError, match=r"^draft vocabulary of 1: must hold the 4 special tokens"):
        inspect(tmp_path, tokenizer, LINES, sizes=[1])


def test_case_55_text_of_another_author_is_warned_of(tmp_path, make_tokenizer, tiny):
    """Against the argmax of transformers' own logits, sample by sample."""
    tokenizer = make_tokenizer()
    verifier = tiny("llama", vocab_size=len(tokenizer))
    inspection = inspect(tmp_path, tokenizer, LINES, max_length=50, limit=9, verifier=verifier, read=3)
    tokens = agreeing = 0
    for one in inspection.examples[:3]:
        choice = verifier.model(torch.tensor([one.sample.ids])).logits[0].argmax(-1).tolist()
        for at in range(1, len(one.sample.ids)):
            tokens += one.sample.mask[at]
            agreeing += one.sample.mask[at] and choice[at - 1] == one.sample.ids[at]
    assert inspection.agreement == Agreement(tokens, agreeing)
    assert inspection.to_json()["agreement"] == {"tokens": tokens, "agreeing": agreeing, "share": agreeing / tokens}
    told = " ".join(printed(inspection).split())
    assert f"warning: only {agreeing / tokens:.0%} of the supervised tokens are what the verifier would choose" in told
    write_page(inspection, tmp_path / "page.html")
    assert '<p class="warning">only ' in (tmp_path / "page.html").read_text()


def test_text_of_the_verifiers_own_is_not_warned_of():
    assert Agreement(100, 75).warning is None
    assert Agreement(0, 0).warning is None
    assert Agreement(100, 74).warning.startswith("only 74% of the supervised tokens")


def test_bad_rows_stop_the_inspection_unless_skipped(tmp_path, make_tokenizer):
    lines = ['{"broken', LINES[1]]
    with pytest.raises(UserError, match=r"chat.jsonl:1: broken JSON"):
        inspect(tmp_path, make_tokenizer(), lines)
    assert inspect(tmp_path, make_tokenizer(), lines, on_bad="skip").to_json()["skipped"] == {"broken JSON": 1}
