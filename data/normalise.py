"""One raw row, in any of the shapes chat files come in, to one list of messages in the shape chat templates take."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .messages import Messages, parse_messages, parse_tools
from .skips import BadRow, EmptyRow

Shaped = tuple[Messages, str]  # messages, and what of the row was left out ("" when nothing)


@dataclass(frozen=True)
class Parsed:
    """messages: dicts with `role`, `content` (always text) and only those further keys that the row gave a value.
    left_out: a reason when the row held more than one conversation can show, else ""."""

    messages: Messages
    tools: list[dict[str, Any]] | None
    left_out: str


def parse_row(row: Any) -> Parsed:
    """Read one row. Raises EmptyRow when it holds no conversation, BadRow when it cannot be understood."""
    if isinstance(row, str):
        row = {"prompt": row}
    elif isinstance(row, list):
        row = {"messages": row}
    elif not isinstance(row, dict):
        raise BadRow("no conversation", f"a JSON object is expected, not {json.dumps(row)}")
    messages, left_out = _shape(row)(row)
    tools = parse_tools(row.get("tools"))
    system = row.get("system") or row.get("system_prompt")
    if isinstance(system, str) and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    _check_encodable(messages, tools)
    return Parsed(messages, tools, left_out)


def _shape(row: dict[str, Any]) -> Callable[[dict[str, Any]], Shaped]:
    key = next((key for key in _SHAPES if row.get(key) is not None), None)
    if key is not None:
        return _SHAPES[key]
    if any(key in row for key in _SHAPES):
        raise EmptyRow("no messages")
    found = ", ".join(map(str, row)) or "none"
    raise BadRow("unknown keys", f"{found}; one of {', '.join(_SHAPES)} is needed")


def _chat(row: dict[str, Any]) -> Shaped:
    value = next(row[key] for key in _CHAT_KEYS if row.get(key) is not None)
    return parse_messages(value), ""


def _turns(row: dict[str, Any]) -> Shaped:
    """Benchmark questions: user turns whose answers nobody has written yet, so only the first one can be asked."""
    turns = row["turns"]
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        return parse_messages(turns), ""
    if not turns:
        raise EmptyRow("no messages")
    return [_user(turns[0])], "later turns without answers" if len(turns) > 1 else ""


def _pair(row: dict[str, Any]) -> Shaped:
    """Instruction or prompt with its answer; without an answer a bare prompt."""
    key = next(key for key in ("instruction", "prompt", "question") if row.get(key) is not None)
    prompt = row[key]
    if isinstance(prompt, dict) and "replies" in prompt:
        return _tree(prompt)
    row, left_out = _first_instance(row)
    messages = parse_messages(prompt) if isinstance(prompt, list) else [_user(prompt, _context(row, key))]
    answer = next((row[name] for name in ("output", "response", "answer", "completion") if row.get(name)), None)
    if isinstance(answer, list):
        messages += parse_messages(answer)
    elif answer is not None:
        messages.append(_assistant(answer))
    return messages, left_out


def _first_instance(row: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Self-Instruct keeps the inputs and outputs of an instruction in a list beside it."""
    instances = row.get("instances")
    if not isinstance(instances, list) or not instances or not isinstance(instances[0], dict):
        return row, ""
    return {**row, **instances[0]}, "further instances" if len(instances) > 1 else ""


def _context(row: dict[str, Any], key: str) -> str:
    """The Alpaca `input` (Dolly: `context`) that the instruction speaks of."""
    context = (row.get("input") or row.get("context") or "") if key == "instruction" else ""
    return _checked_text(context, "input")


def _tree(node: dict[str, Any]) -> Shaped:
    """A tree of replies, best first: follow the best reply at each level."""
    messages, left_out = list[dict[str, Any]](), ""
    while True:
        messages.append({"role": node.get("role"), "content": node.get("text")})
        replies = node.get("replies") or []
        left_out = "further replies" if len(replies) > 1 else left_out
        if not replies:
            return parse_messages(messages), left_out
        node = replies[0]


def _user(prompt: Any, context: str = "") -> dict[str, Any]:
    text = _checked_text(prompt, "prompt")
    if not text.strip():
        raise EmptyRow("an empty prompt")
    return {"role": "user", "content": f"{text}\n\n{context}" if context else text}


def _assistant(answer: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": _checked_text(answer, "answer")}


def _checked_text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise BadRow("something that is not text", f"the {what} is {json.dumps(value, default=str)[:60]}")
    return value


def _check_encodable(messages: Messages, tools: Any) -> None:
    try:
        json.dumps([messages, tools], ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise BadRow("broken text", "half of a surrogate pair, such as \\ud83d alone") from None


_CHAT_KEYS = ("conversations", "messages", "conversation")
_SHAPES: dict[str, Callable[[dict[str, Any]], Shaped]] = {
    **dict.fromkeys(_CHAT_KEYS, _chat),
    "turns": _turns,
    **dict.fromkeys(("instruction", "prompt", "question"), _pair),
}
