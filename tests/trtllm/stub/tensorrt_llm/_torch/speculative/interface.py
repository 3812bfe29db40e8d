"""Stub of the speculation modes."""

from __future__ import annotations

from enum import IntEnum, auto


class SpeculativeDecodingMode(IntEnum):
    DFLASH = auto()
    DSPARK = auto()
