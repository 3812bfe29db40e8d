"""``manifest.json``: what a bundle holds, what it was made from, and what was checked.

Every path is relative to the bundle, uses forward slashes and stays inside it, so that a bundle can be moved or mounted anywhere.
Sizes are bytes, hashes are sha256 in lower-case hex. The file is untrusted when read: unknown keys are refused.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from dspine_export.recipes.schema import Profile, Recipe

FORMAT: Literal["dspine-bundle"] = "dspine-bundle"
SCHEMA_VERSION: Literal[1] = 1
MANIFEST_NAME = "manifest.json"


def _inside(path: str) -> str:
    pure = PurePosixPath(path)
    if not pure.parts or "\\" in path or "\0" in path or pure.is_absolute() or ".." in pure.parts or str(pure) != path:
        raise ValueError(f"must be a plain relative path inside the bundle, not {path!r}")
    return path


def _both_entries(plans: dict[str, str]) -> dict[str, str]:
    if set(plans) != {"context", "draft"}:
        raise ValueError(f"must hold the plans of both entries, context and draft, not {sorted(plans)}")
    return plans


RelativePath = Annotated[str, AfterValidator(_inside)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Bytes = Annotated[int, Field(ge=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileEntry(_Strict):
    """One file of the bundle."""

    path: RelativePath
    sha256: Sha256
    size_bytes: Bytes


class SourceFile(_Strict):
    """One file the bundle was made from; ``name`` is relative to the drafter's or the target's own directory."""

    role: Literal["drafter", "target"]
    name: RelativePath
    sha256: Sha256
    size_bytes: Bytes


class DrafterSummary(_Strict):
    """The drafter's identity, readable without torch."""

    architecture: str
    layout: str
    is_causal: bool
    hidden_size: int
    num_layers: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    transfer_rank: int | None = None
    message_size: int | None = None
    top_k: int | None = None


class TensorSpec(_Strict):
    """One graph input or output; ``shape`` mixes sizes and the names of dynamic dimensions."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


class EntryContract(_Strict):
    """Inputs and outputs of one entry point, in graph order."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


class EngineEntry(_Strict):
    """The plans of one builder, builder version and GPU architecture, under ``engines/<builder>-<version>-<sm>/``.

    ``carries_plugins``: the plans hold the plugin library themselves.
    """

    id: RelativePath
    builder: str
    builder_version: str
    sm: str
    plugin_library: RelativePath | None = None
    plugin_abi: Annotated[str, Field(pattern=r"^\d{1,9}\.\d{1,9}$")] | None = None
    carries_plugins: bool = False
    plans: Annotated[dict[str, RelativePath], AfterValidator(_both_entries)]
    compute_capabilities: tuple[str, ...]
    profile: Profile
    seconds: float | None = None


class VerificationResult(_Strict):
    """One comparison with the torch model.

    ``graphs``: cases compared per graph file. ``near_ties``: choices that differ where the reference itself is undecided.
    ``largest_error``: largest absolute difference per tensor.
    """

    executor: str
    dtype: str
    passed: bool
    graphs: dict[str, int]
    tokens: Annotated[int, Field(ge=0)]
    near_ties: Annotated[int, Field(ge=0)]
    largest_error: dict[str, float] = {}
    first_difference: str | None = None


class StageRecord(_Strict):
    """One finished build stage."""

    name: str
    seconds: Annotated[float, Field(ge=0)]


class Manifest(_Strict):
    """The whole of ``manifest.json``. ``recipe`` is the one the build used, options applied: targets, dtype, profile, verification."""

    format: Literal["dspine-bundle"] = FORMAT
    schema_version: Literal[1] = SCHEMA_VERSION
    recipe: Recipe
    drafter: DrafterSummary
    sources: tuple[SourceFile, ...]
    versions: dict[str, str]
    entries: dict[str, EntryContract] = {}
    stages: tuple[StageRecord, ...] = ()
    engines: tuple[EngineEntry, ...] = ()
    verification: tuple[VerificationResult, ...] = ()
    files: tuple[FileEntry, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        paths = [entry.path for entry in self.files]
        if len(set(paths)) != len(paths):
            raise ValueError("files lists a path twice")
        if MANIFEST_NAME in paths:
            raise ValueError("files must not list the manifest itself")
        listed = set(paths)
        for engine in self.engines:
            named = {*engine.plans.values(), *([engine.plugin_library] if engine.plugin_library else [])}
            if named - listed:
                raise ValueError(f"engine {engine.id} names files that are not listed: {sorted(named - listed)}")
        return self

    @property
    def stage_names(self) -> tuple[str, ...]:
        """Names of the finished stages in order."""
        return tuple(stage.name for stage in self.stages)

    def to_json(self) -> str:
        """The manifest as it is written: indented, keys in schema order, trailing newline."""
        return self.model_dump_json(indent=2, exclude_none=True) + "\n"
