"""A command of the command line, run in this process."""

from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO

from headstart.cli import run


@dataclass
class Ended:
    """What a command left behind."""

    code: int
    out: str
    err: str


def headstart(*arguments: object) -> Ended:
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = run([str(argument) for argument in arguments])
    return Ended(code, out.getvalue(), err.getvalue())
