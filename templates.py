"""Pages out of templates that lie beside the code."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def html_environment(folder: Path) -> Environment:
    """For the HTML templates in a folder: text is escaped, and a name that nobody gave is an error."""
    return Environment(
        loader=FileSystemLoader(folder), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
