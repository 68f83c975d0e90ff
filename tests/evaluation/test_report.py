"""The report page: numbers to the digit, escaping, no requests, faults in one line, and what a browser makes of it."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from headstart.errors import UserError
from headstart.evaluation import plots
from headstart.evaluation.report import write_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOSTILE = "</pre><script>alert('x')</script>"

# the worked example of the documentation, twice over: accepted [3, 0, 2] with 4 drafted
CHAIN = {
    "tree": {"kind": "chain", "depth": 4, "nodes": 5},
    "temperature": 0.0,
    "rounds": 6,
    "emitted": 16,
    "drafted": 24,
    "accepted": 10,
    "tau": 16 / 6,
    "survival": [2 / 3, 2 / 3, 1 / 3, 0.0],
    "conditional": [2 / 3, 1.0, 0.5, 0.0],
    "draft_acceptance_rate": 10 / 24,
    "alpha": 0.7125,
    "identical_to_greedy": True,
    "divergences": [],
    "speedup": 1.9375,
    "overhead": 16 / 6 / 1.9375,
    "seconds": {"prefill": 0.5, "draft": 1.0, "verify": 6.0, "other": 0.5, "plain": 15.5},
    "timing": {"prompts": 4, "repeats": 3, "batch": 1},
    "accepted_histogram": [2, 0, 2, 2, 0],
    "by_category": {
        "writing": {"tau": 2.25, "rounds": 4, "emitted": 9},
        "coding": {"tau": 3.5, "rounds": 2, "emitted": 7},
    },
    "by_context": {
        "0-127": {"tau": 2.5, "rounds": 4, "emitted": 10},
        "128-255": {"tau": 3.0, "rounds": 2, "emitted": 6},
    },
    "example": {
        "id": "writing-7",
        "category": "writing",
        "prompt": f"Say <b>{HOSTILE}</b>",
        "tokens": [
            {"text": "Once", "source": "prefill", "round": 0},
            {"text": " upon", "source": "drafted", "round": 1},
            {"text": "  a\n\n", "source": "drafted", "round": 1},
            {"text": HOSTILE, "source": "bonus", "round": 1},
            {"text": " time", "source": "drafted", "round": 2},
            {"text": "&amp;", "source": "bonus", "round": 2},
        ],
    },
}
DYNAMIC = CHAIN | {
    "tree": {"kind": "dynamic", "depth": 5, "top_k": 4, "nodes": 16},
    "rounds": 1234,
    "emitted": 4321,
    "drafted": 18510,
    "accepted": 3087,
    "tau": 4321 / 1234,
    "survival": [0.9, 0.7, 0.5, 0.3, 0.1017],
    "conditional": None,
    "draft_acceptance_rate": 3087 / 18510,
    "speedup": 1.25,
    "overhead": 4321 / 1234 / 1.25,
    "accepted_histogram": [100, 200, 300, 300, 200, 134],
}
STEPS = [
    {
        "step": step,
        "loss": 9.0 - step / 10,
        "loss_by_depth": [3.0 - step / 40, 3.4 - step / 50],
        "accuracy_by_depth": [0.3, 0.2],
        "learning_rate": 1e-3,
        "grad_norm": 0.7,
        "supervised_tokens": 2048,
        "tokens_per_second": 310.0,
        "time_shares": {"data": 0.003, "verifier": 0.2 + step / 100, "forward": 0.497 - step / 100, "other": 0.3},
        "seconds": 6.0 * step,
    }
    for step in range(10, 31, 10)
]
HELD_OUT = {"step": 30, "held_out": {"tau": 2.52, "survival": [0.8, 0.72], "rounds": 50, "emitted": 126}}

MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Write a run folder; `changes` go into its only result, or `results` replaces it."""

    def write(name: str = "eagle3", kind: str = "eagle3", results: Any = None, **changes: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "recipe.yaml").write_text(f"head: {{kind: {kind}}}  # <of {name}>\n", encoding="utf-8")
        lines = [json.dumps(line) for line in [*STEPS, HELD_OUT]]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        evaluation = {
            "verifier": "builtin:smollm2-135m",
            "head": {"kind": kind, "parameters": 9_512_345, "hidden_size": 576},
            "prompts": 80,
            "max_new_tokens": 48,
            "dtype": "float32",
            "device": "cpu",
            "seconds": 61.5,
            "results": results or [CHAIN | changes],
        }
        (folder / "evaluation.json").write_text(json.dumps(evaluation), encoding="utf-8")
        return folder

    return write


@pytest.fixture
def no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of words: drawing takes seconds."""
    monkeypatch.setattr("headstart.evaluation.report.draw", lambda runs: [])


class Page(HTMLParser):
    """Cells of the results table by name, text of all elements, and every attribute and tag."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[dict[str, str]] = []
        self.texts: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cell: str | None = None
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.tags.append((tag, named))
        if tag not in ("dfn", "span", "i", "wbr"):
            self.texts.append(" ")
        if tag == "th" and named.get("scope") == "row":
            self.rows.append({})
            self.cell = "head"
        elif tag == "td":
            self.cell = named.get("data-name")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("th", "td"):
            self.cell = None

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self.cell:
            self.rows[-1][self.cell] = (self.rows[-1].get(self.cell, "") + data).strip()

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).split())


def report(*folders: Path) -> Page:
    output = folders[0].parent / "report.html"
    assert write_report(list(folders), output) == output
    return Page(output.read_text(encoding="utf-8"))


def fault(*folders: Path) -> str:
    with pytest.raises(UserError) as caught:
        report(*folders)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.usefixtures("no_charts")
def test_every_number_of_a_result_is_in_the_table(make_run: MakeRun) -> None:
    page = report(make_run("a", results=[CHAIN, DYNAMIC]), make_run("b", "medusa", identical_to_greedy=None))
    assert page.rows[:2] == [
        {
            "head": "eagle3",
            "tree": "chain, depth 4",
            "temperature": "0",
            "tau": "2.667",
            "accepted / round": "1.667",
            "draft_acceptance_rate": "0.417",
            "alpha": "0.713",
            "identical_to_greedy": "✓ yes",
            "speedup": "1.94",
            "overhead": "1.38",
            "rounds": "6",
            "emitted": "16",
            "drafted": "24",
            "accepted": "10",
        },
        {
            "head": "eagle3",
            "tree": "dynamic, depth 5, top_k 4, 16 nodes",
            "temperature": "0",
            "tau": "3.502",
            "accepted / round": "2.502",
            "draft_acceptance_rate": "0.167",
            "alpha": "0.713",
            "identical_to_greedy": "✓ yes",
            "speedup": "1.25",
            "overhead": "2.80",
            "rounds": "1,234",
            "emitted": "4,321",
            "drafted": "18,510",
            "accepted": "3,087",
        },
    ]
    assert page.rows[2]["head"] == "medusa"
    assert page.rows[2]["identical_to_greedy"] == "not compared"
    assert "survival 1 0.667 2 0.667 3 0.333 4 0.000 conditional 1 0.667 2 1.000 3 0.500 4 0.000" in page.text
    assert "survival 1 0.900 2 0.700 3 0.500 4 0.300 5 0.102" in page.text
    assert page.text.count("conditional 1") == 2  # of the chains alone


@pytest.mark.usefixtures("no_charts")
def test_cards_show_the_best_tree_and_name_a_faster_one(make_run: MakeRun) -> None:
    page = report(make_run("a", results=[CHAIN, DYNAMIC]), make_run("b", "medusa"))
    assert (
        "eagle3 dynamic, depth 5, top_k 4, 16 nodes 3.50 tokens a verifier pass (tau); plain decoding has 1 "
        "Same tokens as greedy ✓ yes Speed-up 1.25× Fastest: chain, depth 4, 1.94×"
    ) in page.text
    assert "medusa chain, depth 4 2.67 tokens a verifier pass" in page.text
    assert page.text.count("Fastest:") == 1


@pytest.mark.usefixtures("no_charts")
def test_a_lossy_result_is_marked_and_never_the_best(make_run: MakeRun) -> None:
    sampled = {"temperature": 0.7, "identical_to_greedy": None}
    lossy = DYNAMIC | sampled | {"rule": "typical", "lossless": False, "tau": 4.9, "speedup": 3.0}
    drawn = CHAIN | sampled | {"rule": "without_replacement", "lossless": True}
    page = report(make_run("a", results=[lossy, drawn]))
    assert [row["temperature"] for row in page.rows[:2]] == ["0.7, typical (lossy)", "0.7, without_replacement"]
    assert "eagle3 chain, depth 4, T 0.7, without_replacement 2.67 tokens a verifier pass" in page.text
    assert "Fastest:" not in page.text


def test_nothing_measured_is_a_dash_not_a_zero(make_run: MakeRun) -> None:
    nothing = {"tau": None, "survival": [None] * 4, "conditional": [None] * 4, "draft_acceptance_rate": None}
    nothing |= {"alpha": None, "speedup": None, "overhead": None, "example": None, "seconds": {}, "rounds": 0}
    nothing |= {"accepted_histogram": [0] * 5, "by_category": {}, "by_context": {}}
    page = report(make_run(**nothing))
    missing = ("tau", "accepted / round", "draft_acceptance_rate", "alpha", "speedup", "overhead")
    assert [page.rows[0][name] for name in missing] == ["–"] * 6
    assert "survival 1 – 2 – 3 – 4 –" in page.text
    assert "not timed" in page.text
    assert "A decoded answer" not in page.text


@pytest.mark.usefixtures("no_charts")
def test_divergences_are_listed(make_run: MakeRun) -> None:
    found = [{"prompt": "coding-3", "position": 17, "gap": 0.00031}, {"prompt": HOSTILE, "position": 2, "gap": 1.5}]
    page = report(make_run(identical_to_greedy=False, divergences=found))
    assert page.rows[0]["identical_to_greedy"] == "✗ no"
    assert "eagle3 · chain, depth 4: 2 of 80 prompts prompt position gap coding-3 17 0.00031" in page.text
    assert "Divergences" not in report(make_run("clean")).text


def test_sample_is_coloured_by_source_and_escaped(make_run: MakeRun) -> None:
    folder = make_run(by_category={f"$<script>{HOSTILE}": {"tau": 2.5, "rounds": 2, "emitted": 5}})
    page = report(folder)
    html = (folder.parent / "report.html").read_text(encoding="utf-8")
    assert [tag for tag, _ in page.tags if tag in ("script", "link", "img", "iframe", "b")] == []
    assert "&lt;/pre&gt;&lt;script&gt;alert" in html
    assert '<span class="t b" title="drafted, round 1">  a\n\n</span>' in html  # white space as it is
    assert '<span class="t a" title="drafted, round 2"> time</span>' in html
    assert '<span class="t o" title="bonus, round 2">&amp;amp;</span>' in html
    assert '<pre class="decoded">\n<span class="t p" title="prefill, round 0">Once</span><span' in html
    assert "Prompt writing-7: 5 tokens in 2 rounds, 2.50 a round" in page.text


def test_page_asks_for_nothing(make_run: MakeRun) -> None:
    folder = make_run()
    page = report(folder, make_run("b", "medusa"))
    html = (folder.parent / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|//[a-z]|@import|src=", html)
    references = re.findall(r"url\(([^)]*)\)", html) + [
        value for _, attrs in page.tags for name, value in attrs.items() if value and name.endswith("href")
    ]
    ids = [attrs["id"] for _, attrs in page.tags if attrs.get("id")]
    assert references
    assert {reference[:1] for reference in references} == {"#"}
    assert {reference[1:] for reference in references} <= set(ids)
    assert len(ids) == len(set(ids))  # several pictures in one page


def test_pictures_lie_beside_the_page(make_run: MakeRun, tmp_path: Path) -> None:
    output = tmp_path / "new" / "page.html"
    write_report([make_run(), make_run("b", "medusa")], output)
    names = {"training-1", "training-2", "survival", "accepted", "categories", "contexts", "time"}
    assert {path.name for path in (output.parent / "plots").iterdir()} == {f"{name}.png" for name in names}
    assert {path.name for path in output.parent.iterdir()} == {"page.html", "plots"}  # no temporary files
    for path in (output.parent / "plots").iterdir():
        assert imread(path).shape[1] == 933  # 420 points at 160 an inch


def test_same_files_give_the_same_bytes(make_run: MakeRun) -> None:
    folders = [make_run(), make_run("b", "medusa")]
    contents = []
    for _ in range(2):
        report(*folders)
        files = [folders[0].parent / "report.html", *sorted((folders[0].parent / "plots").iterdir())]
        contents.append([file.read_bytes() for file in files])
    assert contents[0] == contents[1]


@pytest.mark.usefixtures("no_charts")
def test_runs_of_one_kind_are_told_apart(make_run: MakeRun) -> None:
    page = report(make_run("a"), make_run("b"), make_run("c", "medusa"))
    assert [row["head"] for row in page.rows] == ["eagle3 (a)", "eagle3 (b)", "medusa (c)"]


@pytest.mark.usefixtures("no_charts")
def test_facts_and_recipe_of_a_run(make_run: MakeRun) -> None:
    folder = make_run()
    text = report(folder).text
    assert "parameters 9.51M training steps 30 supervised tokens 6.14K training time 3 min" in text
    assert "of a step verifier 40%, other 30%, forward 30%" in text  # means of the lines; what rounds to nothing is left out
    assert "held-out prompts 80, up to 48 tokens timed on 4 prompts, batch 1, median of 3" in text
    assert "recipe.yaml head: {kind: eagle3} # <of eagle3>" in text
    assert "not evaluated alike" not in text


@pytest.mark.usefixtures("no_charts")
def test_runs_evaluated_differently_are_flagged(make_run: MakeRun) -> None:
    other = make_run("b", "medusa")
    path = other / "evaluation.json"
    path.write_text(path.read_text().replace('"float32"', '"bfloat16"').replace('"prompts": 80', '"prompts": 8'))
    assert "they differ in prompts , dtype." in report(make_run(), other).text.replace("prompts,", "prompts ,")


@pytest.mark.parametrize("name", ["recipe.yaml", "metrics.jsonl", "evaluation.json"])
def test_missing_empty_and_garbled_files(make_run: MakeRun, name: str) -> None:
    path = make_run() / name
    path.write_bytes(b"\xff\xfe")
    assert fault(path.parent) == f"{path}: not UTF-8 text"
    path.write_text(" \n")
    assert fault(path.parent).startswith(f"{path}: the file is empty; ")
    path.unlink()
    assert fault(path.parent).startswith(f"{path}: no such file; ")
    path.mkdir()
    assert fault(path.parent) == f"{path}: cannot read it: Is a directory"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"step": 20, "lo', "not JSON: Unterminated string starting at"),
        ('{"loss": 1.0}', "step: Field required"),
        ('{"step": 20, "loss_by_depth": [1.0, "x"]}', "loss_by_depth.1: Input should be a valid number, unable to "),
        ("3", "must be a JSON object"),
    ],
)
def test_broken_metrics_line_is_told_by_its_number(make_run: MakeRun, line: str, message: str) -> None:
    path = make_run() / "metrics.jsonl"
    path.write_text(json.dumps(STEPS[0]) + "\n" + line + "\n")
    assert fault(path.parent).startswith(f"{path}:2: {message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"verifier":\n oops}', ":2: not JSON: Expecting value"),
        ("[]", ": must be a JSON object"),
        ("{}", ": verifier: Field required"),
    ],
)
def test_broken_evaluation(make_run: MakeRun, text: str, message: str) -> None:
    path = make_run() / "evaluation.json"
    path.write_text(text)
    assert fault(path.parent) == f"{path}{message}"


def test_evaluation_without_results(make_run: MakeRun) -> None:
    path = make_run() / "evaluation.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"results": []}))
    assert fault(path.parent).startswith(f"{path}: results: List should have at least 1 item")


def test_no_folder(tmp_path: Path) -> None:
    assert fault(tmp_path / "gone") == f"{tmp_path / 'gone'}: no such run folder"
    with pytest.raises(UserError, match=r"^no run folders are given"):
        write_report([], tmp_path / "report.html")


@pytest.mark.usefixtures("no_charts")
def test_failed_report_leaves_the_old_one(make_run: MakeRun) -> None:
    folder = make_run()
    report(folder)
    before = (folder.parent / "report.html").read_bytes()
    (folder / "evaluation.json").write_text("{")
    fault(folder)
    assert (folder.parent / "report.html").read_bytes() == before


@pytest.mark.usefixtures("no_charts")
def test_unwritable_place(make_run: MakeRun) -> None:
    folder = make_run()
    with pytest.raises(UserError, match=r"recipe\.yaml/.*: cannot be written: "):
        write_report([folder], folder / "recipe.yaml" / "report.html")


def test_report_imports_no_torch() -> None:
    code = "import sys, headstart.evaluation.report; print({'torch', 'transformers', 'matplotlib.pyplot'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_pictures_show_their_numbers() -> None:
    series = [plots.Series("a", plots.HUES[0], 0, {"x": 1.0, "y": 2.0}), plots.Series("b", plots.HUES[1], 0, {"y": 4.0})]
    with plots.style():
        svg = plots.to_svg(plots.levels("tau by category", "tau", series), "levels", 'a "b" <c>')
    words = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    assert plots.elide("abcdefghij", 7) == "abc…hij"
    assert {"tau by category", "tau", "x", "y", "1.00", "2.00", "4.00", "a", "b"} <= set(words)
    assert 'aria-label="a &quot;b&quot; &lt;c>"' in svg
    assert "var(--ink)" in svg


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH")
def test_page_in_a_browser(make_run: MakeRun, tmp_path: Path) -> None:
    report(make_run("a", results=[CHAIN, DYNAMIC]), make_run("b", "medusa"))
    for width in (1200, 420):
        shot = tmp_path / f"{width}.png"
        browse(tmp_path, f"--window-size={width},2400", f"--screenshot={shot}")
        pixels = imread(shot)[:, :, :3]
        assert pixels.shape[:2] == (2400, width)
        assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 200
        assert len(np.unique(pixels[:, -12:].reshape(-1, 3), axis=0)) == 1  # nothing runs out of the page's margin
    dom = browse(tmp_path, "--window-size=1200,2400", "--dump-dom")
    assert [row["tau"] for row in Page(dom).rows] == ["2.667", "3.502", "2.667"]


def browse(folder: Path, *options: str) -> str:
    assert CHROMIUM is not None
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    quiet += ["--disable-component-update", "--disable-sync", "--hide-scrollbars", f"--user-data-dir={folder / 'profile'}"]
    command = [CHROMIUM, *quiet, *options, (folder / "report.html").as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
