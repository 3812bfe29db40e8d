"""Which TensorRT-LLM versions this adapter accepts: those whose hooks were compared with a signature snapshot, and no others."""

from __future__ import annotations

import os
import re

from dspine_export.errors import DependencyError
from dspine_export.trtllm.settings import ALLOW_VARIABLE
from dspine_export.trtllm.signatures import Snapshot
from dspine_export.trtllm.snapshots import SNAPSHOTS

LEGACY_LIMIT = "1.2"
_PATTERN = re.compile(r"^(\d+)\.(\d+)\.(\d+)(?:\.?(rc)(\d+))?")


def release_of(version: str) -> str | None:
    """The release line of a version: ``1.3.0rc`` for every 1.3.0 pre-release, ``1.3.0`` for that release; None if unreadable."""
    match = _PATTERN.match(version)
    return f"{match[1]}.{match[2]}.{match[3]}{match[4] or ''}" if match else None


def snapshot_for(version: str) -> Snapshot | None:
    """The snapshot whose release line and first checked pre-release cover ``version``; None where none does."""
    match = _PATTERN.match(version)
    if match is None or match[5] is None:
        return None
    for snapshot in SNAPSHOTS:
        if snapshot.release == release_of(version) and int(match[5]) >= snapshot.first_candidate:
            return snapshot
    return None


def checked_versions() -> str:
    """The signature-checked versions, for messages."""
    return ", ".join(
        f"{snapshot.release}{snapshot.first_candidate} and later {snapshot.release}" for snapshot in SNAPSHOTS
    )


def recorded_versions() -> str:
    """The very versions whose signatures the snapshots hold, for a later one of the same line that has moved away from them."""
    return " or ".join(f"{snapshot.release}{snapshot.first_candidate}" for snapshot in SNAPSHOTS)


def unchecked_allowed(allowed: bool) -> bool:
    """Whether the build or the environment waives the version gate."""
    return allowed or os.environ.get(ALLOW_VARIABLE) == "1"


def require_checked(version: str, *, allow_unchecked: bool) -> Snapshot:
    """The snapshot to compare ``version`` with.

    Raises:
        DependencyError: the version was not signature-checked and ``allow_unchecked`` is not set.
    """
    snapshot = snapshot_for(version)
    if snapshot is not None:
        return snapshot
    if allow_unchecked:
        return SNAPSHOTS[-1]
    raise DependencyError(
        "the hooks of this TensorRT-LLM version were not signature-checked",
        got=f"TensorRT-LLM {version}",
        expected=f"{checked_versions()} (signature-checked; never run by this project)",
        fix=_fix(version),
    )


def _fix(version: str) -> str:
    retry = f"build with --allow-unchecked, or set {ALLOW_VARIABLE}=1"
    release = release_of(version)
    if release is not None and [int(part) for part in release.split(".")[:2]] <= [1, 2]:
        return (
            f"install a checked version ({LEGACY_LIMIT} and earlier have no out-of-tree draft models; "
            "build --legacy-layout writes their file layout)"
        )
    return (
        f"install a checked version; or {retry} and compare outputs yourself (dspine-export doctor lists moved hooks)"
    )
