"""``dspine-export inspect``: validate a drafter checkpoint and describe it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from dspine_export.cli.guard import command


def inspect(
    checkpoint: Annotated[Path, typer.Argument(help="Drafter checkpoint directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Validate a drafter checkpoint completely (no target needed) and describe it."""
    with command(as_json=as_json) as console:
        from dspine_export.pipeline.inspect import inspect_checkpoint

        found = inspect_checkpoint(checkpoint, console)
        console.result(found, _lines(found))


def _lines(found: dict[str, Any]) -> Iterator[str]:
    config, transfer = found["config"], found["config"]["transfer"]
    mask = "causal" if config["is_causal"] else "bidirectional"
    yield f"{config['architecture']} ({config['layout']} layout), {found['parameters'] / 1e6:,.1f} M parameters, valid"
    yield f"  block size     {config['block_size']}, {mask}, mask token {config['mask_token_id']}"
    yield f"  layers         {config['num_layers']} x hidden {config['hidden_size']}, FFN {config['intermediate_size']}"
    yield f"  attention      {config['num_heads']} heads, {config['num_kv_heads']} K/V heads of {config['head_dim']}"
    yield f"  taps           after target layers {', '.join(map(str, config['target_layer_ids']))}"
    yield f"  vocabulary     {config['vocab_size']} rows"
    if transfer:
        yield f"  transfer       rank {transfer['rank']}, message {transfer['message_size']}, codes {found['codes']}"
        yield f"  candidates     {transfer['top_k']}"
    else:
        yield "  transfer       none (DFlash)"
    dtypes = ", ".join(f"{count} {name}" for name, count in found["dtypes"].items())
    yield f"  stored         {found['size_bytes'] / 1e6:,.1f} MB in {', '.join(found['files'])} ({dtypes})"
