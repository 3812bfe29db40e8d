"""A Triton model repository and everything around it, written into a directory that becomes the output in one rename.

OUT/README.md launch.sh client.py probe.py perf.sh docker-compose.yaml docker/ k8s/ grafana/
OUT/backends/dspine/model.py            the Python-based backend; the code is in the installed `dspine_export`
OUT/model_repository/NAME/              one folder per model, by flavour
OUT/bundle, OUT/target                  unless they are referenced where they are
OUT/vllm                                the drafter directory of the vllm flavour, unless the bundle has one
OUT/manifest.json                       what was generated; `--force` replaces nothing else
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import yaml

from dspine_export.bundle import DrafterSummary, EntryContract
from dspine_export.triton import deployment, llmapi, model_config
from dspine_export.triton.contract import BACKEND
from dspine_export.triton.dashboard import dashboard
from dspine_export.triton.options import (
    CONTEXT_PLAN,
    DRAFT_PLAN,
    LLMAPI_MODEL,
    VLLM_MODEL,
    Flavor,
    Locations,
    RepositoryOptions,
)
from dspine_export.version import __version__

MODELS_FOLDER = "model_repository"
_TEMPLATES = "templates"
_PURPOSE: dict[Flavor, tuple[str, ...]] = {
    "dspine": (
        "text in, text out: target and drafter in one process, continuous batching, streaming",
        "token level, for people with a target of their own: committed states in, drafted blocks out, one sequence per client; "
        "not loaded unless DSPINE_MODELS names it",
    ),
    "llmapi": ("NVIDIA's llmapi model with this drafter; needs TensorRT-LLM and LLMAPI_MODEL",),
    "vllm": ("Triton's vLLM backend with this drafter; needs vLLM and dspine_export beside it",),
    "plan": ("the context plan under Triton's TensorRT backend", "the draft plan under Triton's TensorRT backend"),
}
_NOTES: dict[Flavor, str] = {
    "llmapi": "* `tensorrt_llm`: model.py registers the drafter and then runs NVIDIA's own model from LLMAPI_MODEL "
    "(`triton_backend/all_models/llmapi/tensorrt_llm/1` of TensorRT-LLM's sources). Signature-checked, never run inside the real package.",
    "vllm": "* `vllm_dspine`: `1/model.json` goes to vLLM as it is; its paths start at this directory, the server's working directory.",
    "plan": "* `dspine_*_plan`: the embeddings and the head are inputs of the draft plan; pass them once, as CUDA shared memory.",
}


# The server loads these plans itself, so that nothing of ours can set it there. The default without a colon: empty is a value too.
_FULL_PRECISION = """# float32 products of the plans stay float32, whatever the library's default is; a value that is set here wins.
export NVIDIA_TF32_OVERRIDE=${NVIDIA_TF32_OVERRIDE-0}
"""


@dataclass(frozen=True)
class Sources:
    """What the repository serves.

    Attributes:
        drafter: the bundle's summary of it.
        entries: inputs and outputs of the bundle's graphs, for the plan flavour.
        llmapi_config: the document of TensorRT-LLM's model.yaml, for the llmapi flavour.
    """

    drafter: DrafterSummary
    entries: Mapping[str, EntryContract]
    llmapi_config: Mapping[str, Any]


def write_repository(staging: Path, options: RepositoryOptions, locations: Locations, sources: Sources) -> None:
    """Write everything but bundle, target and manifest into ``staging``.

    Raises:
        DependencyError: the extra `triton` is not installed.
    """
    writers: dict[Flavor, Callable[[Path, RepositoryOptions, Locations, Sources], None]] = {
        "dspine": _write_dspine,
        "llmapi": _write_llmapi,
        "vllm": _write_vllm,
        "plan": _write_plans,
    }
    for flavor in options.flavors:
        writers[flavor](staging / MODELS_FOLDER, options, locations, sources)
    _write(staging / "docker" / "Dockerfile", deployment.DOCKERFILE)
    _write(staging / "docker-compose.yaml", deployment.compose_file(options))
    _write(staging / "k8s" / "values.yaml", deployment.values_file(options))
    _write(staging / "k8s" / "deployment.yaml", deployment.deployment_file(options))
    _write(staging / "grafana" / "dashboard.json", json.dumps(dashboard(options), indent=2) + "\n")
    _write(staging / "README.md", _readme(options, locations, sources))
    _write(staging / "client.py", _verbatim("client.py").replace('default="dspine"', f'default="{options.name}"'))
    _write(
        staging / "probe.py", _verbatim("probe.py").replace('default="dspine"', f'default="{options.served_names[0]}"')
    )
    _write_scripts(staging, options, locations)


def _write_dspine(folder: Path, options: RepositoryOptions, locations: Locations, sources: Sources) -> None:
    text = model_config.text_config(options, locations)
    drafter = model_config.drafter_config(options, locations, sources.drafter)
    for config in (text, drafter):
        _write_model(folder, config)
        # The backend needs no file of a version; Triton needs its folder, which would not survive every kind of copy if it were empty.
        _write(folder / config.name / "1" / "README", "Version 1. The model's files are named in config.pbtxt.\n")
    _write(folder.parent / "backends" / BACKEND / "model.py", _verbatim_backend())


def _write_llmapi(folder: Path, options: RepositoryOptions, locations: Locations, sources: Sources) -> None:
    config = model_config.python_config(LLMAPI_MODEL, llmapi.INPUTS, llmapi.OUTPUTS)
    _write_model(folder, config)
    document = yaml.safe_dump(dict(sources.llmapi_config), sort_keys=False, default_flow_style=None)
    _write(folder / LLMAPI_MODEL / "1" / "model.yaml", document)
    program = _verbatim("llmapi_model.py").replace('BUNDLE = "bundle"', f"BUNDLE = {locations.bundle!r}")
    _write(folder / LLMAPI_MODEL / "1" / "model.py", program)


def _write_vllm(folder: Path, options: RepositoryOptions, locations: Locations, sources: Sources) -> None:
    _write_model(folder, model_config.vllm_config(VLLM_MODEL))
    document = vllm_arguments(options, locations, sources.drafter)
    _write(folder / VLLM_MODEL / "1" / "model.json", json.dumps(document, indent=2) + "\n")


def vllm_arguments(options: RepositoryOptions, locations: Locations, drafter: DrafterSummary) -> dict[str, Any]:
    """``model.json``: arguments of vLLM's ``AsyncEngineArgs``."""
    return {
        "model": locations.target,
        "speculative_config": {
            "method": "dspine",
            "model": locations.vllm,
            "num_speculative_tokens": drafter.block_size - 1,
        },
        "max_model_len": options.max_seq_len,
        "max_num_seqs": options.max_slots,
    }


def _write_plans(folder: Path, options: RepositoryOptions, locations: Locations, sources: Sources) -> None:
    for name, entry in ((CONTEXT_PLAN, "context"), (DRAFT_PLAN, "draft")):
        _write_model(folder, model_config.plan_config(name, sources.entries[entry]))
        plan = folder / name / "1" / "model.plan"
        plan.parent.mkdir(parents=True)
        try:
            plan.hardlink_to(locations.plans[entry])
        except OSError:
            plan.write_bytes(locations.plans[entry].read_bytes())


def _write_model(folder: Path, config: Any) -> None:
    _write(folder / config.name / "config.pbtxt", model_config.render(config))


def _write_scripts(staging: Path, options: RepositoryOptions, locations: Locations) -> None:
    extra = ""
    if "plan" in options.flavors:
        extra = _FULL_PRECISION
        if locations.plugins is not None:
            library = shlex.quote(f"{locations.bundle}/{locations.plugins}")
            extra += f'arguments+=(--backend-config=tensorrt,plugins="$(realpath {library})")\n'
    served = " ".join(options.served_names)
    values = {
        "served": served,
        "models": " ".join(options.model_names),
        "extra_arguments": extra,
        "model": options.name,
        "tokenizer": shlex.quote(locations.target),
    }
    for name in ("launch.sh", "perf.sh") if "dspine" in options.flavors else ("launch.sh",):
        _write(staging / name, Template(_verbatim(name)).substitute(values))
        (staging / name).chmod(0o755)


def _readme(options: RepositoryOptions, locations: Locations, sources: Sources) -> str:
    rows, names = [], iter(options.model_names)
    for flavor in options.flavors:
        rows += [f"| `{next(names)}` | {flavor} | {purpose} |" for purpose in _PURPOSE[flavor]]
    inside = not locations.bundle.startswith("..")
    notes = [_NOTES[flavor] for flavor in options.flavors if flavor in _NOTES]
    return Template(_verbatim("README.md")).substitute(
        version=__version__,
        architecture=sources.drafter.architecture,
        block_size=sources.drafter.block_size,
        with_bundle=""
        if inside
        else f" together with the bundle (`{locations.bundle}`) and the target (`{locations.target}`)",
        model_rows="\n".join(rows),
        notes="\n".join(notes) + ("\n" if notes else ""),
        name=options.served_names[0],
    )


def _verbatim(name: str) -> str:
    return files("dspine_export.triton").joinpath(_TEMPLATES, name).read_text(encoding="utf-8")


def _verbatim_backend() -> str:
    return files("dspine_export.triton").joinpath("backend", "model.py").read_text(encoding="utf-8")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
