"""The embedded target: a transformers Llama or Qwen3 model that verifies blocks and hands out the states the drafter reads.

A tap on layer a takes the *output of decoder layer a*, by a hook on that layer: the same as Hugging Face's ``hidden_states[a + 1]``
except at the last layer, where Hugging Face's entry is already through the final norm. Symbols: N sequences, T tokens, V vocabulary
rows, A taps, d hidden size.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspine_export.errors import UsageError
from dspine_export.runtime.batch_buckets import batch_bucket
from dspine_export.runtime.captured_verify import MOST_TOKENS, PROMPTS, StaticRows, VerifyGraphs
from dspine_export.runtime.ragged_cache import Lease, RaggedCache
from dspine_export.runtime.slot_cache import COLUMN_STEP, SlotCache, SlotView

PREFILL_CHUNK_TOKENS = 512  # bounds the mask and the activations of a long prompt

HiddenSink = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True)
class TargetStep:
    """What one verification pass returns.

    Attributes:
        logits: float32 [N, T, V], row t is the distribution of the token after block token t.
        hidden: [N, T, A*d], tapped states of the block's tokens.

    On a GPU both are buffers that the next pass overwrites.
    """

    logits: Tensor
    hidden: Tensor


class TargetExecutor:
    """Runs one loaded model (see `load_target.open_target`). Not for use from several threads at once: the hooks share a buffer.

    Args:
        model: a causal language model that attends through `ragged_cache.ragged_attention`.
        taps: layer indices a, in the order in which the drafter's `fc` concatenates them.
        eos_ids: tokens that end a generation.
        capture: verify in captured passes (`captured_verify`); None: on a GPU. What a pass returns is then valid until the next.
    """

    def __init__(
        self, model: Any, taps: Iterable[int], eos_ids: Iterable[int] = (), *, capture: bool | None = None
    ) -> None:
        self.model, self.taps, self.eos_ids = model, tuple(taps), frozenset(eos_ids)
        self.config = model.config
        self._graphs: VerifyGraphs | None = None
        self._prompt_graphs: VerifyGraphs | None = None
        self._kept: SlotCache | None = None
        self._lease: weakref.ref[Lease] | None = None
        if self.device.type == "cuda" if capture is None else capture:
            groups = self.config.num_attention_heads // self.config.num_key_value_heads
            self._graphs = VerifyGraphs(self._forward, groups, self.device)
            self._prompt_graphs = VerifyGraphs(self.states, groups, self.device, PROMPTS)
        self.max_positions = int(self.config.max_position_embeddings)
        self._tapped: dict[int, Tensor] = {}
        for layer in set(self.taps):
            model.base_model.layers[layer].register_forward_hook(self._hook(layer))

    @property
    def embed_tokens(self) -> Tensor:
        """The embedding [V, d], shared with the model."""
        return self.model.get_input_embeddings().weight.detach()

    @property
    def lm_head(self) -> Tensor:
        """The output matrix [V, d], shared with the model (and the embedding, where tied)."""
        return self.model.get_output_embeddings().weight.detach()

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.device

    @property
    def captured(self) -> bool:
        """Whether blocks are verified in captured passes: queued at once, computed while the host does something else."""
        return self._graphs is not None and not self._graphs.broken

    @torch.inference_mode(False)
    @torch.no_grad()
    def new_state(self, batch: int, capacity: int) -> RaggedCache:
        """An empty cache of `capacity` positions for each of `batch` sequences."""
        if self._graphs is not None:
            return RaggedCache.within(self._leased(batch, capacity), batch)
        return RaggedCache.empty(self.config.num_hidden_layers, self._cache_shape(batch, capacity), self.embed_tokens)

    @torch.inference_mode(False)
    @torch.no_grad()
    def new_slots(self, slots: int, capacity: int) -> SlotCache:
        """Empty slots of `capacity` positions, for sequences that come and go; `states` and `verify` take views of it."""
        captured = self._graphs is not None
        if captured:  # a block is padded to a captured number of tokens
            capacity = -(-(capacity + MOST_TOKENS) // COLUMN_STEP) * COLUMN_STEP
        shape = self._cache_shape(slots, capacity)
        return SlotCache(self.config.num_hidden_layers, shape, self.embed_tokens, spare=captured)

    def _leased(self, batch: int, capacity: int) -> Lease:
        """A cache for one batch: the last one, with all that was captured over it, where it is free and large enough."""
        free = self._lease is None or self._lease() is None
        kept = self._kept
        if not free or kept is None or kept.slots < batch or kept.capacity < capacity + MOST_TOKENS:
            self._kept = None  # before its successor is allocated
            del kept
            kept = self.new_slots(batch_bucket(batch), capacity)
        kept.erase()
        lease = Lease(kept)
        self._kept, self._lease = kept, weakref.ref(lease)
        return lease

    def _cache_shape(self, rows: int, capacity: int) -> tuple[int, int, int, int]:
        config = self.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return rows, config.num_key_value_heads, capacity, head_dim

    @torch.no_grad()
    def prefill(self, state: RaggedCache, prompts: Sequence[Sequence[int]], sink: HiddenSink) -> Tensor:
        """Commits whole prompts into an empty cache and returns the logits after each, float32 [N, V].

        `sink(hidden [N, T, A*d], counts [N])` receives the tapped states piece by piece, counts[n] leading rows of each piece valid.
        """
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        longest = int(lengths.max())
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        self.check_ids(ids)
        last = torch.empty(len(prompts), self.config.hidden_size, dtype=self.embed_tokens.dtype, device=self.device)
        for start in range(0, longest, PREFILL_CHUNK_TOKENS):
            piece = ids[:, start : start + PREFILL_CHUNK_TOKENS].to(self.device)
            normed, hidden = self.states(state, piece)
            ends = ((lengths > start) & (lengths <= start + piece.shape[1])).nonzero().squeeze(1)
            last[ends] = normed[ends, lengths[ends] - start - 1]
            sink(hidden, (lengths - start).clamp(0, piece.shape[1]))
            state.lengths = state.lengths + piece.shape[1]  # padding included, so that the next piece lines up
        state.lengths = lengths
        return self.logits(last)

    @torch.no_grad()
    def verify(self, state: RaggedCache | SlotView, block: Tensor) -> TargetStep:
        """Runs [anchor, drafts ...] int64 [N, T] behind the committed tokens. Nothing is committed until `commit` (or, for slots,
        `SlotCache.advance`).
        """
        done = None if self._graphs is None else self._graphs.run(state, block)
        return TargetStep(*(self._forward(state, block) if done is None else done))

    @torch.no_grad()
    def read(self, state: SlotView, ids: Tensor) -> tuple[Tensor, Tensor]:
        """As `states`, for pieces of prompts; in captured passes, whose results the next one overwrites."""
        done = None if self._prompt_graphs is None else self._prompt_graphs.run(state, ids)
        return self.states(state, ids) if done is None else done

    def _forward(self, state: RaggedCache | SlotView | StaticRows, block: Tensor) -> tuple[Tensor, Tensor]:
        normed, hidden = self.states(state, block)
        return self.logits(normed), hidden

    def commit(self, state: RaggedCache, counts: Tensor) -> None:
        """Keeps the first counts[n] tokens of the block just verified, int64 [N]; the rest is forgotten."""
        state.lengths, state.longest = state.lengths + counts, None

    @torch.no_grad()
    def select(self, state: RaggedCache, rows: Tensor) -> RaggedCache:
        """Keeps the sequences `rows`, int64 [M], of a batch."""
        return state.select(rows)

    @torch.no_grad()
    def states(self, state: RaggedCache | SlotView | StaticRows, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Final-normed states [N, T, d] and tapped states [N, T, A*d] of ids int64 [N, T] behind the committed tokens."""
        positions = state.next_positions(ids.shape[1])
        mask = state.begin(positions)
        out = self.model.base_model(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False, ragged_cache=state
        )
        hidden = [self._tapped[layer] for layer in self.taps]
        self._tapped.clear()
        normed = out.last_hidden_state
        return normed, torch.cat(hidden, dim=-1) if hidden else normed[..., :0]

    @torch.no_grad()
    def logits(self, normed: Tensor) -> Tensor:
        """float32 [..., V] of final-normed states [..., d]."""
        return self.model.get_output_embeddings()(normed).float()

    def _hook(self, layer: int) -> Callable[..., None]:
        def keep(_module: object, _inputs: object, output: Any) -> None:
            self._tapped[layer] = output[0] if isinstance(output, tuple) else output

        return keep

    def check_ids(self, ids: Tensor) -> None:
        """Raises UsageError at a token outside the target's vocabulary."""
        rows = self.embed_tokens.shape[0]
        if bool(((ids < 0) | (ids >= rows)).any()):
            got = f"{int(ids.min())} .. {int(ids.max())}"
            raise UsageError("Prompt token outside the target's vocabulary", got=got, expected=f"0 .. {rows - 1}")
