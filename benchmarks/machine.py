"""What benchmarks share: the machine's name, and the peak memory of this process alone (Linux). Needs nothing installed."""

import os
import platform
import re
from pathlib import Path

STATUS = Path("/proc/self/status")


def machine() -> str:
    """Such as 'AMD EPYC, 2 cores, 24 GB'."""
    found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    name = found.group(1) if found else platform.processor()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return f"{name}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GB"


def reset_peak() -> None:
    """Forget the peak so far: what loading needed is not what a step needs."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """The most memory this process held since reset_peak."""
    found = re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text())
    assert found
    return int(found.group(1)) * 1024
