"""Run in a process of its own: loads the plugins into TensorRT-RTX, parses and builds each model, prints one JSON line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import tensorrt_rtx as trt

BATCHES = (1, 2, 8)


def creators() -> list[list[Any]]:
    found = [item for item in trt.get_plugin_registry().all_creators if item.plugin_namespace == "dspine"]
    return [[c.name, c.plugin_namespace, c.plugin_version, [field.name for field in c.field_names]] for c in found]


def examine(path: Path, logger: Any) -> dict[str, Any]:
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(path.read_bytes()):
        return {"errors": [parser.get_error(i).desc() for i in range(parser.num_errors)]}
    layers = [str(network.get_layer(i).type).split(".")[-1] for i in range(network.num_layers)]
    outputs = [network.get_output(i) for i in range(network.num_outputs)]
    result = {
        "errors": [],
        "layers": layers,
        "outputs": [{"type": str(item.dtype).split(".")[-1], "shape": list(item.shape)} for item in outputs],
    }
    if "." in path.stem:
        plan = build(builder, network)
        result["plan_bytes"] = 0 if plan is None else plan.nbytes
        result["plan_names_the_plugin"] = plan is not None and path.stem.split(".")[0].encode() in bytes(plan)
    return result


def build(builder: Any, network: Any) -> Any:
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    profile = builder.create_optimization_profile()
    for i in range(network.num_inputs):
        tensor = network.get_input(i)
        shape = tuple(tensor.shape)
        if shape[0] == -1:
            profile.set_shape(tensor.name, *((batch, *shape[1:]) for batch in BATCHES))
    config.add_optimization_profile(profile)
    return builder.build_serialized_network(network, config)


def main() -> None:
    logger = trt.Logger(trt.Logger.ERROR)
    trt.get_plugin_registry().load_library(sys.argv[1])
    models = {path.stem: examine(path, logger) for path in sorted(Path(sys.argv[2]).glob("*.onnx"))}
    print(json.dumps({"creators": creators(), "models": models}))


main()
