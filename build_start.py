"""Heads that training goes on from: published folders, imported runs, the verifier's own modules."""

from pathlib import Path

from .errors import UserError
from .export.contracts.folder import read_config
from .export.read import read_head
from .heads.base import LEARNING, DraftHead, check_fits
from .heads.hub import load_head
from .heads.medusa2 import ADAPTER
from .heads.verifier import Verifier
from .training.sections.head import HeadSection

RECIPES_OWN = {"kind", "start", "adapter"}  # fields that no head's configuration has


def read_start(section: HeadSection, verifier: Verifier) -> DraftHead | None:
    """The head that `head.start` names, None where it names none."""
    if section.start is None or section.kind == "mtp":  # a verifier's own modules are no head yet
        return None
    folder = Path(section.start).expanduser()
    own = folder.is_dir() and "kind" in read_config(folder / "config.json")  # as this package saves heads
    if (folder / ADAPTER).is_dir() and verifier.adapter is None:
        raise UserError(f"head.start: {folder} was trained with the adapter in it: set verifier.adapter to {folder / ADAPTER}, "
                        "or take the folder without it for a verifier that has it merged in")  # fmt: skip
    head = load_head(folder) if own else read_head(folder, verifier, "vllm")
    check_fits(head.config, verifier.facts, verifier.name)
    return go_on(head, section, folder)


def start_from(folder: Path, section: HeadSection) -> DraftHead:
    """An imported head to go on from. The recipe says how it learns; what it is made of, its vocabulary too, stays."""
    return go_on(load_head(folder), section, folder)


def go_on(head: DraftHead, section: HeadSection, folder: Path) -> DraftHead:
    """The head, learning as the recipe says. With `head.start`, what the recipe leaves at its default is as the head has it."""
    if head.kind != section.kind:
        raise UserError(f"head.kind: {section.kind} in the recipe, {head.kind} in {folder}; it cannot change")
    said = section.model_dump(exclude=RECIPES_OWN, exclude_defaults=section.start is not None, exclude_none=True)
    whole = len(head.target_ids) if section.start is not None else head.config.vocab_size
    size = said.pop("vocabulary", said.pop("draft_vocabulary", whole))
    if size != len(head.target_ids):
        raise UserError(f"head: the recipe asks for {size} tokens, the head in {folder} drafts {len(head.target_ids)}; the "
                        "vocabulary of an imported head stays")  # fmt: skip
    learning = {name: value for name in LEARNING if (value := getattr(section, name, None)) is not None}
    for name, value in said.items():
        if name not in LEARNING and value != getattr(head.config, name):
            raise UserError(f"head.{name}: {value} in the recipe, {getattr(head.config, name)} in {folder}; it cannot change")
    head.config = head.config.model_copy(update=learning)
    return head
