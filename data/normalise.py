"""One raw row, in any of the shapes chat files come in, to one list of messages in the shape chat templates take."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .skips import BadRow, EmptyRow

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
}
_KEPT = ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking")  # beside role, content and tool_calls

Messages = list[dict[str, Any]]
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
    tools = _tools(row.get("tools"))
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
    return _messages(value), ""


def _turns(row: dict[str, Any]) -> Shaped:
    """Benchmark questions: user turns whose answers nobody has written yet, so only the first one can be asked."""
    turns = row["turns"]
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        return _messages(turns), ""
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
    messages = _messages(prompt) if isinstance(prompt, list) else [_user(prompt, _context(row, key))]
    answer = next((row[name] for name in ("output", "response", "answer", "completion") if row.get(name)), None)
    if isinstance(answer, list):
        messages += _messages(answer)
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
            return _messages(messages), left_out
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


def _messages(value: Any) -> Messages:
    value = _from_json(value)
    if not isinstance(value, list):
        raise BadRow("messages that are no list", json.dumps(value, default=str)[:60])
    if not value:
        raise EmptyRow("no messages")
    return [_message(number, message) for number, message in enumerate(value, start=1)]


def _message(number: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise BadRow("a message that is no object", f"message {number} is {json.dumps(message, default=str)[:60]}")
    calls = _tool_calls(number, message.get("tool_calls"))
    result: dict[str, Any] = {
        "role": _role(number, message),
        "content": _content(number, message, has_calls=bool(calls)),
    }
    if calls:
        result["tool_calls"] = calls
    return result | {key: message[key] for key in _KEPT if message.get(key) is not None}


def _role(number: int, message: dict[str, Any]) -> str:
    name = message.get("role") or message.get("from")
    if not isinstance(name, str):
        raise BadRow("a message without a role", f"message {number}")
    role = ROLES.get(name.strip().lower())
    if role is None:
        raise BadRow(f"unknown role {name!r}", f"message {number}; known roles are {', '.join(ROLES)}")
    return role


def _content(number: int, message: dict[str, Any], has_calls: bool) -> str:
    content = message.get("content")
    content = message.get("value") if content is None else content
    if content is None and has_calls:
        return ""  # templates join strings, and some print a null as "None"
    if isinstance(content, list):
        return "".join(_part(number, part) for part in content)
    if not isinstance(content, str):
        raise BadRow("a message without text", f"message {number}")
    return content


def _part(number: int, part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, dict) else part
    raise BadRow("content that is not text", f"message {number} has a part of type {kind!r}")


def _tool_calls(number: int, value: Any) -> Messages:
    calls = _from_json(value) or []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise BadRow("tool calls that are no list of objects", f"message {number}")
    return [_tool_call(call) for call in calls]


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """Templates write arguments with `tojson`, so arguments that are JSON text already would be quoted twice."""
    if isinstance(call.get("function"), dict):
        return {**call, "function": _tool_call(call["function"])}
    arguments = _from_json(call.get("arguments"))
    return {**call, "arguments": arguments} if isinstance(arguments, dict) else call


def _tools(value: Any) -> list[dict[str, Any]] | None:
    tools = _from_json(value) or None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise BadRow("tools that are no list of objects", json.dumps(value, default=str)[:60])
    return tools


def _from_json(value: Any) -> Any:
    """Tables (CSV, Parquet) keep nested values as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
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
