"""``--legacy-layout``: the plan filed as TensorRT-LLM 1.2 and earlier filed engines, ``config.json`` and ``rank0.engine``.

The layout only: those runtimes drive networks that ``trtllm-build`` made, and the drafter's plan keeps its own inputs and outputs (the
bundle's manifest lists them). TensorRT-LLM removed engines of this kind after 1.2.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from dspine_export.bundle import DrafterSummary, EngineEntry
from dspine_export.trtllm.files import FOLDER
from dspine_export.version import __version__

LEGACY_FOLDER = "legacy"
LABEL = "TensorRT-LLM <= 1.2 file layout"
ENGINE_NAME, CONTEXT_NAME, CONFIG_NAME = "rank0.engine", "rank0.context.engine", "config.json"


def write_legacy(staging: Path, engine: EngineEntry, drafter: DrafterSummary, dtype: str) -> None:
    """Write ``staging/trtllm/legacy``; the plans are hard links where the file system has them."""
    folder = staging / FOLDER / LEGACY_FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for entry, name in (("draft", ENGINE_NAME), ("context", CONTEXT_NAME)):
        _link(staging / engine.plans[entry], folder / name)
    document = legacy_config(engine, drafter, dtype)
    (folder / CONFIG_NAME).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def legacy_config(engine: EngineEntry, drafter: DrafterSummary, dtype: str) -> dict[str, Any]:
    """``config.json``: the keys of the old layout that have a meaning here, and what the plans really are."""
    profile = engine.profile
    return {
        "version": LABEL,
        "producer": f"dspine-export {__version__}",
        "note": "file layout only: a drafter's plan with the inputs and outputs of the bundle's manifest.json",
        "builder": {
            "name": engine.builder,
            "version": engine.builder_version,
            "compute_capabilities": list(engine.compute_capabilities),
        },
        "pretrained_config": {
            "architecture": drafter.architecture,
            "dtype": dtype,
            "hidden_size": drafter.hidden_size,
            "num_hidden_layers": drafter.num_layers,
            "vocab_size": drafter.vocab_size,
            "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
        },
        "build_config": {
            "max_batch_size": profile.batch.max,
            "max_seq_len": profile.context.max,
            "max_num_tokens": profile.tokens.max,
            "max_draft_len": drafter.block_size - 1,
            "strongly_typed": True,
        },
    }


def _link(source: Path, destination: Path) -> None:
    try:
        os.link(source, destination)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, destination)
