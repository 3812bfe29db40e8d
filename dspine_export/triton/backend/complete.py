"""What Triton asks before it loads a model: inputs, outputs and policies that the configuration leaves out."""

from __future__ import annotations

from typing import Any

from dspine_export.triton.contract import (
    SEQUENCE_CONTROLS,
    TEXT_INPUTS,
    TEXT_OUTPUTS,
    Tensor,
    drafter_inputs,
    drafter_outputs,
)


def complete(config: Any) -> Any:
    """Completes Triton's `ModelConfig` object in place and returns it.

    Tensors that are there already must fit; Triton's object raises ValueError where they do not. Sizes that depend on the drafter are
    known only where the paths are, which is not here: they stay open unless the configuration has them.
    """
    document = config.as_dict()
    if _kind(document) == "drafter":
        _add(config, document, drafter_inputs(-1), drafter_outputs(2, -1))
        document.setdefault("sequence_batching", _sequence_batching())
    else:
        _add(config, document, TEXT_INPUTS, TEXT_OUTPUTS)
        policy = document.get("model_transaction_policy") or {}
        if "decoupled" not in policy:
            config.set_model_transaction_policy({"decoupled": True})
    return config


def _kind(document: dict[str, Any]) -> str:
    return str(document.get("parameters", {}).get("kind", {}).get("string_value", "text"))


def _add(config: Any, document: dict[str, Any], inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
    present = {entry["name"] for entry in (*document.get("input", ()), *document.get("output", ()))}
    for tensor in inputs:
        # Sizes and types of a drafter's tensors depend on it: a configuration that has them is left alone.
        if tensor.name not in present:
            entry = {"name": tensor.name, "data_type": tensor.dtype, "dims": list(tensor.dims)}
            config.add_input(entry | {"optional": tensor.optional})
    for tensor in outputs:
        if tensor.name not in present:
            config.add_output({"name": tensor.name, "data_type": tensor.dtype, "dims": list(tensor.dims)})


def _sequence_batching() -> dict[str, Any]:
    controls = []
    for name, kind, dtype in SEQUENCE_CONTROLS:
        control: dict[str, Any] = {"kind": kind}
        control |= {"bool_false_true": [False, True]} if dtype == "TYPE_BOOL" else {"data_type": dtype}
        controls.append({"name": name, "control": [control]})
    return {"oldest": {}, "control_input": controls}
