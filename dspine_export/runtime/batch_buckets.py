"""Sizes that passes are captured for: a batch runs in the smallest one that holds it."""

from __future__ import annotations


def batch_bucket(sequences: int) -> int:
    """1, 2, 4, 8, 16, 24, 32, 48, 64, 96, ..: padding costs nothing while a pass reads weights, and at most a third beyond."""
    power = 1 << max(sequences - 1, 0).bit_length()
    step = power * 3 // 4
    return step if power >= 32 and sequences <= step else power


def token_bucket(tokens: int, block_size: int, batch: int, most_rows: int) -> int:
    """Rows per sequence of an append of `tokens`: a block's commit, doubled until it holds them or the batch has `most_rows` rows."""
    bucket = block_size
    while bucket < tokens and 2 * bucket * batch <= most_rows:
        bucket *= 2
    return bucket
