"""Meeting the other processes, and doing without them."""

import socket

import pytest
import torch
from command import headstart

from headstart import ranks


@pytest.fixture
def alone_under_torchrun(monkeypatch):
    """The environment of a world of one; yields its port, in use."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        values = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        yield port


def test_case_59_a_port_in_use_is_one_clear_line(alone_under_torchrun):
    ended = headstart("train", "some.yaml")
    assert ended.code == 2
    assert ended.err.startswith(f"error: the processes cannot meet at 127.0.0.1:{alone_under_torchrun}: ")
    assert len(ended.err.splitlines()) == 1


def test_without_others_everything_is_ones_own(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    values = torch.tensor([1, 2])
    assert ranks.total(values) is values
    assert ranks.share("word") == "word"
    ranks.barrier()
    done = []
    with ranks.joined(), ranks.in_turn(), ranks.one_by_one():
        done.append(ranks.is_first())
    assert done == [True]
