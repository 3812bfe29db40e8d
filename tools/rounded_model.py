"""The eager drafter with activations rounded where the float8 passes round them; its weights are expected to be rounded already.

Every product reads e4m3 values under one float32 scale a row. Passes of few rows do not round a block's activations, only the context's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dspine_export.model.drafter_model import DrafterModel
from dspine_export.model.layer import DecoderLayer
from dspine_export.runtime.float8 import LARGEST


def round_trip(x: Tensor) -> Tensor:
    """x [..., K] as its rows come back from e4m3, each under a scale of its own."""
    rows = x.reshape(-1, x.shape[-1])
    peak = rows.abs().amax(dim=1, keepdim=True).float()
    scales = torch.where(peak > 0, peak / LARGEST, 1.0)
    values = (rows.float() / scales).to(torch.float8_e4m3fn)
    return (values.float() * scales).to(x.dtype).view(x.shape)


@contextmanager
def rounded_activations(network: DrafterModel, *, block: bool, fc: bool = True) -> Iterator[None]:
    """While it is entered, products read rounded rows: those of the context, and with ``block`` the layers' as well.

    Args:
        fc: the projection of the tapped states is one of them.
    """
    handles = [network.hidden_norm.register_forward_hook(_result)]
    if fc:
        handles.append(network.fc.register_forward_pre_hook(_argument))
    layers = [layer for layer in network.layers if isinstance(layer, DecoderLayer)]
    for layer in layers if block else ():
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            handles.append(norm.register_forward_hook(_result))
        for product in (layer.self_attn.o_proj, layer.mlp.down_proj):
            handles.append(product.register_forward_pre_hook(_argument))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _argument(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Tensor]:
    return (round_trip(arguments[0]),)


def _result(_: nn.Module, __: tuple[Any, ...], result: Tensor) -> Tensor:
    return round_trip(result)
