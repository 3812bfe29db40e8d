"""Builds the two plans of a drafter and files them under ``engines/<builder>-<version>-<sm>/``."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dspine_export.errors import BuildError, DependencyError, OutputError
from dspine_export.lowering.engine import backend as backends
from dspine_export.lowering.engine.backend import Backend, open_backend
from dspine_export.lowering.engine.callbacks import PlanSink
from dspine_export.lowering.engine.full_precision import tf32_warning
from dspine_export.lowering.engine.graph import ENTRIES, EngineGraph, load_graph
from dspine_export.lowering.engine.inspect import (
    NetworkSummary,
    plugins_in_plan,
    summarise_engine,
    summarise_network,
)
from dspine_export.lowering.engine.memory import check_disk, check_memory, peak_rss_bytes, reset_peak_rss
from dspine_export.lowering.engine.plugin_library import load_plugin_library
from dspine_export.lowering.engine.profile import ProfileSpec
from dspine_export.lowering.engine.report import EngineReport, PlanReport
from dspine_export.lowering.engine.target import Target, resolve_target
from dspine_export.lowering.engine.weights import MappedWeights

Progress = Callable[[str], None]
RTX_HEAD_SIZES = range(9, 257)
"""What TensorRT-RTX 1.7.1 fuses, found by trying; attention in float32 is decomposed and takes any size."""


def build_engines(
    onnx_dir: Path,
    out_dir: Path,
    *,
    profile: ProfileSpec,
    plugin_library: Path | None,
    builder: str = "auto",
    compute_capability: str | None = None,
    timing_cache: Path | None = None,
    carry_plugins: bool = False,
    progress: Progress | None = None,
) -> EngineReport:
    """Build ``context.onnx`` and ``draft.onnx`` of ``onnx_dir`` into plans below ``out_dir/engines``.

    Everything that can be wrong beforehand (profile, weights, plugins, target, memory, disk) is checked before the first build starts.
    The engine folder appears complete or not at all; an older one of the same name is replaced.

    Args:
        onnx_dir: folder of the two graphs; their external weights may lie anywhere.
        out_dir: the bundle (existing, or created).
        profile: dynamic sizes.
        plugin_library: ``libdspine_trt_plugins.so``; None only for graphs without our operators.
        builder: ``auto``, ``tensorrt`` or ``tensorrt-rtx``.
        compute_capability: such as ``8.9`` or ``8.6,8.9``; None for the builder's default.
        timing_cache: file to read and update (TensorRT; TensorRT-RTX times nothing at build).
        carry_plugins: put the plugin library into the plans that use it; loading them then needs ``engine_host_code_allowed``.
        progress: receives one-line messages.

    Raises:
        UsageError: profile, builder name or compute capability.
        DependencyError: no builder, unsupported GPU, plugin library, not enough memory.
        BuildError: damaged graph or weights, parser or builder failure.
        OutputError: not enough disk space, or the folder cannot be written.
    """
    report = progress or (lambda _message: None)
    profile.check()
    backend = open_backend(builder)
    target = resolve_target(backend.name, backend.version, backend.module, compute_capability)
    graphs = [load_graph(onnx_dir / f"{entry}.onnx", profile) for entry in ENTRIES]
    for graph in graphs:
        _check_head_size(backend, graph)
    _load_plugins(backend, graphs, plugin_library)
    check_memory(max(graph.weight_bytes for graph in graphs), what=f"the engine with {backend}")

    folder = out_dir / "engines" / f"{backend.name}-{backend.version}-{target.label}"
    with _staged(folder, sum(graph.weight_bytes for graph in graphs)) as partial:
        carried = plugin_library if carry_plugins else None
        plans = tuple(build_one(backend, graph, partial, target, timing_cache, report, carried) for graph in graphs)
        result = EngineReport(
            folder=folder,
            builder=backend.name,
            version=backend.version,
            sm=target.label,
            compute_capabilities=target.capabilities,
            profile=profile.to_json(),
            plans=plans,
            warnings=(*target.warnings, *filter(None, [tf32_warning()])),
        )
        result.write(partial)
    return result


def build_one(
    backend: Backend,
    graph: EngineGraph,
    folder: Path,
    target: Target,
    timing_cache: Path | None,
    progress: Progress,
    carried_plugins: Path | None = None,
) -> PlanReport:
    """Build one plan into ``folder``. Raises BuildError; see `build_engines`."""
    backend.log.clear()
    reset_peak_rss()
    started, path = time.monotonic(), folder / f"{graph.entry}.plan"
    progress(f"{graph.entry}: parsing {graph.path.name}")
    with MappedWeights(graph.weights) as weights, path.open("wb", buffering=0) as file:
        builder = backends.create_builder(backend)
        network = backends.create_network(backend, builder)
        parser = backends.parse(backend, network, graph, weights)
        summary = summarise_network(network)
        _check_plugin_count(graph, summary.plugin_layers, "the parsed network")
        config = backends.create_config(backend, builder, network, graph, target)
        if carried_plugins is not None and graph.plugin_nodes:
            config.plugins_to_serialize = [str(carried_plugins.resolve())]
        uses_timing = timing_cache is not None and backend.name == "tensorrt"
        if uses_timing and timing_cache is not None:
            backends.attach_timing_cache(backend, config, timing_cache)
        progress(f"{graph.entry}: building with {backend}")
        sink = PlanSink(file)
        backends.build_plan(backend, builder, network, config, sink, lambda phase: progress(f"{graph.entry}: {phase}"))
        if uses_timing and timing_cache is not None:
            backends.save_timing_cache(config, timing_cache)
        del config, network, parser, builder
    seconds, peak = time.monotonic() - started, peak_rss_bytes()
    return _report(backend, graph, path, sink, summary, seconds, peak)


def _report(
    backend: Backend, graph: EngineGraph, path: Path, sink: PlanSink, network: NetworkSummary, seconds: float, peak: int
) -> PlanReport:
    engine, in_plan = summarise_engine(backend.log.engine_listing), plugins_in_plan(path)
    if engine.layer_types:
        _check_plugin_count(graph, engine.plugin_layers, "the built engine")
    if in_plan:  # only TensorRT-RTX keeps these records
        _check_plugin_count(graph, in_plan, "the plan file")
    return PlanReport(
        entry=graph.entry,
        path=path.name,
        size_bytes=sink.size_bytes,
        sha256=sink.sha256,
        onnx_sha256=hashlib.sha256(graph.path.read_bytes()).hexdigest(),
        weight_bytes=graph.weight_bytes,
        seconds=round(seconds, 3),
        peak_rss_bytes=peak,
        network=network,
        engine=engine,
        plan_plugins=in_plan,
        profiles=graph.profiles,
        warnings=tuple(dict.fromkeys(backend.log.warnings)),
    )


def _check_head_size(backend: Backend, graph: EngineGraph) -> None:
    """Said before the build, whose own refusal is an internal error on standard error."""
    if backend.name != "tensorrt-rtx" or graph.head_size is None or not graph.fused_attention:
        return
    if graph.head_size not in RTX_HEAD_SIZES:
        raise BuildError(
            f"{backend} has no attention kernel for this head size in half precision",
            where=graph.path,
            got=f"head_dim {graph.head_size}",
            expected=f"{RTX_HEAD_SIZES[0]} to {RTX_HEAD_SIZES[-1]}, or any size in float32",
            fix="build with --dtype float32, or stop before the engine with --stop-after onnx",
        )


def _load_plugins(backend: Backend, graphs: list[EngineGraph], library: Path | None) -> None:
    needed = sorted({operator for graph in graphs for operator, _ in graph.plugin_nodes})
    if not needed:
        return
    if library is None:
        raise DependencyError(
            "the graphs use DSpine operators and no plugin library was given",
            got=", ".join(needed),
            expected="libdspine_trt_plugins.so",
            fix="pass --plugin-library, or build it: python -m dspine_plugins DIRECTORY",
        )
    load_plugin_library(backend.module, library, tensorrt_major=backend.tensorrt_major)


def _check_plugin_count(graph: EngineGraph, found: tuple[str, ...], place: str) -> None:
    if len(found) != len(graph.plugin_nodes):
        raise BuildError(
            f"{place} does not hold one plugin layer for each DSpine operator",
            where=graph.path,
            got=f"{len(found)}: {', '.join(found) or 'none'}",
            expected=f"{len(graph.plugin_nodes)}: {', '.join(name or operator for operator, name in graph.plugin_nodes)}",
        )


@contextmanager
def _staged(folder: Path, plan_bytes: int) -> Iterator[Path]:
    """A sibling folder that becomes ``folder`` on success and vanishes on any failure; leftovers of a killed build are removed."""
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        check_disk(plan_bytes, partial)
        yield partial
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    except OSError as error:
        raise OutputError(
            f"cannot write the engine: {error.strerror or error}", where=error.filename or folder
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
