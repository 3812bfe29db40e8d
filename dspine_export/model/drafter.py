"""`Drafter`: a drafter bound to its target's embedding and head, ready to draft. The public API of the specification."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.errors import UsageError
from dspine_export.model.drafter_model import BlockStates, DrafterModel
from dspine_export.model.output import DraftOutput
from dspine_export.model.state import DraftState
from dspine_export.model.transition import select_candidates, unary_logits


class Drafter:
    """Drafts blocks of B-1 tokens per sequence. dtype and device follow the bound target tensors."""

    def __init__(self, model: DrafterModel, embed_tokens: Tensor, lm_head: Tensor) -> None:
        self.model = model
        self.embed_tokens, self.lm_head = embed_tokens, lm_head

    @property
    def config(self) -> DrafterConfig:
        return self.model.config

    @torch.no_grad()
    def draft(
        self,
        anchor_ids: Tensor,
        target_hidden: Tensor,
        context_lengths: Tensor,
        return_intermediates: bool = False,
        temperature: Tensor | float | None = None,
        generator: torch.Generator | None = None,
    ) -> DraftOutput:
        """One draft pass from scratch.

        Args:
            anchor_ids: [N], the known token at position context_lengths[n].
            target_hidden: [N, T, A*d] tapped states of positions 0 .. T-1; rows >= context_lengths[n] are ignored.
            context_lengths: [N], committed tokens n per sequence; 0 is legal.

        Raises:
            UsageError: shapes or ids that do not fit the drafter.
        """
        self._check_hidden(target_hidden, context_lengths)
        state = self.new_state(target_hidden.shape[0], target_hidden.shape[1])
        self.append_context(state, target_hidden, context_lengths)
        return self.draft_from(state, anchor_ids, temperature, generator, return_intermediates=return_intermediates)

    def new_state(self, batch: int, capacity: int) -> DraftState:
        """An empty context cache for `batch` sequences of at most `capacity` committed tokens."""
        if batch < 1 or capacity < 0:
            raise UsageError(
                "Invalid cache size", got=f"batch {batch}, capacity {capacity}", expected="batch >= 1, capacity >= 0"
            )
        config = self.config
        shape = (batch, config.num_layers, config.num_kv_heads, capacity, config.head_dim)
        dtype, device = self.embed_tokens.dtype, self.embed_tokens.device
        keys, values = torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)
        return DraftState(keys, values, torch.zeros(batch, dtype=torch.int64, device=device))

    @torch.no_grad()
    def append_context(self, state: DraftState, target_hidden: Tensor, counts: Tensor) -> None:
        """Commits counts[n] <= T more tokens per sequence. target_hidden [N, T, A*d], counts [N]"""
        counts = torch.as_tensor(counts, device=state.lengths.device)
        self._check_hidden(target_hidden, counts, batch=state.batch)
        row = torch.arange(target_hidden.shape[1], device=state.lengths.device)
        keys, values = self.model.context_keys_values(target_hidden.to(self.embed_tokens), state.lengths[:, None] + row)
        state.append(keys, values, counts.to(torch.int64))

    @torch.no_grad()
    def draft_from(
        self,
        state: DraftState,
        anchor_ids: Tensor,
        temperature: Tensor | float | None = None,
        generator: torch.Generator | None = None,
        uniforms: Tensor | None = None,
        return_intermediates: bool = False,
    ) -> DraftOutput:
        """Drafts from the cached context; the cache is not changed.

        Args:
            anchor_ids: [N].
            temperature: scalar or [N]; 0 or None is greedy. Rows with 0 walk greedily in the same batch.
            generator: source of the uniform numbers when sampling.
            uniforms: float32 [N, B-1] in [0, 1), instead of drawing them.
        """
        anchors = self._check_anchors(anchor_ids, state.batch)
        states = self.model.block_states(anchors, state.keys, state.values, state.lengths, self.embed_tokens)
        extra: dict[str, Any] = {}
        if return_intermediates:
            extra = {
                "layer_outputs": torch.stack(states.layer_outputs, dim=1),
                "pre_injection": states.pre_injection,
                "hidden_states": states.hidden,
            }
        if self.config.transfer is None:
            return self._unary_output(states, temperature, extra)
        heat, draws = self._sampling_inputs(state.batch, temperature, generator, uniforms)
        tokens, candidates, scores, q = self.model.decode(states, anchors, self.lm_head, heat, draws)
        return DraftOutput(tokens, candidates[..., 0].contiguous(), candidates, scores, q, **extra)

    def truncate(self, state: DraftState, lengths: Tensor) -> None:
        """Rolls every sequence back to lengths[n] committed tokens."""
        state.truncate(torch.as_tensor(lengths, device=state.lengths.device))

    def _unary_output(
        self, states: BlockStates, temperature: Tensor | float | None, extra: dict[str, Any]
    ) -> DraftOutput:
        tokens = select_candidates(unary_logits(states.hidden[:, 1:], self.lm_head), 1)[..., 0]
        if temperature is not None and bool((torch.as_tensor(temperature) > 0).any()):
            raise UsageError(
                "A DFlash drafter has no transition cache to sample from",
                where="temperature",
                got=temperature,
                fix="draft greedily (temperature 0) and let the verifier sample",
            )
        return DraftOutput(tokens, tokens.clone(), **extra)

    def _sampling_inputs(
        self, batch: int, temperature: Tensor | float | None, generator: torch.Generator | None, uniforms: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        device = self.embed_tokens.device
        heat = torch.as_tensor(0.0 if temperature is None else temperature, dtype=torch.float32, device=device)
        if heat.shape not in ((), (batch,)):
            raise UsageError(
                "Wrong shape", where="temperature", got=tuple(heat.shape), expected=f"a number or [{batch}]"
            )
        heat = heat.expand(batch)
        if bool((heat < 0).any()) or not bool(heat.isfinite().all()):
            raise UsageError("Temperature must be finite and not negative", where="temperature", got=heat.tolist())
        shape = (batch, self.config.block_size - 1)
        if uniforms is None:
            sampled = bool((heat > 0).any())
            uniforms = (
                torch.rand(shape, generator=generator, device=device) if sampled else torch.zeros(shape, device=device)
            )
        if tuple(uniforms.shape) != shape:
            raise UsageError("Wrong shape", where="uniforms", got=tuple(uniforms.shape), expected=shape)
        uniforms = uniforms.to(device, torch.float32)
        if not bool(((uniforms >= 0) & (uniforms < 1)).all()):
            raise UsageError("Uniform numbers out of range", where="uniforms", expected="at least 0 and below 1")
        return heat, uniforms

    def _check_anchors(self, anchor_ids: Tensor, batch: int) -> Tensor:
        anchors = torch.as_tensor(anchor_ids, device=self.embed_tokens.device)
        if anchors.shape != (batch,) or anchors.is_floating_point():
            got = f"{anchors.dtype} {tuple(anchors.shape)}"
            raise UsageError("Wrong anchors", where="anchor_ids", got=got, expected=f"integers [{batch}]")
        rows = self.embed_tokens.shape[0]
        if bool((anchors < 0).any()) or bool((anchors >= rows).any()):
            raise UsageError(
                "Anchor outside the vocabulary", where="anchor_ids", got=anchors.tolist(), expected=f"0 .. {rows - 1}"
            )
        return anchors.to(torch.int64)

    def _check_hidden(self, target_hidden: Tensor, counts: Tensor, batch: int | None = None) -> None:
        width = len(self.config.target_layer_ids) * self.config.hidden_size
        counts = torch.as_tensor(counts)
        n = counts.shape[0] if counts.ndim == 1 and batch is None else batch
        shape = tuple(target_hidden.shape)
        if len(shape) != 3 or shape[0] != n or shape[2] != width:
            taps = ", ".join(map(str, self.config.target_layer_ids))
            raise UsageError(
                "Target hidden states have the wrong shape",
                where="target_hidden",
                got=list(shape),
                expected=f"[{n}, T, {width}]: outputs of target layers {taps}, concatenated",
            )
        fits = counts.shape == (n,) and not counts.is_floating_point()
        if not fits or bool((counts < 0).any()) or bool((counts > shape[1]).any()):
            got, expected = counts.tolist(), f"[{n}] integers in 0 .. {shape[1]}"
            raise UsageError(
                "Context lengths do not fit the hidden states", where="context_lengths", got=got, expected=expected
            )
