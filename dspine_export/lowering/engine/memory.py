"""Memory: what a build will need, what this machine has, and what a build took.

The builder holds the weights about three times at its peak (measured: 2.2 to 3.2 times the plan). A build that does not fit is killed
without a word, so it is refused before it starts.
"""

from __future__ import annotations

import resource
import shutil
from pathlib import Path

from dspine_export.errors import DependencyError, OutputError

PEAK_FACTOR = 3.2
BASE_BYTES = 400_000_000  # the builder's libraries, this interpreter, kernels compiled into even the smallest plan

_UNLIMITED = 1 << 60


def available_memory_bytes() -> int | None:
    """Memory a new allocation can get: the kernel's estimate, capped by the control group's limit; None where neither is known."""
    limits = [value for value in (_meminfo("MemAvailable"), _cgroup_headroom()) if value is not None]
    return min(limits) if limits else None


def check_memory(plan_bytes: int, *, what: str) -> None:
    """Refuse a build whose peak would not fit.

    Args:
        plan_bytes: expected size of the largest single plan (plans are built one after the other).
        what: named in the message.

    Raises:
        DependencyError: with the needed and the available amount.
    """
    need, have = int(plan_bytes * PEAK_FACTOR) + BASE_BYTES, available_memory_bytes()
    if have is not None and have < need:
        raise DependencyError(
            f"not enough memory to build {what}",
            got=f"{_gb(have)} available",
            expected=f"{_gb(need)} ({PEAK_FACTOR} x a plan of {_gb(plan_bytes)}, and {_gb(BASE_BYTES)} for the builder itself)",
            fix="free memory, or export only with --stop-after onnx and build the engine on a larger machine with build --resume",
        )


def check_disk(plan_bytes: int, folder: Path) -> None:
    """Raises OutputError when ``plan_bytes`` do not fit the file system of ``folder`` (an existing folder)."""
    free = shutil.disk_usage(folder).free
    if free < plan_bytes:
        raise OutputError(
            "not enough disk space for the engine plans",
            where=folder,
            got=f"{_gb(free)} free",
            expected=_gb(plan_bytes),
        )


def reset_peak_rss() -> None:
    """Start a new measurement of this process's peak, where the kernel lets us; elsewhere the peak is that of the whole process."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_rss_bytes() -> int:
    """Highest resident memory since `reset_peak_rss`; mapped weight files count while they are resident."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _meminfo(key: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)


def _cgroup_headroom(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes left under the control group's limit (version 2, then 1). Droppable page cache is counted as free."""
    for limit_file, usage_file, cache_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit, usage = (root / limit_file).read_text().strip(), int((root / usage_file).read_text())
            statistics = ((root / limit_file).parent / "memory.stat").read_text().split("\n")
        except (OSError, ValueError):
            continue
        if limit == "max" or int(limit) >= _UNLIMITED:
            return None
        cache = next((int(line.split()[1]) for line in statistics if line.startswith(f"{cache_key} ")), 0)
        return int(limit) - usage + cache
    return None


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.2f} GB"
