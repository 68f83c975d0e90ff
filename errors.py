"""The one exception that means "the user can mend this"."""


class UserError(Exception):
    """Bad input, told in one line that says what, where and what to do. The command line prints it and exits with 2."""
