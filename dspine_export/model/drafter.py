"""`Drafter`: a drafter bound to its target's embedding and head, ready to draft. The public API of the specification."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.errors import DependencyError, UsageError
from dspine_export.model.arguments import check_finite_rows, check_hidden_type, integer_argument, tensor_argument
from dspine_export.model.drafter_model import BlockStates, DrafterModel
from dspine_export.model.output import DraftOutput
from dspine_export.model.state import DraftState
from dspine_export.model.transition import MIN_TEMPERATURE, select_candidates, unary_logits


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

    @torch.inference_mode(
        False
    )  # a state outlives the mode it was made in, and tensors of inference mode cannot be written outside
    def new_state(self, batch: int, capacity: int) -> DraftState:
        """An empty context cache for `batch` sequences of at most `capacity` committed tokens."""
        if not (type(batch) is type(capacity) is int) or batch < 1 or capacity < 0:
            raise UsageError(
                "Invalid cache size", got=f"batch {batch}, capacity {capacity}", expected="batch >= 1, capacity >= 0"
            )
        config = self.config
        shape = (batch, config.num_layers, config.num_kv_heads, capacity, config.head_dim)
        dtype, device = self.embed_tokens.dtype, self.embed_tokens.device
        try:
            keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        except (RuntimeError, TypeError) as error:  # TypeError: beyond 64 bits
            got = f"{shape}: {str(error).splitlines()[0][:200]}"
            raise DependencyError("The context cache does not fit into memory", where="new_state", got=got) from error
        return DraftState(keys, values, torch.zeros(batch, dtype=torch.int64, device=device))

    @torch.no_grad()
    def append_context(self, state: DraftState, target_hidden: Tensor, counts: Tensor) -> None:
        """Commits counts[n] <= T more tokens per sequence. target_hidden [N, T, A*d], counts [N]"""
        self._check_state(state)
        counts = self._check_hidden(target_hidden, counts, batch=state.batch)
        row = torch.arange(target_hidden.shape[1], device=state.lengths.device)
        keys, values = self.model.context_keys_values(target_hidden.to(self.embed_tokens), state.lengths[:, None] + row)
        state.append(keys, values, counts)

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
        self._check_state(state)
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
        self._check_state(state)
        state.truncate(integer_argument("truncate", lengths, state.lengths.device))

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
        heat = tensor_argument("temperature", 0.0 if temperature is None else temperature, device).float()
        if heat.shape not in ((), (batch,)):
            raise UsageError(
                "Wrong shape", where="temperature", got=tuple(heat.shape), expected=f"a number or [{batch}]"
            )
        heat = heat.expand(batch)
        if not bool((heat.isfinite() & ((heat == 0) | (heat >= MIN_TEMPERATURE))).all()):
            expected = f"0 (greedy), or {MIN_TEMPERATURE:g} and more"
            what = "Temperature must be finite and not negative"
            raise UsageError(what, where="temperature", got=heat.tolist(), expected=expected)
        shape = (batch, self.config.block_size - 1)
        if not isinstance(generator, torch.Generator | None):
            raise UsageError("Not a generator", where="generator", got=generator, expected="a torch.Generator")
        if uniforms is None:
            sampled = bool((heat > 0).any())
            uniforms = (
                torch.rand(shape, generator=generator, device=device) if sampled else torch.zeros(shape, device=device)
            )
        uniforms = tensor_argument("uniforms", uniforms, device)
        if tuple(uniforms.shape) != shape:
            raise UsageError("Wrong shape", where="uniforms", got=tuple(uniforms.shape), expected=shape)
        uniforms = uniforms.float()
        if not bool(((uniforms >= 0) & (uniforms < 1)).all()):
            raise UsageError("Uniform numbers out of range", where="uniforms", expected="at least 0 and below 1")
        return heat, uniforms

    def _check_anchors(self, anchor_ids: Tensor, batch: int) -> Tensor:
        anchors = integer_argument("anchor_ids", anchor_ids, self.embed_tokens.device)
        if anchors.shape != (batch,):
            got = f"{anchors.dtype} {tuple(anchors.shape)}"
            raise UsageError("Wrong anchors", where="anchor_ids", got=got, expected=f"integers [{batch}]")
        rows = self.embed_tokens.shape[0]
        if bool((anchors < 0).any()) or bool((anchors >= rows).any()):
            raise UsageError(
                "Anchor outside the vocabulary", where="anchor_ids", got=anchors.tolist(), expected=f"0 .. {rows - 1}"
            )
        return anchors

    def _check_state(self, state: DraftState) -> None:
        config, like = self.config, self.embed_tokens
        expected = (config.num_layers, config.num_kv_heads, config.head_dim, like.dtype, like.device)
        got: object = type(state).__name__
        if isinstance(state, DraftState):
            keys = state.keys
            got = (keys.shape[1], keys.shape[2], keys.shape[4], keys.dtype, keys.device)
        if got != expected:
            raise UsageError(
                "This is not a state of this drafter",
                where="state",
                got=got,
                expected=f"one from its new_state: layers, key/value heads, head size, dtype and device {expected}",
            )

    def _check_hidden(self, target_hidden: Tensor, counts: Tensor, batch: int | None = None) -> Tensor:
        width = len(self.config.target_layer_ids) * self.config.hidden_size
        counts = integer_argument("context_lengths", counts, self.embed_tokens.device)
        check_hidden_type(target_hidden)
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
        fits = counts.shape == (n,)
        if not fits or bool((counts < 0).any()) or bool((counts > shape[1]).any()):
            got, expected = counts.tolist(), f"[{n}] integers in 0 .. {shape[1]}"
            raise UsageError(
                "Context lengths do not fit the hidden states", where="context_lengths", got=got, expected=expected
            )
        check_finite_rows(target_hidden, counts)
        return counts
