"""README and docs hold what the code takes: every command line parses, every recipe is valid, every field is explained."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from headstart.cli import app
from headstart.training.recipe import Recipe, find_recipe, load_recipe
from headstart.training.sections.base import Section

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RECIPES = sorted((ROOT / "recipes").glob("*/*.yaml"))
SMALL = {
    "verifier": {"model": "a/b"},
    "data": {"train": ["a.jsonl"]},
    "head": {"kind": "eagle3"},
    "training": {"steps": 1, "learning_rate": 1e-3},
}
SHOWN_BY_THE_SCHEMA = {"kind", "category", "id", "input", "output", "instruction", "system", "tools"}  # words of every page


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.S)


def commands() -> Iterator[list[str]]:
    """What follows `headstart` in every line that calls it, in pages and in the heads of recipes."""
    texts = [text for page in PAGES for text in [*blocks(page, ""), *blocks(page, "bash")]]
    texts += [path.read_text(encoding="utf-8").replace("#   ", "") for path in RECIPES]
    for line in "\n".join(texts).replace("\\\n", " ").splitlines():
        if called := re.match(r"(?:(?:srun )?torchrun .*-m )?headstart (.*)", line.strip()):
            yield shlex.split(called[1], comments=True)


def merged(base: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    both = {k: merged(base[k], v) for k, v in extra.items() if isinstance(v, dict) and isinstance(base.get(k), dict)}
    return base | extra | both


@pytest.mark.parametrize("arguments", list(commands()), ids=" ".join)
def test_a_command_line_of_the_pages_parses(arguments: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    context = command.make_context("headstart", arguments[:1] and list(arguments))
    while hasattr(command, "commands"):
        name, command, arguments = command.resolve_command(context, arguments)
        context = command.make_context(name, list(arguments), parent=context)
    for given in ("recipe", "name"):
        if "/" in str(context.params.get(given, "")) and not str(context.params[given]).startswith("runs/"):
            load_recipe(find_recipe(context.params[given]), context.params.get("overrides") or ())


@pytest.mark.parametrize(
    "text", [text for page in PAGES for text in blocks(page, "yaml")], ids=lambda text: text.split("\n")[0]
)
def test_a_recipe_of_the_pages_is_valid(text: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(merged(SMALL, yaml.safe_load(text))))
    assert isinstance(load_recipe(path), Recipe)


def sections(parent: type[Section] = Section) -> Iterator[type[Section]]:
    for child in parent.__subclasses__():
        yield child
        yield from sections(child)


@pytest.mark.parametrize(
    ("section", "field"), sorted({(s.__name__, f) for s in sections() for f in s.model_fields} - {("Recipe", "head")})
)
def test_a_field_is_explained(section: str, field: str) -> None:
    """In code type on a page, or as a key of an example there."""
    pages = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    explained = re.search(rf"`[^`\n]*\b{field}\b[^`\n]*`|\b{field}: ", pages)
    assert explained or field in SHOWN_BY_THE_SCHEMA, f"{section}.{field} is on no page"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target
