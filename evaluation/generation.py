"""Decoding with drafts as a library call: one prompt, whole or as it comes. Greedy: the verifier's own text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..data.chat import prompt_ids
from ..errors import UserError
from ..heads.base import DraftHead, check_fits
from ..heads.drafter import Drafter
from ..heads.verifier import Verifier
from .decode import Clock, Decoded, rounds
from .tree import AnyTree


@dataclass(frozen=True)
class Generated:
    """The answer to one prompt. tokens: its ids, the stop token included; text: without special tokens, None where the verifier
    has no tokenizer; rounds: verifier passes after the prompt's; tau: tokens a round, None where there was no round."""

    tokens: list[int]
    text: str | None
    rounds: int
    tau: float | None


def speculative_generate(
    verifier: Verifier, drafter: Drafter, tree: AnyTree, prompt: str | Sequence[int], max_new_tokens: int = 256
) -> Generated:
    """Decode up to a stop token or `max_new_tokens` tokens. The tokens are those of plain greedy decoding.

    drafter: a head, or whatever else drafts for this verifier; prompt: a user's message, put through the chat template where
    the tokenizer has one, or token ids. Raises UserError when the drafter does not fit the verifier or the tree, or the text
    would pass the verifier's limit.
    """
    decoded = Decoded()
    for _ in decoding(verifier, drafter, tree, prompt, max_new_tokens, decoded):
        pass
    emitted = sum(r.emitted for r in decoded.rounds)
    text = None if verifier.tokenizer is None else plain_text(verifier, decoded.tokens)
    return Generated(decoded.tokens, text, len(decoded.rounds), emitted / len(decoded.rounds) if decoded.rounds else None)


def speculative_stream(
    verifier: Verifier, drafter: Drafter, tree: AnyTree, prompt: str | Sequence[int], max_new_tokens: int = 256
) -> Iterator[str]:
    """The text of `speculative_generate`, piece by piece: one for each round that completes a character."""
    decoded, shown = Decoded(), ""
    if verifier.tokenizer is None:
        raise UserError(f"verifier {verifier.name} has no tokenizer to write text with; speculative_generate gives token ids")
    for _ in decoding(verifier, drafter, tree, prompt, max_new_tokens, decoded):
        text = plain_text(verifier, decoded.tokens)
        if not text.endswith("\ufffd") and text != shown:  # half a character waits for its other half
            yield text[len(shown) :]
            shown = text
    rest = plain_text(verifier, decoded.tokens)[len(shown) :]
    if rest:
        yield rest


def decoding(
    verifier: Verifier, drafter: Drafter, tree: AnyTree, prompt: str | Sequence[int], max_new_tokens: int, decoded: Decoded
) -> Iterator[int]:
    """Fill `decoded` round by round; yields how many tokens each gave."""
    if isinstance(drafter, DraftHead):
        check_fits(drafter.config, verifier.facts, verifier.name)
        drafter = drafter.to(verifier.device)
    ids = prompt_tokens(verifier, prompt)
    limit = verifier.facts.max_position_embeddings
    if not ids or max_new_tokens < 1 or len(ids) + max_new_tokens > limit:
        raise UserError(f"a prompt of {len(ids)} tokens and max_new_tokens={max_new_tokens}: both must be positive and "
                        f"together at most {limit}")  # fmt: skip
    yield from rounds(verifier, drafter, tree, [ids], max_new_tokens, [decoded], Clock(verifier.device))


def prompt_tokens(verifier: Verifier, prompt: str | Sequence[int]) -> list[int]:
    if not isinstance(prompt, str):
        return list(prompt)
    tokenizer = verifier.tokenizer
    if tokenizer is None:
        raise UserError(f"verifier {verifier.name} has no tokenizer: give the prompt as token ids")
    if getattr(tokenizer, "chat_template", None) is None:
        return list(tokenizer(prompt).input_ids)
    return prompt_ids(tokenizer, [{"role": "user", "content": prompt}])


def plain_text(verifier: Verifier, tokens: Sequence[int]) -> str:
    return str(verifier.tokenizer.decode(tokens, skip_special_tokens=True))
