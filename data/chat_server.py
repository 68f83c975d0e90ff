"""A client of any OpenAI-compatible server: one question at a time, patient with what servers do under load."""

import json
import os
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

import httpx

from ..errors import UserError
from .messages import parse_message
from .skips import BadRow

KEY = "HEADSTART_SERVER_KEY"  # environment variable with the server's key, where it wants one
FIRST_PAUSE = 0.5  # seconds; doubled at every further try
LONGEST_PAUSE = 60.0
OURS = (400, 413, 422)  # this question is the fault, a too long one perhaps: others may be answered
PASSING = (408, 409, 425, 429)  # with 5xx: the same question may be answered later


@dataclass(frozen=True)
class Reply:
    """message: as chat templates take it; None when the server refused to answer. cut_short: stopped by max_tokens."""

    message: dict[str, Any] | None
    cut_short: bool


class Unusable(Exception):
    """A response that is no answer; the next one may be."""


class Stopped(Exception):
    """Another question has shown that the server is of no use."""


class ChatServer:
    """Answers of one model at one length limit and temperature. Many threads may ask; `stop` ends all their waiting.

    Use it in a `with` statement, which closes its connections.
    """

    def __init__(
        self, url: str, model: str | None, answer_tokens: int, temperature: float, seed: int, connections: int, timeout: float,
        retries: int,
    ) -> None:  # fmt: skip
        self.url = url.rstrip("/") if urlsplit(url).path.strip("/") else url.rstrip("/") + "/v1"
        self.sampling = {"max_tokens": answer_tokens, "temperature": temperature} | ({"seed": seed} if temperature else {})
        self.retries, self.named = retries, model
        self.stop = threading.Event()
        key = os.environ.get(KEY)
        self.client = httpx.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(timeout, connect=min(timeout, 30.0), pool=None),
            limits=httpx.Limits(max_connections=connections),
        )

    def __enter__(self) -> "ChatServer":
        return self

    def __exit__(self, *failure: object) -> None:
        self.client.close()

    @cached_property
    def model(self) -> str:
        """The model's name. Raises UserError when the recipe names none and the server has not exactly one."""
        if self.named:
            return self.named
        names = self._patiently("GET", "/models", None, model_names)
        if len(names) != 1:
            raise UserError(f"data.answers.model: {self.url} has {', '.join(names) or 'no models'}; name one")
        return names[0]

    def ask(self, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None) -> Reply:
        """The next message. Raises BadRow when the server will not take this question, UserError when it is of no use."""
        question = {"model": self.model, "messages": [spoken(message) for message in messages], **self.sampling}
        return self._patiently("POST", "/chat/completions", question | ({"tools": tools} if tools else {}), read_reply)

    def _patiently(self, method: str, path: str, body: Any, read: Any) -> Any:
        for attempt in range(self.retries + 1):
            if self.stop.is_set():
                raise Stopped
            wait: float | None = None
            try:
                response = self.client.request(method, self.url + path, json=body)
                if response.status_code == 200:
                    return read(response.json())
                self._check_passing(response)
                problem = f"status {response.status_code}"
                wait = seconds_asked(response)
            except (httpx.HTTPError, Unusable) as error:
                problem = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            except ValueError:
                problem = "a body that is not JSON"
            pause = min(FIRST_PAUSE * 2**attempt, LONGEST_PAUSE) * random.uniform(0.5, 1.0)  # not all of them at once
            if attempt < self.retries and self.stop.wait(pause if wait is None else wait):
                raise Stopped
        self.stop.set()
        raise UserError(f"{self.url}: no answer in {self.retries + 1} tries, the last was {problem}; what was answered is "
                        "kept, the same command goes on from there")  # fmt: skip

    def _check_passing(self, response: httpx.Response) -> None:
        status, said = response.status_code, " ".join(response.text.split())[:200]
        if status in OURS:
            raise BadRow(f"a question that the server answers with status {status}", said)
        if status < 500 and status not in PASSING:
            self.stop.set()
            raise UserError(f"{self.url}: status {status}: {said or 'no reason given'}")


def seconds_asked(response: httpx.Response) -> float | None:
    """What a busy server asks for in Retry-After, as long as it is a number."""
    try:
        return min(max(float(response.headers["retry-after"]), 0.0), LONGEST_PAUSE)
    except (KeyError, ValueError):
        return None


def spoken(message: dict[str, Any]) -> dict[str, Any]:
    """As the protocol has it: the arguments of calls are JSON text there."""
    calls = [
        {"id": call.get("id") or f"call_{i}", "type": "function", "function": {**function, "arguments": as_text(function)}}
        for i, call in enumerate(message.get("tool_calls") or [])
        if isinstance(function := call.get("function") or call, dict)
    ]
    return {**message, "tool_calls": calls} if calls else message


def as_text(function: dict[str, Any]) -> str:
    arguments = function.get("arguments", {})
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def model_names(body: Any) -> list[str]:
    try:
        return [str(model["id"]) for model in body["data"]]
    except (KeyError, TypeError) as error:
        raise Unusable("no list of models") from error


def read_reply(body: Any) -> Reply:
    """Raises Unusable when the body is JSON, but no answer."""
    try:
        choice = body["choices"][0]
        message, reason = choice["message"], choice.get("finish_reason")
        if reason == "content_filter" or message.get("refusal"):
            return Reply(None, cut_short=False)
        if message.get("content") is None and reason == "length":
            message = {**message, "content": ""}  # the limit fell into its thinking
        return Reply(parse_message({**message, "role": "assistant"}), cut_short=reason == "length")
    except (KeyError, IndexError, TypeError, AttributeError, BadRow) as error:
        raise Unusable(f"no answer in {json.dumps(body)[:100]}") from error
