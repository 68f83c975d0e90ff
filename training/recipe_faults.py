"""What pydantic finds wrong with a recipe, told to a person: where it stands, what is wrong and what would be right."""

import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ValidationError

from ..errors import UserError

Key = tuple[str | int, ...]  # ("evaluation", "trees", 0, "depth"), written evaluation.trees.0.depth


class Fault(NamedTuple):
    file: str
    line: int | None  # None: an override
    key: str
    message: str

    def __str__(self) -> str:
        source = "override" if self.line is None else f"{self.file}:{self.line}"
        return ": ".join(part for part in (source, self.key, self.message) if part)


class RecipeError(UserError):
    """Every fault of a recipe, a line each, in the order of the file and then of the overrides."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = sorted(faults, key=lambda fault: (fault.line is None, fault.line or 0))
        super().__init__("\n".join(map(str, self.faults)))


def dotted(key: Key) -> str:
    return ".".join(map(str, key))


def nearest(word: str, words: Sequence[str]) -> str:
    """A hint such as "; did you mean 'steps'?", empty when no word comes near."""
    close = get_close_matches(word, words, n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


def tell(error: ValidationError, model: type[BaseModel]) -> Iterator[tuple[Key, str]]:
    """The key and the message of every fault that the model found."""
    for one in error.errors(include_url=False):
        key, owner, choices = _locate(one["loc"], model)
        if one["type"] == "extra_forbidden":
            yield key, f"unknown key{_right_key(key, owner, model)}"
        elif one["type"] == "union_tag_not_found":
            yield (*key, "kind"), f"missing; one of {', '.join(map(_kind, choices))}"
        elif one["type"] == "union_tag_invalid":
            yield (*key, "kind"), _not_among(one["ctx"]["tag"], [*map(_kind, choices)])
        elif one["type"] == "missing":
            yield key, f"missing; {_description(key, owner)}" if isinstance(key[-1], str) else "missing"
        elif one["type"] == "string_pattern_mismatch":
            yield key, f"must be {_description(key, owner)}, got {_shown(one['input'])}"
        elif one["type"] != "too_short" or len(one["input"]) < one["ctx"]["min_length"]:  # else faulty items, told already
            yield key, _message(one)


def _locate(loc: Key, model: type[BaseModel]) -> tuple[Key, type[BaseModel], list[type[BaseModel]]]:
    """Pydantic's location as a key, the model that the key belongs to, and the models that its value may take.

    The location names the choice made in a union: ("head", "medusa", "heads") is the key head.heads of MedusaSection.
    """
    key: Key = ()
    owner, choices = model, [model]
    for part in loc:
        if isinstance(part, str) and len(choices) > 1:
            choices = [choice for choice in choices if _kind(choice) == part]
            continue
        key = (*key, part)
        if isinstance(part, str):
            owner = choices[0]
            choices = _models(owner.model_fields[part].annotation) if part in owner.model_fields else []
    return key, owner, choices


def _models(annotation: Any) -> list[type[BaseModel]]:
    """Every model named in a type, such as both heads of `MedusaSection | Eagle3Section`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models(argument)]


def _kind(model: type[BaseModel]) -> str:
    return str(model.model_fields["kind"].default)


def _description(key: Key, owner: type[BaseModel]) -> str | None:
    return owner.model_fields[str(key[-1])].description


def _right_key(key: Key, owner: type[BaseModel], root: type[BaseModel]) -> str:
    """The same name in another section or kind, else a near name in this section, else all names of this section."""
    name, valid = str(key[-1]), list(owner.model_fields)
    places = [
        (section, choice)
        for section, field in root.model_fields.items()
        for choice in _models(field.annotation)
        if name in choice.model_fields and (section != key[0] or "kind" in choice.model_fields)
    ]
    if kinds := [_kind(choice) for section, choice in places if section == key[0]]:
        return f"; it belongs to kind {', '.join(kinds)}"
    elsewhere = [f"; did you mean '{section}.{name}'?" for section, _ in places]
    return next(iter(elsewhere), nearest(name, valid) or f"; the keys here are {', '.join(valid)}")


def _not_among(given: str, valid: Sequence[str]) -> str:
    return f"must be one of {', '.join(valid)}, got {_shown(given)}{nearest(given, valid)}"


SENTENCES = {
    "greater_than_equal": "must be at least {ge}, got {given}",
    "greater_than": "must be more than {gt}, got {given}",
    "less_than_equal": "must be at most {le}, got {given}",
    "less_than": "must be less than {lt}, got {given}",
    "too_short": "must have at least {min_length} item, got {given}",
    "too_long": "must have at most {max_length} items, got {given}",
    "string_too_short": "must not be empty",
    "finite_number": "must be a finite number, got {given}",
    "int_type": "must be a whole number, got {given}",
    "int_from_float": "must be a whole number, got {given}",
    "float_type": "must be a number, got {given}",
    "string_type": "must be text, got {given}",
    "bool_type": "must be true or false, got {given}",
    "tuple_type": "must be a list, got {given}",
    "model_type": "must be a section of keys, got {given}",
    "model_attributes_type": "must be a section of keys, got {given}",
    "value_error": "{error}",
}


def _message(one: Any) -> str:
    context = one.get("ctx", {})
    if one["type"] == "literal_error":
        return _not_among(str(one["input"]), re.findall("'([^']*)'", context["expected"]))
    return SENTENCES.get(one["type"], "{msg}, got {given}").format(**context, msg=one["msg"], given=_shown(one["input"]))


def _shown(value: Any) -> str:
    """As YAML would have it, cut to a glance."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
