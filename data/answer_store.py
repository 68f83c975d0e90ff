"""Answers on disk, so that a killed run goes on where it was and a rerun costs nothing."""

import hashlib
import json
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..heads.files import writing


class LineStore:
    """A file of JSON lines {"prompt": key, "answer": value}, appended and synced at once; many threads may write."""

    def __init__(self, path: Path) -> None:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.lock = threading.Lock()
        self.answers: dict[str, Any] = {}
        if path.exists():
            complete = [line for line in path.read_bytes().split(b"\n")[:-1] if line]
            for line in complete:
                row = json.loads(line)
                self.answers[row["prompt"]] = row["answer"]
            # a line torn by a kill would swallow the next one
            os.truncate(path, sum(len(line) + 1 for line in complete))

    def put(self, rows: Mapping[str, Any]) -> None:
        with self.lock, writing(self.path), self.path.open("a", encoding="utf-8") as file:
            self.answers |= rows
            file.writelines(json.dumps({"prompt": key, "answer": answer}) + "\n" for key, answer in rows.items())
            file.flush()
            os.fsync(file.fileno())


class AnswerStore(LineStore):
    """Answers (token ids) of one verifier at one length limit, temperature and seed, under the hash of the prompt's ids."""

    def __init__(self, folder: Path, fingerprint: str, answer_tokens: int, temperature: float = 0.0, seed: int = 0) -> None:
        sampled = f"-t{temperature}-s{seed}" if temperature else ""  # greedy answers know no seed
        super().__init__(folder / f"{fingerprint[:16]}-{answer_tokens}{sampled}.jsonl")
        self.temperature, self.seed = temperature, seed

    def get(self, prompt: Sequence[int]) -> list[int] | None:
        return self.answers.get(digest(prompt))

    def add(self, prompts: Iterable[Sequence[int]], answers: Iterable[list[int]]) -> None:
        self.put({digest(prompt): answer for prompt, answer in zip(prompts, answers, strict=True)})


def digest(prompt: Sequence[int]) -> str:
    return hashlib.sha256(",".join(map(str, prompt)).encode()).hexdigest()
