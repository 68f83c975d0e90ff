"""The command line: what each verb calls, prints and exits with. The functions behind the verbs are stubs here."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headstart import __version__
from headstart.cli import main, run
from headstart.data.skips import Skips
from headstart.errors import UserError
from headstart.training.recipe import load_recipe, recipe_yaml, shipped_recipes

MEDUSA = "smollm2-135m/medusa"
RESULT = {
    "tree": {"kind": "chain", "depth": 4, "nodes": 4},
    "temperature": 0.0,
    "tau": 2.345,
    "draft_acceptance_rate": 0.336,
    "identical_to_greedy": True,
    "speedup": 1.5,
}


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace a function of a module that need not exist; returns the list of the arguments of its calls."""

    stand_ins: dict[str, ModuleType] = {}

    def replace(module: str, function: str, result: Any = None) -> list[tuple[Any, ...]]:
        calls: list[tuple[Any, ...]] = []

        def answer(*arguments: Any) -> Any:
            calls.append(arguments)
            if isinstance(result, BaseException):
                raise result
            return result(*arguments) if callable(result) else result

        stand_in = stand_ins.setdefault(module, ModuleType(module))
        setattr(stand_in, function, answer)
        monkeypatch.setitem(sys.modules, module, stand_in)
        return calls

    return replace


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, and a terminal of a known width."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


def a_run(path: Path, **changes: Any) -> Path:
    """A run folder with one result."""
    path.mkdir(parents=True)
    (path / "recipe.yaml").write_text("verifier: {}\n", encoding="utf-8")
    (path / "evaluation.json").write_text(
        json.dumps({"head": {"kind": "medusa"}, "results": [RESULT | changes]}), encoding="utf-8"
    )
    return path


def headstart(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "headstart", *arguments], capture_output=True, text=True)


def test_help_answers_in_under_half_a_second() -> None:
    code = "import sys, time, headstart.cli as c; c.run(['--help']); print(time.process_time(), file=sys.stderr)"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True) for _ in range(3)]
    assert "quickstart" in runs[0].stdout
    assert min(float(done.stderr) for done in runs) < 0.5


def test_help_of_the_module() -> None:
    done = headstart("--help")
    assert done.returncode == 0
    for verb in ("quickstart", "train", "eval", "report", "export", "verify-export", "import", "env", "recipe", "data"):
        assert f"\n  {verb} " in done.stdout


def test_the_command_line_does_not_import_torch() -> None:
    code = (
        "import sys; from headstart.cli import run; run(['recipe', 'show', 'smollm2-135m/medusa']); "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_bad_input_is_one_line_and_exit_2() -> None:
    done = headstart("train", "gone.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    what = "gone.yaml: no such file and no shipped recipe of that name"
    assert done.stderr == f"error: {what}; `headstart recipe ls` lists the shipped ones\n"


def test_debug_shows_the_traceback() -> None:
    done = headstart("--debug", "train", "gone.yaml")
    assert done.returncode == 2
    assert done.stderr.startswith("Traceback (most recent call last):\n")
    assert done.stderr.splitlines()[-1].startswith("error: gone.yaml: no such file")


def test_other_exceptions_are_not_hidden(stub: Any, folder: Path) -> None:
    stub("headstart.quickstart", "quickstart", ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError, match="a bug"):
        run(["quickstart"])


@pytest.mark.parametrize("arguments", [["trian"], ["train"], ["train", MEDUSA, "--run"], ["data", "inspect"]])
def test_faulty_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    assert "\nError: " in capsys.readouterr().err


def test_interrupt_exits_with_130(stub: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stub("headstart.quickstart", "quickstart", KeyboardInterrupt())
    monkeypatch.setattr(sys, "argv", ["headstart", "quickstart"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_recipe_ls(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert run(["recipe", "ls"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in shipped_recipes())
    assert run(["recipe", "ls", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {"name": name, "head": path.stem, "verifier": load_recipe(path).verifier.model, "path": str(path)}
        for name, path in shipped_recipes().items()
    ]


def test_recipe_show(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = load_recipe(shipped_recipes()[MEDUSA], ["training.steps=7"])
    assert run(["recipe", "show", MEDUSA, "training.steps=7"]) == 0
    assert capsys.readouterr().out == recipe_yaml(recipe)
    assert run(["recipe", "show", MEDUSA, "training.steps=7", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == recipe.model_dump(mode="json")


def test_recipe_copy_never_overwrites(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert run(["recipe", "copy", MEDUSA]) == 0
    assert capsys.readouterr().out == "medusa.yaml: written; train it with: headstart train medusa.yaml\n"
    assert Path("medusa.yaml").read_bytes() == shipped_recipes()[MEDUSA].read_bytes()

    Path("medusa.yaml").write_text("mine", encoding="utf-8")
    assert run(["recipe", "copy", MEDUSA]) == 2
    assert capsys.readouterr().err == (
        "error: medusa.yaml: already there; give another name: headstart recipe copy smollm2-135m/medusa OTHER.yaml\n"
    )
    assert Path("medusa.yaml").read_text(encoding="utf-8") == "mine"

    assert run(["recipe", "copy", MEDUSA, "gone/mine.yaml"]) == 2
    assert capsys.readouterr().err == "error: gone/mine.yaml: cannot be written: No such file or directory\n"


def test_recipe_check_tells_every_fault(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    text = shipped_recipes()[MEDUSA].read_text(encoding="utf-8")
    Path("my.yaml").write_text(text.replace("heads: 4", "haeds: 4").replace("steps: 400", "steps: 0"), encoding="utf-8")
    heads, steps = text[: text.index("heads: 4")].count("\n") + 1, text[: text.index("steps: 400")].count("\n") + 1
    faults = [
        f"my.yaml:{heads}: head.haeds: unknown key; did you mean 'heads'?",
        f"my.yaml:{steps}: training.steps: must be at least 1, got 0",
        "override: evaluation.batch: must be a whole number, got 'x'",
    ]
    assert run(["recipe", "check", "my.yaml", "evaluation.batch=x"]) == 2
    assert capsys.readouterr().err == "".join(f"error: {fault}\n" for fault in faults)
    assert run(["recipe", "check", "my.yaml", "evaluation.batch=x", "--json"]) == 2
    assert json.loads(capsys.readouterr().out) == {"ok": False, "faults": faults}


def test_recipe_check_of_a_good_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipe", "check", MEDUSA]) == 0
    assert capsys.readouterr().out == f"{MEDUSA}: ok\n"
    assert run(["recipe", "check", MEDUSA, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ok": True, "faults": []}


def test_recipe_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipe", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["required"] == ["verifier", "data", "head", "training"]


def test_train(stub: Any, folder: Path) -> None:
    calls = stub("headstart.teaching", "train")
    expected = load_recipe(shipped_recipes()[MEDUSA], ["training.steps=5"])
    assert run(["train", MEDUSA, "training.steps=5"]) == 0
    assert run(["train", MEDUSA, "--run-folder", "there", "training.steps=5"]) == 0
    assert calls == [(expected, Path("runs/medusa")), (expected, Path("there"))]


def test_train_checks_the_recipe_first(stub: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls = stub("headstart.teaching", "train")
    assert run(["train", MEDUSA, "training.stepz=5"]) == 2
    assert capsys.readouterr().err == "error: override: training.stepz: unknown key; did you mean 'steps'?\n"
    assert calls == []


def test_eval_prints_a_table(stub: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls = stub("headstart.judging", "evaluate", lambda *_: print("progress"))
    a_run(Path("runs/a"))
    assert run(["eval", "runs/a", "evaluation.prompts=3"]) == 0
    assert calls == [(Path("runs/a"), ["evaluation.prompts=3"])]
    printed = capsys.readouterr()
    row = next(line for line in printed.out.splitlines() if "chain" in line)
    assert row.replace("│", " ").split() == ["medusa", "chain", "4", "4", "greedy", "2.35", "identical", "1.50x"]
    assert printed.err == "progress\n"


def test_eval_json(stub: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stub("headstart.judging", "evaluate", lambda *_: print("progress"))
    a_run(Path("runs/a"), speedup=None)
    assert run(["eval", "runs/a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "head": {"kind": "medusa"},
        "results": [RESULT | {"speedup": None}],
    }


@pytest.mark.parametrize(("identical", "shown", "code"), [(False, "DIFFERS", 1), (None, "-", 0)])
def test_eval_fails_when_answers_differ(
    stub: Any, folder: Path, capsys: pytest.CaptureFixture[str], identical: bool | None, shown: str, code: int
) -> None:
    stub("headstart.judging", "evaluate")
    a_run(Path("runs/a"), identical_to_greedy=identical, speedup=None)
    assert run(["eval", "runs/a"]) == code
    row = next(line for line in capsys.readouterr().out.splitlines() if "chain" in line)
    assert row.replace("│", " ").split()[-2:] == [shown, "-"]


def test_eval_and_report_need_a_run_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("eval", "report"):
        assert run([verb, "runs/gone"]) == 2
        assert capsys.readouterr().err == (
            "error: runs/gone: not a run folder (no recipe.yaml in it); `headstart train` writes one\n"
        )


def test_report(stub: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls = stub("headstart.evaluation.report", "write_report", lambda runs, output: output)
    one, other = a_run(Path("runs/a")), a_run(Path("runs/b"))
    assert run(["report", "runs/a"]) == 0
    assert run(["report", "runs/a", "runs/b"]) == 0
    assert run(["report", "runs/a", "runs/b", "--output", "page.html"]) == 0
    beside = folder.resolve() / "runs" / "report.html"
    assert calls == [([one], one / "report.html"), ([one, other], beside), ([one, other], Path("page.html"))]
    assert capsys.readouterr().out.splitlines() == ["runs/a/report.html", str(beside), "page.html"]


def test_quickstart(stub: Any, folder: Path) -> None:
    calls = stub("headstart.quickstart", "quickstart")
    assert run(["quickstart"]) == 0
    assert run(["quickstart", "--run-folder", "there"]) == 0
    assert calls == [(Path("runs/quickstart"),), (Path("there"),)]


class Inspected:
    skips = Skips()

    def to_json(self) -> dict[str, int]:
        return {"rows": 2}


def test_data_inspect(stub: Any, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    found = Inspected()
    calls = stub("headstart.data.inspection", "inspect_file", found)
    stub("headstart.data.inspection_view", "to_terminal", "two rows")
    pages = stub("headstart.data.inspection_view", "write_page")
    tokenizers = stub("headstart.heads.loading", "load_tokenizer", lambda spec: f"tokenizer of {spec}")
    assert run(["data", "inspect", "a.jsonl", "b.jsonl"]) == 0
    assert capsys.readouterr().out == "two rows\n"
    assert run(["data", "inspect", "a.jsonl", "--verifier", "x/y", "--max-length", "9", "--limit", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"rows": 2}
    assert tokenizers == [("builtin:smollm2-135m",), ("x/y",)]
    assert calls == [
        ([Path("a.jsonl"), Path("b.jsonl")], "tokenizer of builtin:smollm2-135m", 2048, 3, "error", [], None, 0),
        ([Path("a.jsonl")], "tokenizer of x/y", 9, 1, "error", [], None, 0),
    ]
    sizes = ("--draft-vocabulary", "40", "--draft-vocabulary", "80")
    assert run(["data", "inspect", "a.jsonl", *sizes, "--bad-rows", "skip", "--html", "p.html", "--skipped", "s.jsonl"]) == 0
    assert calls[-1] == ([Path("a.jsonl")], "tokenizer of builtin:smollm2-135m", 2048, 3, "skip", [40, 80], None, 0)
    assert pages == [(found, Path("p.html"))]
    assert Path("s.jsonl").read_text() == ""


def test_data_inspect_without_a_tokenizer(stub: Any, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    stub("headstart.heads.loading", "load_tokenizer", UserError("verifier x/y: its tokenizer cannot be loaded"))
    assert run(["data", "inspect", "gone.jsonl", "--verifier", "x/y"]) == 2
    assert capsys.readouterr().err == "error: verifier x/y: its tokenizer cannot be loaded\n"


def test_env(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["headstart"] == __version__
    assert facts["python"] == "{}.{}.{}".format(*sys.version_info[:3])
    assert facts["torch"]
    assert facts["cores"] >= 1
    assert facts["device"].startswith(("cpu", "cuda"))
    assert run(["env"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"headstart     {__version__}"
