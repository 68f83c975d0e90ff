"""Which of several processes this one is, and what they tell each other. One process where torchrun started none.

Everything here goes over gloo in main memory and waits for days: the others may be in a long evaluation. Gradients and shards
go over the default group. A process that dies closes its connections, so nobody waits for it.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from .errors import UserError, first_line

if TYPE_CHECKING:
    from torch import Tensor

PATIENCE = timedelta(days=7)
_control: Any = None  # the process group of the small messages


def started_by_torchrun() -> bool:
    return "LOCAL_RANK" in os.environ


def rank() -> int:
    return int(os.environ.get("RANK", "0")) if started_by_torchrun() else 0


def world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1")) if started_by_torchrun() else 1


def is_first() -> bool:
    """Whether this process speaks and writes for all."""
    return rank() == 0


@contextmanager
def joined() -> Iterator[None]:
    """Meet the other processes for the time of the block. The first to fail says why; the others then end without a word."""
    if not started_by_torchrun():
        yield
        return
    import torch
    from torch import distributed

    global _control
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        store, *_ = next(distributed.rendezvous("env://"))
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = distributed.PrefixStore(f"attempt {restarts}", store)  # torchrun's own: it holds what the dead have left
        distributed.init_process_group(backend, store=store, rank=rank(), world_size=world())
    except (distributed.DistError, ValueError) as error:
        place = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise UserError(f"the processes cannot meet at {place}: {first_line(error)}") from error
    _control = distributed.new_group(backend="gloo", timeout=PATIENCE)
    try:
        yield
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            _fail(store, error)
        else:
            distributed.destroy_process_group()
        raise
    else:
        distributed.destroy_process_group()
    finally:
        _control = None


def _fail(store: Any, error: BaseException) -> None:
    """Claim the right to tell; a process that comes second was only torn down by the first."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        told = store.add("failures", 1) > 1
    except RuntimeError:  # torchrun itself is gone, and with it whoever would listen
        told = True
    if told:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(10)  # torchrun ends everyone at the first exit: the one that tells must come first
        os._exit(1)
    get_error_handler().record_exception(error)  # for torchrun's own last words


def barrier() -> None:
    """Wait for all."""
    if _control is not None:
        from torch import distributed

        distributed.barrier(group=_control)


@contextmanager
def in_turn() -> Iterator[None]:
    """One process of each machine first, then the others: they find what it has downloaded or stored."""
    leads = os.environ.get("LOCAL_RANK", "0") == "0"
    if not leads:
        barrier()
    yield
    if leads:
        barrier()


@contextmanager
def one_by_one() -> Iterator[None]:
    """The processes of a machine one after the other: what each needs for a moment is needed once."""
    mine, all_of_them = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    for _ in range(mine):
        barrier()
    yield
    for _ in range(mine, all_of_them):
        barrier()


def share(value: Any) -> Any:
    """The first process's value, everywhere."""
    if _control is None:
        return value
    from torch import distributed

    box = [value]
    distributed.broadcast_object_list(box, src=0, group=_control)
    return box[0]


def total(values: "Tensor") -> "Tensor":
    """The sum of all processes' values, in main memory; what was given where there is one process."""
    if _control is None:
        return values
    from torch import distributed

    values = values.to("cpu", copy=True)
    distributed.all_reduce(values, group=_control)
    return values
