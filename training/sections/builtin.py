"""Names that stand for what the package brings itself."""

from collections.abc import Sequence

from ..recipe_faults import nearest

BUILTIN_VERIFIERS = ("builtin:smollm2-135m",)
BUILTIN_PROMPTS = ("builtin:prompts",)


def known_builtin(name: str, known: Sequence[str]) -> str:
    if name.startswith("builtin:") and name not in known:
        raise ValueError(f"there is no {name}{nearest(name, known)}")
    return name
