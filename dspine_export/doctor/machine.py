"""GPU, memory and disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from dspine_export.doctor.check import Check
from dspine_export.doctor.probe import ask, first_line_of

_GPU_QUERY = ["nvidia-smi", "--query-gpu=name,compute_cap,memory.total,driver_version", "--format=csv,noheader"]
_MEMORY = """
from dspine_export.lowering.engine.memory import available_memory_bytes
from dspine_export.lowering.engine.gpu import device_compute_capability
answer["available"], answer["device"] = available_memory_bytes(), device_compute_capability()
"""
_LOW_MEMORY_BYTES = 4_000_000_000
_LOW_DISK_BYTES = 5_000_000_000


def check_machine() -> list[Check]:
    """The GPU, the memory that builds can use, and the disk under the current directory."""
    answer = ask(_MEMORY).values
    return [_gpu(answer.get("device")), _memory(answer.get("available")), _disk(Path.cwd())]


def _gpu(device: list[int] | None) -> Check:
    line = first_line_of(_GPU_QUERY)
    if line:
        return Check("GPU", "ok", line)
    if device:
        return Check("GPU", "ok", f"compute capability {device[0]}.{device[1]}")
    return Check("GPU", "absent", "none; graphs and TensorRT-RTX plans can be built here, plans cannot be run")


def _memory(available: int | None) -> Check:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if available is None:
        return Check("memory", "warning", f"{total / 1e9:.1f} GB, available amount unknown")
    detail = f"{available / 1e9:.1f} GB available of {total / 1e9:.1f} GB, {os.cpu_count()} processors"
    if available < _LOW_MEMORY_BYTES:
        return Check("memory", "warning", detail, "builds of large drafters need about 3.2 times the plan's size")
    return Check("memory", "ok", detail)


def _disk(folder: Path) -> Check:
    free = shutil.disk_usage(folder).free
    detail = f"{free / 1e9:.1f} GB free under {folder}"
    if free < _LOW_DISK_BYTES:
        return Check("disk", "warning", detail, "a bundle takes about three times the drafter's size")
    return Check("disk", "ok", detail)
