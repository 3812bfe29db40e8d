"""``config.pbtxt`` of every model, made as protobuf messages and printed by protobuf: no text is pasted together.

The messages are Triton's own; their generated module comes with ``tritonclient[grpc]``, the extra ``triton``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dspine_export.bundle import DrafterSummary, EntryContract, TensorSpec
from dspine_export.errors import DependencyError
from dspine_export.triton.contract import (
    BACKEND,
    DRAFTER_PARAMETERS,
    SEQUENCE_CONTROLS,
    TEXT_INPUTS,
    TEXT_OUTPUTS,
    TEXT_PARAMETERS,
    Parameter,
    Tensor,
    drafter_inputs,
    drafter_outputs,
)
from dspine_export.triton.options import Locations, RepositoryOptions

_PLAN_TYPES = {"float32": "TYPE_FP32", "bfloat16": "TYPE_BF16", "int64": "TYPE_INT64", "int32": "TYPE_INT32"}
_US = 1_000_000


def messages() -> Any:
    """The module ``model_config_pb2``.

    Raises:
        DependencyError: ``tritonclient[grpc]`` is not installed or does not fit the installed protobuf.
    """
    try:
        from tritonclient.grpc import model_config_pb2
    except Exception as error:  # protobuf raises a VersionError of its own
        raise DependencyError(
            "Triton's configuration messages cannot be imported",
            where="tritonclient.grpc.model_config_pb2",
            got=f"{type(error).__name__}: {error}",
            expected="tritonclient[grpc]",
            fix="pip install 'dspine-export[triton]'",
        ) from error
    return model_config_pb2


def render(config: Any) -> str:
    """The message as text; parsing it gives the message back."""
    from google.protobuf import text_format

    return str(text_format.MessageToString(config, as_utf8=True))


def parse(text: str) -> Any:
    """A ``config.pbtxt`` as a message; raises protobuf's ``ParseError``."""
    from google.protobuf import text_format

    return text_format.Parse(text, messages().ModelConfig())


def text_config(options: RepositoryOptions, locations: Locations) -> Any:
    """The model `dspine`: text in, text out."""
    config = _model(options.name, backend=BACKEND, inputs=TEXT_INPUTS, outputs=TEXT_OUTPUTS)
    config.model_transaction_policy.decoupled = options.decoupled
    _instances(config, options.instances, options.device)
    _parameters(config, TEXT_PARAMETERS, _own_values("text", options, locations))
    return config


def drafter_config(options: RepositoryOptions, locations: Locations, drafter: DrafterSummary) -> Any:
    """The model `dspine_drafter`: sequences of committed states in, drafted blocks out."""
    width = len(drafter.target_layer_ids) * drafter.hidden_size
    outputs = drafter_outputs(drafter.block_size, drafter.top_k or 1)
    config = _model(options.drafter_name, backend=BACKEND, inputs=drafter_inputs(width), outputs=outputs)
    batching = config.sequence_batching
    idle = options.parameters.get("idle_seconds") or _default(DRAFTER_PARAMETERS, "idle_seconds")
    batching.max_sequence_idle_microseconds = int(float(idle) * _US)
    batching.oldest.max_candidate_sequences = options.max_slots
    for name, kind, dtype in SEQUENCE_CONTROLS:
        control = batching.control_input.add(name=name).control.add(kind=kind)
        if dtype == "TYPE_BOOL":
            control.bool_false_true.extend([False, True])
        else:
            control.data_type = dtype
    _instances(config, 1, options.device)
    _parameters(config, DRAFTER_PARAMETERS, _own_values("drafter", options, locations))
    return config


def vllm_config(name: str) -> Any:
    """A model of Triton's vLLM backend, which completes inputs and outputs itself."""
    inputs = (
        Tensor("text_input", "TYPE_STRING", (1,)),
        Tensor("stream", "TYPE_BOOL", (1,), optional=True),
        Tensor("sampling_parameters", "TYPE_STRING", (1,), optional=True),
    )
    config = _model(name, backend="vllm", inputs=inputs, outputs=(Tensor("text_output", "TYPE_STRING", (-1,)),))
    config.model_transaction_policy.decoupled = True
    config.instance_group.add(count=1, kind="KIND_MODEL")  # vLLM places itself
    return config


def plan_config(name: str, contract: EntryContract) -> Any:
    """A plan under Triton's own TensorRT backend. The batch is a dimension like any other: embeddings and head have none."""
    config = _model(
        name, platform="tensorrt_plan", inputs=_plan_tensors(contract.inputs), outputs=_plan_tensors(contract.outputs)
    )
    config.default_model_filename = "model.plan"
    config.instance_group.add(count=1, kind="KIND_GPU")
    return config


def _plan_tensors(specs: Iterable[TensorSpec]) -> list[Tensor]:
    return [
        Tensor(spec.name, _PLAN_TYPES[spec.dtype], tuple(size if isinstance(size, int) else -1 for size in spec.shape))
        for spec in specs
    ]


def python_config(name: str, inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> Any:
    """A model of the plain Python backend that sets batching and streaming itself."""
    config = _model(name, backend="python", inputs=inputs, outputs=outputs)
    config.instance_group.add(count=1, kind="KIND_CPU")
    return config


def _model(name: str, *, inputs: Iterable[Tensor], outputs: Iterable[Tensor], **kind: str) -> Any:
    config = messages().ModelConfig(name=name, max_batch_size=0, **kind)
    for tensor in inputs:
        config.input.add(name=tensor.name, data_type=tensor.dtype, dims=tensor.dims, optional=tensor.optional)
    for tensor in outputs:
        config.output.add(name=tensor.name, data_type=tensor.dtype, dims=tensor.dims)
    return config


def _instances(config: Any, count: int, device: str) -> None:
    # KIND_MODEL: the process chooses its device itself; KIND_GPU would start one on every GPU of the machine.
    config.instance_group.add(count=count, kind="KIND_CPU" if device == "cpu" else "KIND_MODEL")


def _own_values(kind: str, options: RepositoryOptions, locations: Locations) -> dict[str, str]:
    return {
        **options.parameters,
        "kind": kind,
        "bundle": locations.from_models(locations.bundle),
        "target_model": locations.from_models(locations.target),
        "device": options.device,
        "max_slots": str(options.max_slots),
        "max_seq_len": str(options.max_seq_len),
    }


def _parameters(config: Any, known: tuple[Parameter, ...], values: Mapping[str, str]) -> None:
    """All of them, defaults included: the file shows an operator what can be changed."""
    for parameter in known:
        value = values.get(parameter.name, parameter.default)
        assert value is not None, parameter.name
        config.parameters[parameter.name].string_value = value


def _default(known: tuple[Parameter, ...], name: str) -> str:
    return next(parameter.default or "" for parameter in known if parameter.name == name)
