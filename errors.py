"""The one exception that means "the user can mend this"."""


class UserError(Exception):
    """Bad input, told in one line that says what, where and what to do. The command line prints it and exits with 2."""


def first_line(error: BaseException) -> str:
    """What another library's exception says, in one line: its first one that ends a thought; its class where it is silent."""
    lines = [line for line in map(str.strip, str(error).splitlines()) if line] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
