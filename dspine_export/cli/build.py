"""``dspine-export build``: compile a drafter into a bundle, or add an engine to one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspine_export.cli.guard import command
from dspine_export.cli.options import AsJson, Assignments, PluginLibrary, TargetModel

if TYPE_CHECKING:
    from dspine_export.bundle import Bundle, VerificationResult
    from dspine_export.cli.console import Console
    from dspine_export.pipeline.request import BuildRequest
    from dspine_export.recipes import Recipe


def build(
    checkpoint: Annotated[
        Path | None, typer.Argument(metavar="CKPT", help="Drafter checkpoint directory.", show_default=False)
    ] = None,
    target_model: TargetModel = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="trtllm: graphs and an engine; onnx: graphs only; vllm: a drafter directory.", show_default="trtllm"
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="OUT", help="The bundle to create.", show_default=False)
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 or float32.", show_default="bfloat16")] = None,
    max_batch_size: Annotated[
        int | None, typer.Option(metavar="N", help="Sequences per call.", show_default="the recipe's")
    ] = None,
    max_seq_len: Annotated[
        int | None, typer.Option(metavar="N", help="Columns of the K/V cache.", show_default="the recipe's")
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="A shipped recipe or a YAML file.", show_default=False)] = None,
    assignments: Assignments = None,
    plugin_library: PluginLibrary = None,
    stop_after: Annotated[
        str | None, typer.Option(metavar="onnx", help="Leave the engine to a later --resume.", show_default=False)
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT",
            help="Build the engine of a finished bundle with this machine's TensorRT.",
            show_default=False,
        ),
    ] = None,
    verify: Annotated[
        bool | None, typer.Option("--verify/--no-verify", help="Compare with the torch model.", show_default="verify")
    ] = None,
    allow_unchecked: Annotated[
        bool,
        typer.Option("--allow-unchecked", help="Accept TensorRT-LLM versions whose signatures were not checked."),
    ] = False,
    legacy_layout: Annotated[
        bool, typer.Option("--legacy-layout", help="Also file the plan as TensorRT-LLM <= 1.2 did.")
    ] = False,
    triton: Annotated[
        bool, typer.Option("--triton", help="Also write OUT/triton, a model repository for tritonserver.")
    ] = False,
    register: Annotated[
        bool, typer.Option("--register", help="vllm: what --speculative-model dspine means for this target.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the plan, write nothing.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing bundle once the new one is complete.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compile CKPT for the target model into the bundle OUT: ONNX graphs, verification, engine."""
    with command(as_json=as_json) as console:
        switches = {
            "trtllm.allow_unchecked": allow_unchecked,
            "trtllm.legacy_layout": legacy_layout,
            "vllm.register_drafter": register,
        }
        assignments = [*(f"{key}=true" for key, wanted in switches.items() if wanted), *(assignments or [])]
        given = {"target": target, "dtype": dtype, "max_batch_size": max_batch_size, "max_seq_len": max_seq_len}
        if resume is not None:
            _refuse_with_resume(CKPT=checkpoint, target_model=target_model, output=output, recipe=recipe, dtype=dtype)
            _refuse_with_resume(target=None if target == "trtllm" else target)
            _refuse_with_resume(stop_after=stop_after, dry_run=dry_run or None, verify=verify, force=force or None)
            _refuse_with_resume(triton=triton or None)
            _resume(console, resume, plugin_library, assignments, given)
            return
        request = _request(
            checkpoint,
            target_model,
            output,
            _recipe(recipe, assignments, verify, given),
            plugin_library,
            stop_after,
            force,
            triton,
        )
        from dspine_export.pipeline.build import build as run_build
        from dspine_export.pipeline.build import plan

        if dry_run:
            described = plan(request, console)
            console.result(described, _plan_lines(described))
        else:
            started = time.monotonic()
            _report(console, run_build(request, console), time.monotonic() - started)


def _recipe(name: str | None, assignments: list[str] | None, verify: bool | None, given: dict[str, Any]) -> Recipe:
    from dspine_export.recipes import Recipe, apply_overrides, load_recipe

    recipe = load_recipe(name) if name is not None else Recipe()
    switch = [] if verify is None else [f"verification.enabled={str(verify).lower()}"]
    return apply_overrides(recipe, [*switch, *(assignments or [])], **given)


def _request(
    checkpoint: Path | None,
    target_model: Path | None,
    output: Path | None,
    recipe: Recipe,
    plugin_library: Path | None,
    stop_after: str | None,
    force: bool,
    triton: bool,
) -> BuildRequest:
    from dspine_export.errors import UsageError
    from dspine_export.pipeline.request import BuildRequest

    if checkpoint is None or target_model is None or output is None:
        missing = {"CKPT": checkpoint, "--target-model": target_model, "-o": output}
        names = ", ".join(name for name, value in missing.items() if value is None)
        raise UsageError(
            "build needs more arguments", got=f"no {names}", expected="build CKPT --target-model DIR -o OUT"
        )
    if stop_after not in (None, "onnx"):
        raise UsageError("no such stage to stop after", where="--stop-after", got=stop_after, expected="onnx")
    return BuildRequest(checkpoint, target_model, output, recipe, force, stop_after == "onnx", plugin_library, triton)


def _refuse_with_resume(**options: object) -> None:
    from dspine_export.errors import UsageError

    given = [name.replace("_", "-") for name, value in options.items() if value is not None]
    if given:
        raise UsageError(
            "--resume takes drafter, target and graphs from the bundle",
            got=", ".join(given),
            expected="build --resume OUT, with --target trtllm, --set, --max-batch-size, --max-seq-len or --plugin-library at most",
        )


def _resume(
    console: Console, output: Path, library: Path | None, assignments: list[str], given: dict[str, Any]
) -> None:
    from dspine_export.pipeline.build import open_resumable, resume
    from dspine_export.recipes import apply_overrides

    recipe = apply_overrides(open_resumable(output).manifest.recipe, assignments, **given)
    started = time.monotonic()
    _report(console, resume(output, recipe, library, console), time.monotonic() - started)


def _report(console: Console, bundle: Bundle, seconds: float) -> None:
    document = {"bundle": str(bundle.path), "manifest": bundle.manifest.model_dump(mode="json", exclude_none=True)}
    console.result(document, _bundle_lines(bundle, seconds))


def _bundle_lines(bundle: Bundle, seconds: float) -> Iterator[str]:
    manifest = bundle.manifest
    size = sum(entry.size_bytes for entry in manifest.files)
    yield f"{bundle.path}: {len(manifest.files)} files, {size / 1e6:,.1f} MB, {seconds:.1f} s"
    for result in manifest.verification:
        yield f"  {verification_line(result)}"
    for engine in manifest.engines:
        where = " or ".join(engine.compute_capabilities)
        yield f"  {engine.id}: {engine.builder} {engine.builder_version}, for compute capability {where}"
    if manifest.recipe.build.target == "vllm":
        target = manifest.recipe.vllm.target or "TARGET"
        options = json.dumps({"method": "dspine", "model": str(bundle.path / "vllm")})
        yield f"  serve it: vllm serve {target} --speculative-config '{options}'"
    if not manifest.engines and manifest.recipe.build.target == "trtllm":
        yield f"  no engine yet: run `dspine-export build --resume {bundle.path}` on the machine that has TensorRT"


def verification_line(result: VerificationResult) -> str:
    """One comparison in one line."""
    ties = f", {result.near_ties} of them near-ties" if result.near_ties else ""
    graphs = ", ".join(result.graphs)
    return f"verified in {result.executor}, {result.dtype}: {result.tokens} tokens equal{ties} ({graphs})"


def _plan_lines(described: dict[str, Any]) -> Iterator[str]:
    memory, recipe = described["memory_bytes"], described["recipe"]
    yield f"would build {described['output']} (nothing was written)"
    yield f"  drafter  {described['drafter']['architecture']}, codes {described['drafter']['codes']}"
    yield f"  target   {described['target']['architecture']} in {described['target']['path']}"
    yield f"  stages   {', '.join(described['stages'])}"
    yield f"  dtype    {recipe['build']['dtype']}"
    for name, sizes in recipe["profile"].items():
        yield f"  {name:<8} {sizes['min']} .. {sizes['opt']} .. {sizes['max']}"
    yield f"  disk     about {described['disk_bytes'] / 1e6:,.0f} MB"
    yield f"  memory   builder about {memory['builder_peak'] / 1e6:,.0f} MB; cache at full size {memory['cache'] / 1e6:,.0f} MB"
