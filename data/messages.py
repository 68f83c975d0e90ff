"""Messages in any of the styles chat files and servers write them, to the one that chat templates take."""

from __future__ import annotations

import json
from typing import Any

from .skips import BadRow, EmptyRow

ROLES = {
    "system": "system",
    "user": "user",
    "developer": "system",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "ipython": "tool",
}
_KEPT = ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking")  # beside role, content and tool_calls

_TEXTS = ("text", "input_text", "output_text")  # types of content parts

Messages = list[dict[str, Any]]


def parse_messages(value: Any) -> Messages:
    value = _from_json(value)
    if not isinstance(value, list):
        raise BadRow("messages that are no list", json.dumps(value, default=str)[:60])
    if not value:
        raise EmptyRow("no messages")
    return [parse_message(message, number) for number, message in enumerate(value, start=1)]


def parse_message(message: Any, number: int = 1) -> dict[str, Any]:
    """One message in the shape chat templates take. Raises BadRow, which speaks of message `number`."""
    if not isinstance(message, dict):
        raise BadRow("a message that is no object", f"message {number} is {json.dumps(message, default=str)[:60]}")
    role = _role(number, message)
    message = _old_calls(message)
    calls = _tool_calls(number, message.get("tool_calls"))
    result: dict[str, Any] = {
        "role": role,
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


def _old_calls(message: dict[str, Any]) -> dict[str, Any]:
    """Calls as they were written before `tool_calls`: a field `function_call`, or a turn of that name with JSON text."""
    if message.get("function_call") is not None:
        return {**message, "tool_calls": [_function(_from_json(message["function_call"]))]}
    if str(message.get("role") or message.get("from")).strip().lower() == "function_call":
        said = message.get("content")
        calls = _from_json(message.get("value") if said is None else said)
        calls = calls if isinstance(calls, list) else [calls]
        return {**message, "content": None, "value": None, "tool_calls": [_function(call) for call in calls]}
    return message


def _function(call: Any) -> Any:
    return {"type": "function", "function": call} if isinstance(call, dict) else call


def _content(number: int, message: dict[str, Any], has_calls: bool) -> str:
    content = message.get("content")
    content = message.get("value") if content is None else content
    if content is None and has_calls:
        return ""  # templates join strings, and some print a null as "None"
    if content is None and ("content" in message or "value" in message):
        raise EmptyRow("a message whose content is null", f"message {number}")
    if isinstance(content, list):
        return "".join(_part(number, part) for part in content)
    if not isinstance(content, str):
        raise BadRow("a message without text", f"message {number}")
    return content


def _part(number: int, part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type", "text") in _TEXTS and isinstance(part.get("text"), str):
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


def parse_tools(value: Any) -> list[dict[str, Any]] | None:
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
