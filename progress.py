"""Progress bars on standard error: rate and time left in a terminal, a plain line now and then in a log file.

Of several processes only the first speaks.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .ranks import is_first

LINE_EVERY = 10.0  # seconds between lines where no terminal can draw a bar


@contextmanager
def progress_bar(title: str, total: int, done: int = 0, unit: str = "") -> Iterator[Callable[..., None]]:
    """Yields advance(count, note=""). total: in the caller's unit; a named unit ("tokens") shows as a rate."""
    start = time.monotonic()
    counted = 0

    def rate(count: int) -> str:
        nonlocal counted
        counted += count
        return f"{counted / max(time.monotonic() - start, 1e-9):.0f} {unit}/s" if unit else ""

    if not is_first():
        yield lambda count, note="": None
        return
    if Console(stderr=True).is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                   TimeRemainingColumn(), TextColumn("{task.fields[note]}"))  # fmt: skip
        with Progress(*columns, console=Console(stderr=True)) as bars:
            task = bars.add_task(title, total=total, completed=done, note="")
            yield lambda count, note="": bars.update(task, advance=count, note=note or rate(count))
        return
    lines = _Lines(title, total, done)
    yield lambda count, note="": lines(count, note or rate(count))


class _Lines:
    def __init__(self, title: str, total: int, done: int) -> None:
        self.title, self.total, self.done = title, total, done
        self.first, self.start = done, time.monotonic()
        self.said = self.start

    def __call__(self, count: int, note: str) -> None:
        self.done += count
        now = time.monotonic()
        if now - self.said >= LINE_EVERY or self.done >= self.total:
            self.said = now
            spent = now - self.start
            left = spent / max(self.done - self.first, 1) * max(self.total - self.done, 0)
            told = f"{self.title}: {self.done}/{self.total}  {spent:.0f} s, {left:.0f} s left  {note}"
            print(told, file=sys.stderr, flush=True)


def say(message: str) -> None:
    """A line for people, beside the bars."""
    if is_first():
        print(message, file=sys.stderr, flush=True)
