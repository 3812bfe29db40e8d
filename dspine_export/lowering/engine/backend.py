"""One face over TensorRT 10, TensorRT 11 and TensorRT-RTX: what differs between them is settled in this file.

Executed with TensorRT-RTX 1.7.1. The TensorRT branches (strongly typed flag of 10.x, timing cache) follow the published API and were
never executed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from dspine_export.errors import BuildError, DependencyError
from dspine_export.lowering.engine.callbacks import BuildLog, PlanSink, make_logger, make_monitor, make_stream_writer
from dspine_export.lowering.engine.discovery import BuilderName, select
from dspine_export.lowering.engine.graph import EngineGraph
from dspine_export.lowering.engine.target import Target, set_target
from dspine_export.lowering.engine.weights import MappedWeights

_open: dict[str, Backend] = {}

_RTX_INTERFACE_MAJOR = 11
_DISPLAY = {"tensorrt": "TensorRT", "tensorrt-rtx": "TensorRT-RTX"}


@dataclass(frozen=True)
class Backend:
    """A builder in use: its module, and the one logger that its library accepts per process."""

    name: BuilderName
    version: str
    module: ModuleType
    logger: Any
    log: BuildLog

    def __str__(self) -> str:
        return f"{_DISPLAY[self.name]} {self.version}"

    @property
    def tensorrt_major(self) -> int:
        """Major of the TensorRT interfaces it has: TensorRT-RTX 1.x carries those of TensorRT 11."""
        return _RTX_INTERFACE_MAJOR if self.name == "tensorrt-rtx" else int(self.version.split(".")[0])

    @property
    def always_strongly_typed(self) -> bool:
        """TensorRT 11 and RTX know no other mode; TensorRT 10 must be asked, or it re-chooses every precision."""
        return self.tensorrt_major >= 11


def open_backend(builder: str = "auto") -> Backend:
    """The backend for ``builder`` (``auto``, ``tensorrt`` or ``tensorrt-rtx``); the same object at every call.

    Its library is loaded with ``NVIDIA_TF32_OVERRIDE=0``, unless the user has set that variable (see `full_precision`).

    Raises:
        UsageError: an unknown name.
        DependencyError: it is missing or broken (see `discovery.select`).
    """
    found = select(builder)
    if found.name not in _open:
        assert found.module is not None and found.version is not None
        log = BuildLog()
        _open[found.name] = Backend(found.name, found.version, found.module, make_logger(found.module, log), log)
    return _open[found.name]


def create_builder(backend: Backend) -> Any:
    """A ``Builder``; DependencyError when the library cannot make one (for TensorRT: no usable driver)."""
    try:
        builder = backend.module.Builder(backend.logger)
    except Exception as error:  # pybind raises TypeError when the factory returned null
        raise DependencyError(f"{backend} cannot start: {error}", got=backend.log.excerpt()) from error
    if builder is None:
        raise DependencyError(f"{backend} cannot start", got=backend.log.excerpt())
    return builder


def create_network(backend: Backend, builder: Any) -> Any:
    """An empty, strongly typed network: precision is decided in the ONNX graph, by us."""
    if backend.always_strongly_typed:
        return builder.create_network(0)
    return builder.create_network(1 << int(backend.module.NetworkDefinitionCreationFlag.STRONGLY_TYPED))


def parse(backend: Backend, network: Any, graph: EngineGraph, weights: MappedWeights) -> Any:
    """Fill ``network`` from ``graph``; returns the parser, which must live as long as the network.

    Raises:
        BuildError: with the parser's own message, the node's name and operator.
    """
    parser = backend.module.OnnxParser(network, backend.logger)
    if graph.weights and hasattr(parser, "load_initializer"):
        loaded = parser.load_model_proto(graph.proto, str(graph.path))
        if loaded:
            weights.load_into(parser)
        parsed = loaded and parser.parse_model_proto()
    else:  # parsers before 10.13 read external data themselves, from the model's folder and below only
        parsed = parser.parse(graph.proto, str(graph.path))
    backend.log.interruption.reraise()
    if not parsed:
        raise _parse_error(backend, parser, graph)
    return parser


def _parse_error(backend: Backend, parser: Any, graph: EngineGraph) -> BuildError:
    what = f"{backend} could not parse {graph.path.name}"
    if parser.num_errors == 0:
        return BuildError(what, where=graph.path, got=backend.log.excerpt())
    error = parser.get_error(0)
    fix = None
    if "Plugin not found" in error.desc():
        fix = "pass the plugin library of this version of dspine-export (--plugin-library)"
    return BuildError(
        what,
        where=f"node {error.node()} '{error.node_name()}' ({error.node_operator()}) in {graph.path}",
        got=error.desc(),
        fix=fix,
    )


def create_config(backend: Backend, builder: Any, network: Any, graph: EngineGraph, target: Target) -> Any:
    """A configuration with the target and one optimisation profile, read back and compared.

    Raises:
        BuildError: network and ONNX graph disagree about the inputs, or the builder refuses the profile.
    """
    config = builder.create_builder_config()
    config.profiling_verbosity = backend.module.ProfilingVerbosity.DETAILED  # layer names survive into the plan
    # On by default; a float32 graph is the specification and means float32. TensorRT-RTX needs more than the flag: `full_precision`.
    config.clear_flag(backend.module.BuilderFlag.TF32)
    set_target(backend.module, config, target)
    names = {network.get_input(index).name for index in range(network.num_inputs)}
    profile = builder.create_optimization_profile()
    for shapes in graph.profiles:
        if shapes.name not in names:
            raise BuildError("the builder dropped a graph input", where=f"'{shapes.name}' in {graph.path}")
        profile.set_shape(shapes.name, shapes.min, shapes.opt, shapes.max)
        if tuple(map(tuple, profile.get_shape(shapes.name))) != (shapes.min, shapes.opt, shapes.max):
            raise BuildError(
                "the builder refused a profile", where=f"'{shapes.name}' in {graph.path}", got=backend.log.excerpt()
            )
    if config.add_optimization_profile(profile) < 0:
        raise BuildError("the builder refused the profile", where=graph.path, got=backend.log.excerpt())
    return config


def build_plan(
    backend: Backend, builder: Any, network: Any, config: Any, sink: PlanSink, progress: Callable[[str], None]
) -> None:
    """Build and write the plan into ``sink``, as a stream where the builder has one.

    Raises:
        BuildError: with the builder's errors. KeyboardInterrupt and errors of the file system pass through unchanged.
    """
    interruption = backend.log.interruption
    monitor = make_monitor(backend.module, interruption, progress)  # the configuration does not keep it alive
    config.progress_monitor = monitor
    if hasattr(builder, "build_serialized_network_to_stream"):
        writer = make_stream_writer(backend.module, interruption, sink)
        built = builder.build_serialized_network_to_stream(network, config, writer)
    else:
        plan = builder.build_serialized_network(network, config)
        built = plan is not None
        if built:
            sink.write(plan)
    interruption.reraise()
    if not built or sink.size_bytes == 0:
        raise BuildError(f"{backend} could not build the engine", got=backend.log.excerpt())


def attach_timing_cache(backend: Backend, config: Any, path: Path) -> None:
    """Give the builder the timing cache at ``path``, or an empty one that `save_timing_cache` will write there."""
    data = path.read_bytes() if path.is_file() else b""
    cache = config.create_timing_cache(data)
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        raise BuildError(
            f"{backend} refused the timing cache",
            where=path,
            got=backend.log.excerpt(),
            fix="delete it; it belongs to another version or GPU",
        )


def save_timing_cache(config: Any, path: Path) -> None:
    """Write back what the builder measured, atomically."""
    cache = config.get_timing_cache()
    if cache is not None:
        partial = path.with_name(path.name + ".partial")
        partial.write_bytes(bytes(cache.serialize()))
        partial.replace(path)
