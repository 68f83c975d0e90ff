"""Recipes as text: YAML that remembers on which line every key stands, and overrides from the command line."""

import re
from pathlib import Path
from typing import Any

import yaml

from ..errors import UserError
from .recipe_faults import Fault, Key, dotted

# Plain scalars as YAML 1.2 reads them. PyYAML speaks 1.1, where 2e-4 is text, `no` is false, 010 is 8 and 1:30 is 90.
SCALARS = {
    "null": (r"~|null|Null|NULL|", [*"~nN", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    "float": (
        r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
}
TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", *SCALARS)}


class Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (so declared by PyYAML)


class Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would read as something else; writes lists of numbers and words on one line."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def short_list(self, data: list[Any]) -> yaml.Node:
        short = not any(isinstance(item, dict) for item in data)
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=short)


for name, (pattern, first) in SCALARS.items():
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{name}", re.compile(f"^({pattern})$"), first)
    Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{name}", re.compile(f"^({pattern})$"), first)
Dumper.add_representer(list, Dumper.short_list)


def yaml_text(data: dict[str, Any]) -> str:
    return yaml.dump(data, Dumper=Dumper, sort_keys=False, width=120, allow_unicode=True)


class Document:
    """A recipe's plain data, the line of every key (None: an override), and the faults found while reading."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.data: Any = {}
        self.lines: dict[Key, int | None] = {(): 1}
        self.faults: list[Fault] = []

    def line(self, key: Key) -> int | None:
        """Where a key stands; for one that is not there, where the section stands that should have it."""
        while key not in self.lines:
            key = key[:-1]
        return self.lines[key]

    def fault(self, line: int | None, key: Key, message: str) -> None:
        self.faults.append(Fault(self.name, line, dotted(key), message))

    def override(self, text: str) -> None:
        """Apply 'training.steps=100'; an item of a list is named by its index, evaluation.trees.0.depth=3."""
        name, equals, value = text.partition("=")
        if not equals or not all(name.split(".")):
            self.fault(None, (), f"{text!r} is not of the form key=value, such as training.steps=100")
            return
        try:
            node = yaml.compose(value, Loader)
        except yaml.YAMLError:
            self.fault(None, (name,), f"{value!r} is not a YAML value")
            return
        self._assign(name.split("."), None if node is None else Reader(self, numbered=False).value(node, (name,)))

    def _assign(self, parts: list[str], value: Any) -> None:
        node: Any = self.data
        key: Key = ()
        for depth, part in enumerate(parts):
            step = index_or_key(node, part)
            if step is None:
                self.fault(None, tuple(parts), f"there is no {'.'.join(parts[: depth + 1])} to set")
                return
            key = (*key, step)
            if depth == len(parts) - 1:
                node[step] = value
                self.lines = {other: line for other, line in self.lines.items() if other[: len(key)] != key}
            elif isinstance(node, list) or step in node:
                node = node[step]
                continue
            else:
                node = node.setdefault(step, {})
            self.lines[key] = None


def index_or_key(node: Any, part: str) -> Any:
    """The place in a list or a mapping that a part of a dotted key names; None when there is no such place."""
    if isinstance(node, dict):
        return part
    return int(part) if isinstance(node, list) and part.isdecimal() and int(part) < len(node) else None


class Reader:
    """Turns YAML nodes into plain data and notes lines and faults in the document."""

    def __init__(self, document: Document, numbered: bool = True) -> None:
        self.document = document
        self.numbered = numbered
        self.open: list[yaml.Node] = []

    def line(self, node: yaml.Node) -> int | None:
        return node.start_mark.line + 1 if self.numbered else None

    def value(self, node: yaml.Node, key: Key) -> Any:
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, key)
        if node in self.open:
            self.document.fault(self.line(node), key, "an alias of the very thing it stands in")
            return None
        self.open.append(node)
        plain = self.mapping(node, key) if isinstance(node, yaml.MappingNode) else self.sequence(node, key)
        self.open.pop()
        return plain

    def mapping(self, node: yaml.MappingNode, key: Key) -> dict[str, Any]:
        seen: dict[str, int | None] = {}
        plain = {}
        for name_node, value_node in node.value:
            name, line = str(name_node.value), self.line(name_node)
            path = (*key, name)
            if name in seen:
                first = "" if line is None else f", first on line {seen[name]}"
                self.document.fault(line, path, f"given twice{first}")
                continue
            seen[name] = self.document.lines[path] = line
            plain[name] = self.value(value_node, path)
        return plain

    def sequence(self, node: yaml.Node, key: Key) -> list[Any]:
        plain = []
        for index, item in enumerate(node.value):
            self.document.lines[(*key, index)] = self.line(item)
            plain.append(self.value(item, (*key, index)))
        return plain

    def scalar(self, node: yaml.ScalarNode, key: Key) -> Any:
        try:
            if node.tag in TAGS:
                return yaml.constructor.SafeConstructor().construct_object(node)
        except (ValueError, KeyError):  # `!!int seven`
            pass
        self.document.fault(self.line(node), key, f"cannot read the tag {node.tag!r}: write a plain value")
        return node.value


def read_document(path: Path) -> Document:
    """Read a YAML file. Raises UserError when there is no file, no YAML or no mapping; lesser faults are collected."""
    document = Document(str(path))
    try:
        text = path.read_text(encoding="utf-8-sig")
        node = yaml.compose(text, Loader)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"{path}: cannot read the recipe: {reason}") from None
    except yaml.reader.ReaderError as error:
        raise UserError(f"{path}:{text.count(chr(10), 0, error.position) + 1}: not YAML: {error.reason}") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{path}:{line}: not YAML: {error.problem}") from None
    if node is None:
        raise UserError(f"{path}: the recipe is empty: start from one that `headstart recipe ls` lists")
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{path}:{node.start_mark.line + 1}: a recipe is a mapping of sections, such as `verifier:`")
    document.data = Reader(document).value(node, ())
    return document
