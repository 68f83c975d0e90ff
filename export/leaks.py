"""What must never leave this machine inside a published folder: secrets and paths."""

import re
from collections.abc import Iterator
from pathlib import Path

SECRETS = {
    "a Hugging Face token": r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}",
    "an OpenAI-style key": r"\bsk-[A-Za-z0-9_-]{20,}",
    "a GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,})",
    "an AWS key": r"\bA(?:KIA|SIA)[A-Z0-9]{16}\b",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "a password in a URL": r"\b[a-z+]+://[^\s/:@]+:[^\s/@]+@",
}
PATHS = r"(?<![\w./:-])(?:/(?:home|root|Users|tmp|mnt|work|workspace|data|var|opt|srv|private|scratch|nfs)/[^\s\"'`)]+|~/\S+)"
WINDOWS = r"(?<!\w)[A-Za-z]:\\[^\s\"'`)]+"
TEXTS = (".md", ".json", ".yaml", ".txt")


def leaks(folder: Path) -> Iterator[str]:
    """One line for each: the file, the line and what it looks like. Secrets are not repeated."""
    home = str(Path.home())
    for path in sorted(folder.rglob("*")):
        if path.suffix not in TEXTS:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            where = f"{path.relative_to(folder)}:{number}"
            for name, pattern in SECRETS.items():
                if re.search(pattern, line):
                    yield f"{where} holds what looks like {name}"
            local = re.search(PATHS, line) or re.search(WINDOWS, line)
            if local:
                yield f"{where} names a path of this machine: {local.group(0)}"
            elif home != "/" and re.search(re.escape(home) + r"(?!\w)", line):
                yield f"{where} names a path of this machine: {home}"
