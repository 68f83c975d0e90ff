"""provenance.json: what a head was made of and trained on."""

from typing import Any

from pydantic import BaseModel


class Origin(BaseModel, frozen=True):
    """A verifier, by the hash of its weights in `dtype`, its configuration and its chat template."""

    name: str
    fingerprint: str
    dtype: str | None = None  # absent where the run is older than this


class Data(BaseModel, frozen=True):
    samples: int
    tokens: int
    supervised: int
    sha256: str


class MadeWith(BaseModel, frozen=True):
    """What decoding must find again; absent where the run is older than this."""

    layers: list[int]
    vocabulary: str
    config: dict[str, Any]


class Provenance(BaseModel, frozen=True):
    """What a head was made of and trained on: provenance.json."""

    verifier: Origin
    template: str
    data: Data
    head: MadeWith | None = None
