"""Text by the target itself: batched sampling over a static cache, one replayed CUDA graph per cache width.

Symbols: N sequences in a batch, S cache columns, V vocabulary rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tools.training.target import Target

STEP = 64  # cache columns are attended in multiples of this
CHECK_EVERY = 16  # decode steps between looks at whether every sequence has ended


class _Decoder:
    """Static buffers of one batch and the decode step that advances them."""

    def __init__(self, target: Target, batch: int, columns: int, temperatures: Tensor) -> None:
        device = target.device
        self.target, self.columns, self.temperatures = target, columns, temperatures
        self.cache = target.new_cache(batch, columns)
        self.ids = torch.zeros(batch, columns + 1, dtype=torch.int64, device=device)
        self.positions = torch.zeros(batch, dtype=torch.int64, device=device)
        self.ended = torch.zeros(batch, dtype=torch.bool, device=device)
        self.replays: dict[int, Callable[[], None]] = {}

    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        lengths = torch.tensor([len(p) for p in prompts])
        padded = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt)] = torch.tensor(prompt)
        self.ids.zero_()
        self.ids[:, : padded.shape[1]] = padded.to(self.ids.device)
        self.positions.copy_(lengths - 1)
        self.ended.zero_()
        for rows in torch.arange(len(prompts)).split(256):  # bounds the activations of a long prompt batch
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            cache = (self.cache[0][:, part], self.cache[1][:, part])
            self.target.forward(self.ids[part, : padded.shape[1]], cache=cache)

    def step(self, width: int) -> None:
        """Feed the token at ``positions``, sample its successor, advance. Runs under graph capture: no host reads."""
        logits = self.target.decode(self.ids.gather(1, self.positions[:, None])[:, 0], self.positions, self.cache, width)
        # Gumbel-max: at temperature 0 the noise vanishes and this is the plain argmax
        noise = -torch.empty_like(logits).exponential_().log()
        chosen = torch.where(
            self.temperatures > 0, (logits + self.temperatures[:, None] * noise).argmax(-1), logits.argmax(-1)
        )
        self.positions.add_(1)
        self.ids.scatter_(1, self.positions[:, None], chosen[:, None])
        self.ended.logical_or_(chosen == self.target.shape.eos_token_id)

    def advance(self, width: int) -> None:
        if width not in self.replays:
            on_gpu = self.target.device.type == "cuda"
            self.replays[width] = self._capture(width) if on_gpu else functools.partial(self.step, width)
        self.replays[width]()

    def _capture(self, width: int) -> Callable[[], None]:
        saved = [t.clone() for t in (self.ids, self.positions, self.ended)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.step(width)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step(width)
        for buffer, value in zip((self.ids, self.positions, self.ended), saved, strict=True):
            buffer.copy_(value)
        return graph.replay


def generate(
    target: Target,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    max_new_tokens: int,
    batch: int = 1024,
    report: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """The target's continuation of every prompt, end token included when it was reached, at most ``max_new_tokens`` long.

    Prompts are token ids. They run in order of length, ``batch`` at a time; results come back in the caller's order. Temperature 0 is
    greedy. Sampling draws from torch's default generator of the target's device.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    batch = min(batch, len(order))
    columns = -(-(max(len(p) for p in prompts) + max_new_tokens) // STEP) * STEP
    decoder = _Decoder(target, batch, columns, torch.zeros(batch, device=target.device))
    results: list[list[int]] = [[] for _ in prompts]
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        padded = rows + rows[:1] * (batch - len(rows))  # the last batch repeats a prompt: shapes stay fixed
        decoder.temperatures.copy_(torch.tensor([temperatures[i] for i in padded]))
        decoder.prefill([prompts[i] for i in padded])
        longest = max(len(prompts[i]) for i in rows)
        for step in range(max_new_tokens):
            decoder.advance(min(columns, -(-(longest + step) // STEP) * STEP))
            if step % CHECK_EVERY == CHECK_EVERY - 1 and bool(decoder.ended.all()):
                break
        _collect(decoder, rows, prompts, max_new_tokens, results)
        if report:
            report(start + len(rows), len(order))
    return results


def _collect(
    decoder: _Decoder, rows: list[int], prompts: Sequence[Sequence[int]], max_new_tokens: int, results: list[list[int]]
) -> None:
    ids, eos = decoder.ids.cpu().tolist(), decoder.target.shape.eos_token_id
    for row, index in enumerate(rows):
        start = len(prompts[index])
        answer = ids[row][start : start + max_new_tokens]
        results[index] = answer[: answer.index(eos) + 1] if eos in answer else answer
