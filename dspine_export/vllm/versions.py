"""Which vLLM versions this adapter serves, and how each was checked."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Literal

from dspine_export.errors import DependencyError
from dspine_export.vllm.signatures import Hook
from dspine_export.vllm.snapshots import HOOKS_0_26, HOOKS_0_32, HOOKS_0_33

ALLOW_VARIABLE = "DSPINE_VLLM_ALLOW_UNCHECKED"


@dataclass(frozen=True)
class Release:
    """One minor release of vLLM.

    Attributes:
        state: ``run`` where the tests of this project pass in it (0.32: its CPU build; 0.33: H200), ``signature-checked`` where its
            sources were only compared.
        asks_the_model: its DSpark speculator calls the draft model's own ``sample_sequential``; elsewhere `walk_hook` does.
        is_older: it lacks what `older_vllm` adds.
    """

    line: str
    state: Literal["run", "signature-checked"]
    hooks: tuple[Hook, ...]
    asks_the_model: bool = False
    is_older: bool = False


RELEASES: tuple[Release, ...] = (
    Release("0.26", "signature-checked", HOOKS_0_26, is_older=True),
    Release("0.32", "run", HOOKS_0_32),
    Release("0.33", "run", HOOKS_0_33, asks_the_model=True),
)
"""Oldest first."""


def release_for(version: str) -> Release | None:
    """The release a version belongs to (``0.32.1+cpu`` -> 0.32), or None for one that was never looked at."""
    match = re.match(r"(\d+\.\d+)(?:\.|$)", version)
    return next((release for release in RELEASES if match and release.line == match[1]), None)


def known_versions() -> str:
    """The table in words, for messages."""
    return ", ".join(f"{release.line} ({release.state})" for release in RELEASES)


def require_release(version: str) -> Release:
    """The release of ``version``; with DSPINE_VLLM_ALLOW_UNCHECKED=1 an unknown version counts as the newest one.

    Raises:
        DependencyError: a version that was never looked at.
    """
    release = release_for(version)
    if release is None and os.environ.get(ALLOW_VARIABLE) == "1":
        return RELEASES[-1]
    if release is None:
        raise DependencyError(
            "this vLLM version was not checked for method 'dspine'",
            got=f"vLLM {version}",
            expected=known_versions(),
            fix=f"install a listed version of vLLM, or a newer dspine-export; {ALLOW_VARIABLE}=1 tries it regardless",
        )
    return release
