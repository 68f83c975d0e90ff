"""Answers from a server: the same turns as the verifier answers in process, many conversations at a time."""

import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .answer_store import LineStore
from .answers import has_answer, split_turns
from .chat_server import ChatServer, Reply, Stopped
from .conversations import Conversation
from .skips import BadRow, Skips

REFUSED = "an answer that the server refuses to give"
CUT_SHORT = "an answer cut short by answer_tokens"
EMPTY = "an empty answer by the server"


def served_store(folder: Path, server: ChatServer) -> LineStore:
    """Of one model at one length limit, temperature and seed; the address may change."""
    key = json.dumps([server.model, server.sampling], sort_keys=True)
    return LineStore(folder / f"server-{hashlib.sha256(key.encode()).hexdigest()[:16]}.jsonl")


@dataclass
class Told:
    """What became of one conversation: None when no answer is left of it, and the reasons."""

    conversation: Conversation | None
    reasons: list[BadRow] = field(default_factory=list)


def serve(
    server: ChatServer,
    conversations: Sequence[Conversation],
    store: LineStore,
    concurrency: int,
    complete: bool,
    skips: Skips,
    on_answer: Callable[[int], None] = lambda count: None,
) -> list[Conversation]:
    """The conversations with answers by the server, in the order given; `complete` keeps those of the file.

    A conversation ends with its first refused, empty or cut answer (see Conversation.cut_short); what is left out is
    counted in `skips`. Raises UserError when the server is of no use; the answers until then are stored.
    """
    server.model  # noqa: B018  (asks for the name once, before threads do)
    with ThreadPoolExecutor(concurrency) as pool:
        jobs = [pool.submit(answer_one, server, conversation, store, complete, on_answer) for conversation in conversations]
        try:
            wait(jobs, return_when=FIRST_EXCEPTION)
        finally:  # all are done, one has failed, or somebody pressed Ctrl-C
            server.stop.set()
            pool.shutdown(cancel_futures=True)
    for failure in (job.exception() for job in jobs if not job.cancelled()):
        if failure is not None and not isinstance(failure, Stopped):
            raise failure
    kept = []
    for before, job in zip(conversations, jobs, strict=True):
        told = job.result()
        for bad in told.reasons:
            record = skips.drop if told.conversation is None else skips.note
            record(bad.reason, before.source, bad.detail)
        if told.conversation is not None:
            kept.append(told.conversation)
    return kept


def answer_one(
    server: ChatServer, conversation: Conversation, store: LineStore, complete: bool, on_answer: Callable[[int], None]
) -> Told:
    if complete and has_answer(conversation):
        return Told(conversation)
    groups = [list(conversation.messages)] if complete else split_turns(conversation.messages)
    messages: list[dict[str, Any]] = []
    for group in groups:
        try:
            reply = stored_reply(server, [*messages, *group], conversation.tools, store)
        except BadRow as bad:
            return shortened(conversation, messages, bad)
        on_answer(1)
        if reply.message is None:
            return shortened(conversation, messages, BadRow(REFUSED))
        if not any(reply.message.get(key) for key in ("content", "tool_calls", "reasoning_content", "reasoning")):
            return shortened(conversation, messages, BadRow(EMPTY))
        messages += [*group, reply.message]
        if reply.cut_short:
            return Told(replace(conversation, messages=tuple(messages), cut_short=True), [BadRow(CUT_SHORT)])
    return Told(replace(conversation, messages=tuple(messages))) if messages else Told(None, [BadRow("no messages")])


def shortened(conversation: Conversation, messages: list[dict[str, Any]], bad: BadRow) -> Told:
    return Told(replace(conversation, messages=tuple(messages)) if messages else None, [bad])


def stored_reply(server: ChatServer, messages: list[dict[str, Any]], tools: Any, store: LineStore) -> Reply:
    key = hashlib.sha256(json.dumps([messages, tools], sort_keys=True, default=str).encode()).hexdigest()
    if key not in store.answers:
        reply = server.ask(messages, tools)
        store.put({key: {"message": reply.message, "cut_short": reply.cut_short}})
    return Reply(**store.answers[key])
