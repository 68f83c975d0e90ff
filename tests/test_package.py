"""The wheel: every module and data file of the tree, under `headstart`, and nothing else."""

import subprocess
import sys
import zipfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

import headstart

ROOT = Path(headstart.__file__).parent
FOLDERS = ("data", "heads", "training", "evaluation", "export")
LEFT_BEHIND = {"build", "dist", "runs", "site", "headstart.egg-info"}  # by tools

pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="runs in a checkout")


@cache
def tree() -> list[Path]:
    """Files of the checkout, relative to it; hidden ones and what tools leave there are not of it."""
    tops = [top for top in sorted(ROOT.iterdir()) if not top.name.startswith(".") and top.name not in LEFT_BEHIND]
    paths = [path for top in tops for path in (sorted(top.rglob("*")) if top.is_dir() else [top])]
    return [path.relative_to(ROOT) for path in paths if path.is_file() and "__pycache__" not in path.parts]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: building leaves files in the source folder."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for path in tree():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_bytes((ROOT / path).read_bytes())
    by_build = ["build", "--wheel", "--no-isolation", "--outdir", str(target), str(source)]
    by_pip = ["pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(target), str(source)]
    command = by_build if find_spec("build") else by_pip
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, cwd=target)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = target.glob("*.whl")
    return built


def test_the_wheel_holds_what_the_tree_holds(wheel: Path) -> None:
    modules = {p.as_posix() for p in tree() if p.suffix == ".py" and (len(p.parts) == 1 or p.parts[0] in FOLDERS)}
    others = {p.as_posix() for p in tree() if p.suffix != ".py" and (p.suffix == ".j2" or p.parts[0] in (*FOLDERS, "recipes"))}
    others.add("py.typed")
    assert {
        "cli.py",
        "teaching.py",
        "data/chat.py",
        "heads/verifier.py",
        "training/trainer.py",
        "evaluation/tree.py",
    } <= modules
    assert {"data/prompts/chat.jsonl", "recipes/smollm2-135m/medusa.yaml", "evaluation/report.html.j2"} <= others
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == {f"headstart/{name}" for name in modules | others}


def test_every_module_of_the_tree_belongs_somewhere() -> None:
    """A folder of code that is neither packaged nor known to be left out was forgotten."""
    folders = {p.parts[0] for p in tree() if p.suffix == ".py" and len(p.parts) > 1}
    assert folders - {"tests", "benchmarks", "docs"} == set(FOLDERS)


def test_the_metadata_of_the_wheel(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    names = [name for name in archive.namelist() if ".dist-info/" in name]
    metadata = archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    assert f"\nVersion: {headstart.__version__}\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    entry_points = archive.read(next(name for name in names if name.endswith("/entry_points.txt"))).decode()
    assert entry_points.split() == ["[console_scripts]", "headstart", "=", "headstart.cli:main"]
    assert archive.read(next(name for name in names if name.endswith("/top_level.txt"))).decode().split() == ["headstart"]


def test_the_unpacked_wheel_works(wheel: Path, tmp_path: Path) -> None:
    """With its own recipes and prompts, far from the checkout."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import headstart, headstart.cli; from pathlib import Path; root = Path(headstart.__file__).parent; "
        "print(root); print(len(list(root.glob('data/prompts/*.jsonl')))); "
        "raise SystemExit(headstart.cli.run(['recipe', 'check', 'smollm2-135m/eagle3']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}
    )
    assert done.returncode == 0, done.stderr
    prompts = len(list((ROOT / "data" / "prompts").glob("*.jsonl")))
    assert done.stdout.splitlines() == [str(tmp_path / "headstart"), str(prompts), "smollm2-135m/eagle3: ok"]
