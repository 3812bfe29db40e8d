"""Naive reference of the copy: the oracle of its test."""

from __future__ import annotations

from torch import Tensor


def copy_committed_reference(
    keys: Tensor, values: Tensor, pages: Tensor, lengths: Tensor, keys_out: Tensor, values_out: Tensor
) -> None:
    """Token by token; arguments as `kernel.copy_committed`."""
    size = keys.shape[2]
    for n in range(pages.shape[0]):
        for column in range(min(int(lengths[n]), keys_out.shape[2])):
            page = int(pages[n, column // size])
            keys_out[n, :, column] = keys[page, :, column % size]
            values_out[n, :, column] = values[page, :, column % size]
