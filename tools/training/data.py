"""Sequences the target wrote, packed in one file, and the batches drawn from them.

Symbols: N sequences of a batch, T padded length.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tools.training.loops import loop_starts

PAD_TO = 64  # batch widths are multiples of this, so that few shapes occur


@dataclass(frozen=True)
class Corpus:
    """Prompt and answer tokens back to back: sequence i is ``tokens[offsets[i] : offsets[i + 1]]``, its first ``prompts[i]`` the prompt."""

    tokens: Tensor  # int32 [total]
    offsets: Tensor  # int64 [count + 1]
    prompts: Tensor  # int64 [count]

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def lengths(self) -> Tensor:
        """Tokens of every sequence, int64 [count]."""
        return self.offsets[1:] - self.offsets[:-1]

    def save(self, path: Path) -> None:
        """Write the file `load_corpus` reads; a name that ends in .xz is compressed, tokens as 16 bits where they fit."""
        if path.suffix == ".xz":
            _save_compressed(self, path)
            return
        torch.save({"tokens": self.tokens, "offsets": self.offsets, "prompts": self.prompts}, path)


def load_corpus(path: Path) -> Corpus:
    """A corpus written by `Corpus.save`."""
    if path.suffix == ".xz":
        return _load_compressed(path)
    return Corpus(**torch.load(path, weights_only=True))


def _save_compressed(corpus: Corpus, path: Path) -> None:
    """Header line, then lengths, prompt lengths and tokens: whole prompts repeat, which is what a compressor is good at."""
    kind = "<u2" if int(corpus.tokens.max()) < 1 << 16 else "<u4"
    columns = (corpus.lengths.numpy().astype("<u4"), corpus.prompts.numpy().astype("<u4"), corpus.tokens.numpy().astype(kind))
    with lzma.open(path, "wb", preset=6) as out:
        out.write(f"{len(corpus)} {len(corpus.tokens)} {kind}\n".encode())
        for column in columns:
            out.write(column.tobytes())


def _load_compressed(path: Path) -> Corpus:
    with lzma.open(path, "rb") as source:
        count, total, kind = source.readline().decode().split()
        lengths = np.frombuffer(source.read(4 * int(count)), "<u4").astype(np.int64)
        prompts = np.frombuffer(source.read(4 * int(count)), "<u4").astype(np.int64)
        tokens = np.frombuffer(source.read(), kind).astype(np.int32)
    if len(tokens) != int(total):
        raise SystemExit(f"{path} is cut short: {len(tokens)} of {total} tokens")
    offsets = torch.from_numpy(np.concatenate(([0], lengths.cumsum())))
    return Corpus(torch.from_numpy(tokens), offsets, torch.from_numpy(prompts))


def pack(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> Corpus:
    """Join prompts and answers; both are token ids."""
    rows = [torch.tensor([*p, *a], dtype=torch.int32) for p, a in zip(prompts, answers, strict=True)]
    offsets = torch.tensor([0, *(len(r) for r in rows)]).cumsum(0)
    return Corpus(torch.cat(rows), offsets, torch.tensor([len(p) for p in prompts]))


def cut_loops(answers: Sequence[Sequence[int]]) -> tuple[list[list[int]], int]:
    """Every answer up to the point where it starts to repeat itself, and how many were cut."""
    lengths = torch.tensor([len(a) for a in answers])
    padded = torch.full((len(answers), int(lengths.max())), -1, dtype=torch.int32)
    for row, answer in enumerate(answers):
        padded[row, : len(answer)] = torch.tensor(answer, dtype=torch.int32)
    starts = torch.cat([loop_starts(t, n) for t, n in zip(padded.split(4096), lengths.split(4096), strict=True)])
    kept = [list(a[:s]) for a, s in zip(answers, starts.tolist(), strict=True)]
    return kept, int((starts < lengths).sum())


@dataclass(frozen=True)
class Batch:
    """Right-padded sequences: ``ids`` int64 [N, T], ``prompts`` and ``lengths`` int64 [N]."""

    ids: Tensor
    prompts: Tensor
    lengths: Tensor


def gather(corpus: Corpus, rows: Sequence[int], device: torch.device, padded: int | None = None) -> Batch:
    """The named sequences as one batch, padded to ``padded`` tokens or else to a multiple of `PAD_TO`."""
    index = torch.as_tensor(rows)
    lengths = corpus.lengths[index]
    width = padded or -(-int(lengths.max()) // PAD_TO) * PAD_TO
    columns = torch.arange(width)
    where = corpus.offsets[index][:, None] + columns.clamp(max=width)
    inside = columns < lengths[:, None]
    ids = torch.where(inside, corpus.tokens[where.clamp(max=len(corpus.tokens) - 1)].long(), 0)
    return Batch(ids.to(device), corpus.prompts[index].to(device), lengths.to(device))


def batches(corpus: Corpus, size: int, seed: int, device: torch.device) -> Iterator[Batch]:
    """Endless batches of ``size`` sequences of similar length, every sequence once per epoch, in an order the seed fixes."""
    generator = torch.Generator().manual_seed(seed)
    pool = 32 * size  # sorting by length within a random pool keeps padding small and batches varied
    while True:
        order = torch.randperm(len(corpus), generator=generator)
        order = order[: max(size, len(order) // size * size)]
        grouped = [chunk[corpus.lengths[chunk].argsort()] for chunk in order.split(pool)]
        parts = [part for chunk in grouped for part in chunk.split(size)]
        for index in torch.randperm(len(parts), generator=generator).tolist():
            yield gather(corpus, parts[index].tolist(), device)
