"""SIGTERM as a wish: the node will be taken away, and there are some seconds left to save."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ..ranks import world

DEAF = 20.0  # seconds without an answer after which a process that waits for a dead one gives up


class Preempted(Exception):
    """Raised where long work may be left undone."""


class Stop:
    """requested: this process was asked to stop; agreed: all processes know it, and stop after the same step."""

    requested = False
    agreed = False


@contextmanager
def stopping() -> Iterator[Stop]:
    """SIGTERM sets `requested` while the block runs. (In a thread of its own, signals are others' to handle.)"""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, frame: FrameType | None) -> None:
        stop.requested = True

    before = signal.signal(signal.SIGTERM, ask)
    try:
        if world() > 1:
            with _watched(stop):
                yield stop
        else:
            yield stop
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _watched(stop: Stop) -> Iterator[None]:
    """A process that waits in a collective for one that has died never comes to run the handler: end it from a thread."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)  # written to by the C part of the signal's handling

    def watch() -> None:
        while signal.SIGTERM not in (received := os.read(reading, 64)):
            if not received:
                return
        time.sleep(DEAF)
        if not stop.requested:
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writing)
