"""Headstart trains draft heads for speculative decoding, proves them lossless and measures their acceptance.

The names below are loaded when they are first used: `import headstart` imports no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .evaluation.generation import Generated, speculative_generate, speculative_stream
    from .evaluation.tree import DynamicTree, StaticTree, chain
    from .heads.hub import load_head, save_head
    from .heads.verifier import Verifier

__all__ = [
    "DynamicTree",
    "Generated",
    "StaticTree",
    "Verifier",
    "__version__",
    "chain",
    "load_head",
    "save_head",
    "speculative_generate",
    "speculative_stream",
]

HOMES = {
    "DynamicTree": ".evaluation.tree",
    "Generated": ".evaluation.generation",
    "StaticTree": ".evaluation.tree",
    "Verifier": ".heads.verifier",
    "chain": ".evaluation.tree",
    "load_head": ".heads.hub",
    "save_head": ".heads.hub",
    "speculative_generate": ".evaluation.generation",
    "speculative_stream": ".evaluation.generation",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(HOMES[name], __name__), name)
