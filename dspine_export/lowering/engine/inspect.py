"""What is inside a network and a plan, found without a GPU.

An engine inspector needs a deserialised engine and so a GPU. Three other sources do not: the layers of the parsed network; the listing
of the built engine that the builder prints (layers after fusion, where a plugin is a ``custom_layer`` or ``PluginV3``); and the
records a TensorRT-RTX plan keeps of each plugin (``<node>_pluginType``). The last two show what the engine holds, not just the network.
"""

from __future__ import annotations

import json
import mmap
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspine_export.errors import DependencyError
from dspine_export.lowering.engine.backend import Backend
from dspine_export.lowering.engine.gpu import device_compute_capability

_RECORD = b'_pluginType" size='
_NAME = re.compile(rb'name="([^"]*)$')
_LONGEST_NAME = 512
_LISTED = re.compile(
    r"^Name: (?P<name>[^,]+), LayerType: (?P<kind>\w+)|^Layer\((?P<kind2>\w+)\): (?P<name2>[^,]+)", re.MULTILINE
)
_PLUGIN_KINDS = frozenset({"custom_layer", "PluginV3"})


@dataclass(frozen=True)
class TensorSummary:
    """A binding: name, element type as the builder prints it, and shape with -1 for dynamic dimensions."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class NetworkSummary:
    """Layers by type, plugin layers by name, and the bindings of a parsed network."""

    layer_types: dict[str, int]
    plugin_layers: tuple[str, ...]
    inputs: tuple[TensorSummary, ...]
    outputs: tuple[TensorSummary, ...]


@dataclass(frozen=True)
class EngineSummary:
    """The built engine after fusion: layers by type, and the names of its plugin layers (the builder appends suffixes to ours)."""

    layer_types: dict[str, int]
    plugin_layers: tuple[str, ...]


def summarise_engine(listing: str) -> EngineSummary:
    """Parse the builder's listing (`callbacks.BuildLog.engine_listing`); empty for a builder that prints none."""
    layers = [(m["name"] or m["name2"], m["kind"] or m["kind2"]) for m in _LISTED.finditer(listing)]
    types = Counter(kind for _, kind in layers)
    return EngineSummary(dict(sorted(types.items())), tuple(name for name, kind in layers if kind in _PLUGIN_KINDS))


def summarise_network(network: Any) -> NetworkSummary:
    """The parsed network before the builder fuses it."""
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    types = [layer.type.name for layer in layers]
    return NetworkSummary(
        dict(sorted(Counter(types).items())),
        tuple(layer.name for layer, kind in zip(layers, types, strict=True) if kind == "PLUGIN_V3"),
        tuple(_tensor(network.get_input(index)) for index in range(network.num_inputs)),
        tuple(_tensor(network.get_output(index)) for index in range(network.num_outputs)),
    )


def _tensor(tensor: Any) -> TensorSummary:
    return TensorSummary(tensor.name, tensor.dtype.name.lower(), tuple(tensor.shape))


def plugins_in_plan(path: Path) -> tuple[str, ...]:
    """Names of the plugin layers recorded in a TensorRT-RTX plan; empty for formats that keep no such record."""
    names = set()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as plan:
        at = plan.find(_RECORD)
        while at >= 0:
            match = _NAME.search(plan[max(0, at - _LONGEST_NAME) : at])
            if match is not None:
                names.add(match[1].decode("utf-8", "replace"))
            at = plan.find(_RECORD, at + 1)
    return tuple(sorted(names))


def inspect_plan(backend: Backend, path: Path) -> dict[str, Any]:
    """The engine inspector's report of a plan, as parsed JSON. Plugins must be loaded before. Never executed: needs a GPU.

    Raises:
        DependencyError: no GPU, or the plan does not fit this builder's version or this GPU.
    """
    if device_compute_capability() is None:
        raise DependencyError(
            "the engine inspector needs a GPU", where=path, fix="read build.json beside the plan instead"
        )
    runtime = backend.module.Runtime(backend.logger)
    engine = runtime.deserialize_cuda_engine(path.read_bytes())
    if engine is None:
        raise DependencyError(f"{backend} cannot load the plan", where=path, got=backend.log.excerpt())
    text = engine.create_engine_inspector().get_engine_information(backend.module.LayerInformationFormat.JSON)
    report: dict[str, Any] = json.loads(text)
    return report
