"""How fast stored features are written and read, beside what `dd` does with as many bytes on the same disk.

    python benchmarks/features.py [FOLDER] [--megabytes 1000] [--width 2048]

Written: shards of random bfloat16 states through FeatureStore, checksums and the wait for the disk included; `dd` writes and
waits too. Read: every sample, checksums included, with the files out of the page cache before, as for `dd`. Both take turns,
three times, and the fastest of each counts. Needs twice the bytes of free disk.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from headstart.data.chat import Sample
from headstart.data.store import FeatureStore, Rows
from headstart.data.survey import Layout, survey

LAYERS = (2, 15, 27)
TOKENS = 200  # a sample
BATCH = 16  # samples
GOAL = 0.6  # of dd


def some_rows(count: int, width: int) -> dict[int, Rows]:
    """Samples of one shard: views of one tensor, as the verifier's batches are, different in every sample."""
    states = torch.randn(count * TOKENS, len(LAYERS) + 1, width, generator=torch.Generator().manual_seed(0)).bfloat16()
    choice = torch.arange(TOKENS, dtype=torch.int32)
    parts = states.split(TOKENS)
    return {i: {"layers": p[:, :-1].contiguous(), "last": p[:, -1].contiguous(), "choice": choice} for i, p in enumerate(parts)}


def write(store: FeatureStore, rows: dict[int, Rows], shards: list[range]) -> None:
    for shard in shards:
        store.write({i: rows[i - shard.start] for i in shard})


def read(store: FeatureStore, count: int) -> None:
    """Every sample, a batch at a time."""
    for start in range(0, count, BATCH):
        rows = store.read_all(range(start, min(start + BATCH, count)))
        assert None not in rows.values()


def forget(paths: list[Path]) -> None:
    """Out of the page cache."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def dd(*arguments: str) -> None:
    subprocess.run(["dd", "bs=1M", *arguments], check=True, stderr=subprocess.DEVNULL)


def seconds(work: object, *arguments: object) -> float:
    start = time.perf_counter()
    work(*arguments)  # type: ignore[operator]
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--width", type=int, default=2048, help="hidden size of the verifier")
    options = parser.parse_args()
    torch.set_num_threads(1)
    layout = Layout(LAYERS, options.width, "bfloat16", everywhere=True)
    sample = Sample([1] * TOKENS, [True] * TOKENS)
    count = round(options.megabytes * 1e6 / survey([sample], layout).sample_bytes().sum())
    surveyed = survey([sample] * count, layout)
    shards = surveyed.chunks()
    rows = some_rows(max(map(len, shards)), options.width)
    times: dict[str, list[float]] = {"dd writes": [], "features written": [], "dd reads": [], "features read": []}
    for _ in range(3):
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            folder, plain = Path(name), Path(name) / "plain"
            store = FeatureStore(folder, surveyed)
            times["features written"].append(seconds(write, store, rows, shards))
            files = list(folder.glob("*.safetensors"))
            size = sum(path.stat().st_size for path in files)
            megabytes = str(size // 2**20)
            times["dd writes"].append(seconds(dd, "if=/dev/zero", f"of={plain}", f"count={megabytes}", "conv=fsync"))
            forget([plain, *files])
            times["dd reads"].append(seconds(dd, f"if={plain}", "of=/dev/null"))
            times["features read"].append(seconds(read, FeatureStore(folder, surveyed), count))
    rates = {name: size / min(spent) / 1e6 for name, spent in times.items()}
    shares = {"written": rates["features written"] / rates["dd writes"], "read": rates["features read"] / rates["dd reads"]}
    table = Table("", "features", "dd", "share", "goal", title=f"{size / 1e6:,.0f} MB in {len(files)} shards, MB/s")
    for name, verb in (("written", "writes"), ("read", "reads")):
        row = [f"{rates[f'features {name}']:,.0f}", f"{rates[f'dd {verb}']:,.0f}", f"{shares[name]:.0%}", f">= {GOAL:.0%}"]
        table.add_row(name, *row)
    Console().print(table)
    return 0 if min(shares.values()) >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
