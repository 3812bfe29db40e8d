"""``triton-repo``: a bundle and its target in, a Triton model repository out; and the stage of ``build --triton``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from dspine_plugins.build import AUTOREG_NAME

from dspine_export.bundle import (
    Bundle,
    DrafterSummary,
    EngineEntry,
    EntryContract,
    FileEntry,
    inventory,
    open_bundle,
    staged_bundle,
)
from dspine_export.bundle.manifest import MANIFEST_NAME
from dspine_export.errors import UsageError
from dspine_export.pipeline.pair import OpenPair, open_pair
from dspine_export.pipeline.progress import Progress
from dspine_export.recipes import Recipe
from dspine_export.triton.files import (
    BUNDLE_FOLDER,
    TARGET_FOLDER,
    place_bundle,
    place_target,
    relative_to_repository,
)
from dspine_export.triton.model_config import messages
from dspine_export.triton.options import Locations, RepositoryOptions, check_options
from dspine_export.triton.repository import Sources, write_repository
from dspine_export.trtllm.files import FOLDER as TRTLLM_FOLDER
from dspine_export.trtllm.files import ServingOptions, triton_config
from dspine_export.trtllm.settings import PACKAGE_NAME
from dspine_export.version import __version__
from dspine_export.vllm.drafter_lookup import SERVING_FOLDER
from dspine_export.vllm.files import write_files

FORMAT = "dspine-triton-repository"
FOLDER = "triton"  # of a bundle
_PLAN_BUILDER = "tensorrt"


@dataclass(frozen=True)
class Contents:
    """What a bundle holds, of its manifest; a bundle that is being built has none yet."""

    drafter: DrafterSummary
    entries: Mapping[str, EntryContract]
    engines: Sequence[EngineEntry]
    recipe: Recipe


@dataclass(frozen=True)
class Repository:
    """A finished repository: its directory and the names of its models."""

    path: Path
    models: tuple[str, ...]
    served: tuple[str, ...]
    files: int


def make_repository(
    bundle_path: Path, target: Path, output: Path, options: RepositoryOptions, progress: Progress, *, force: bool
) -> Repository:
    """Write a repository and publish it in one rename.

    Raises:
        DspineError: bad options, a damaged bundle, a target that does not fit it, or an output that is in the way; nothing is left behind.
    """
    check_options(options)
    messages()  # known before the work starts
    with progress.stage("bundle", str(bundle_path)):
        bundle = open_bundle(bundle_path, check_hashes=True)
    pair = open_pair(bundle.path / "drafter", target, Recipe(), progress, finite=False)
    manifest = bundle.manifest
    contents = Contents(manifest.drafter, manifest.entries, manifest.engines, manifest.recipe)
    locations = _locations(bundle.path, bundle.path, contents, target, output, options)
    if "llmapi" in options.flavors:
        _check_llmapi(bundle)
    if "vllm" in options.flavors:
        built = any(entry.path.startswith(f"{SERVING_FOLDER}/") for entry in manifest.files)
        locations = replace(locations, vllm=f"{locations.bundle}/{SERVING_FOLDER}" if built else SERVING_FOLDER)
        _check_vllm(pair)
    with staged_bundle(output, force=force, form=FORMAT) as staging:
        with progress.stage("models", ", ".join(options.model_names)):
            write_repository(staging, options, locations, _sources(contents, options, locations))
        if locations.vllm == SERVING_FOLDER:
            with progress.stage("vllm", "drafter directory for vLLM"):
                write_files(staging, pair.checkpoint, pair.target, manifest.recipe.build.dtype, locations.target)
        if options.files != "reference":
            with progress.stage("files", f"bundle and target, by {options.files}"):
                place_bundle(bundle, staging, options.files)
                place_target(target, staging, options.files)
        count = _write_manifest(staging, bundle, options)
    return Repository(output.absolute(), options.model_names, options.served_names, count)


def _check_llmapi(bundle: Bundle) -> None:
    if not any(entry.path.startswith(f"{TRTLLM_FOLDER}/{PACKAGE_NAME}/") for entry in bundle.manifest.files):
        raise UsageError(
            "the llmapi flavour needs the bundle's TensorRT-LLM module",
            where="--flavor llmapi",
            got=f"a bundle of --target {bundle.manifest.recipe.build.target}",
            fix="build the bundle with --target trtllm",
        )


def _check_vllm(pair: OpenPair) -> None:
    if pair.checkpoint.config.transfer is None:
        raise UsageError(
            "the vllm flavour serves DSpine drafters",
            where="--flavor vllm",
            got=pair.checkpoint.config.architecture,
            fix="choose another flavour; vLLM serves a DFlash checkpoint by its own method dflash",
        )


def built_in_options(recipe: Recipe) -> RepositoryOptions:
    """What ``build --triton`` makes: our own backend, within the engine profile's limits, everything left where it is."""
    profile = recipe.profile
    return RepositoryOptions(max_slots=profile.batch.max, max_seq_len=max(16, profile.context.max), files="reference")


def write_into_bundle(staging: Path, output: Path, contents: Contents, target: Path) -> None:
    """Write ``staging/triton`` for the bundle that will be ``output``; it names bundle and target by relative paths.

    Raises:
        DependencyError: the extra `triton` is not installed.
    """
    options = built_in_options(contents.recipe)
    check_options(options)
    locations = _locations(output, staging, contents, target, output / FOLDER, options)
    write_repository(staging / FOLDER, options, locations, _sources(contents, options, locations))


def _locations(
    bundle: Path, present: Path, contents: Contents, target: Path, output: Path, options: RepositoryOptions
) -> Locations:
    """`present` is where the bundle's files are now."""
    if options.files != "reference":
        locations = Locations(BUNDLE_FOLDER, TARGET_FOLDER)
    else:
        locations = Locations(relative_to_repository(bundle, output), relative_to_repository(target, output))
    if "plan" not in options.flavors:
        return locations
    engine = _served_engine(contents.engines, bundle)
    plans = {entry: present / path for entry, path in engine.plans.items()}
    return replace(locations, plans=plans, plugins=_loadable(engine, present))


def _loadable(engine: EngineEntry, present: Path) -> str | None:
    """Triton's TensorRT backend does no more than dlopen a plugin library: that takes the shim, which loads the library beside it."""
    if engine.plugin_library is None:
        return None
    shim = PurePosixPath(engine.plugin_library).with_name(AUTOREG_NAME).as_posix()
    return shim if (present / shim).is_file() else engine.plugin_library


def _served_engine(engines: Sequence[EngineEntry], bundle: Path) -> EngineEntry:
    for engine in reversed(engines):
        if engine.builder == _PLAN_BUILDER:
            return engine
    built = ", ".join(f"{engine.builder} {engine.builder_version}" for engine in engines)
    raise UsageError(
        "Triton's TensorRT backend runs plans of TensorRT, and the bundle has none",
        where="--flavor plan",
        got=f"plans of {built}" if built else "no plans",
        expected="a plan built by the TensorRT version of the server's container",
        fix=f"run `dspine-export build --resume {bundle}` where TensorRT is installed, or choose another flavour",
    )


def _sources(contents: Contents, options: RepositoryOptions, locations: Locations) -> Sources:
    drafter, chosen = contents.drafter, contents.recipe.trtllm
    llmapi = ServingOptions(
        output=Path(locations.bundle),
        target_model=locations.target,
        block_size=drafter.block_size,
        mask_token_id=drafter.mask_token_id,
        target_layer_ids=drafter.target_layer_ids,
        max_batch_size=options.max_slots,
        max_seq_len=options.max_seq_len,
        executor=chosen.executor,
        attention_backend=chosen.attention_backend,
        allow_unchecked=chosen.allow_unchecked,
    )
    document: dict[str, Any] = triton_config(llmapi) if "llmapi" in options.flavors else {}
    return Sources(drafter, contents.entries, document)


def _write_manifest(staging: Path, bundle: Bundle, options: RepositoryOptions) -> int:
    """Every file with its hash, those of the bundle taken from its own manifest; returns their number."""
    known = [entry.model_copy(update={"path": f"{BUNDLE_FOLDER}/{entry.path}"}) for entry in bundle.manifest.files]
    weights = [
        FileEntry(path=f"{TARGET_FOLDER}/{path.name}", sha256="0" * 64, size_bytes=path.stat().st_size)
        for path in (staging / TARGET_FOLDER).glob("*.safetensors")
    ]
    entries = inventory(staging, [*known, *weights])
    unhashed = {entry.path for entry in weights}
    document = {
        "format": FORMAT,
        "schema_version": 1,
        "dspine_export": __version__,
        "options": asdict(options),
        "files": [
            entry.model_dump(exclude={"sha256"} if entry.path in unhashed else None)  # gigabytes, and not ours
            for entry in entries
        ],
    }
    (staging / MANIFEST_NAME).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return len(entries)
