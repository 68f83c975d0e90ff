"""What the doctor finds: checks, in the order in which a fault shows."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Check:
    """One line of the diagnosis. healthy: None where nothing could be compared; cause: of a failed one; depth, text (a prompt's
    id), position: where it fails first."""

    name: str
    healthy: bool | None
    note: str
    cause: str | None = None
    depth: int | None = None
    text: str | None = None
    position: int | None = None


@dataclass(frozen=True)
class Diagnosis:
    """checks, in order; accuracy: by depth, see `accuracy`."""

    checks: list[Check]
    accuracy: dict[str, list[Any]]

    @property
    def first(self) -> Check | None:
        return next((check for check in self.checks if check.healthy is False), None)
