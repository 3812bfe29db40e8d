"""The drafter directory inside a bundle that vLLM loads as it is: ``OUT/vllm``, a ``config.json`` and one safetensors file.

The transfer codes are resolved and folded here, so that no server has to: the file holds `weight_names.TOKEN_TABLE` in their place.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from dspine_export.checkpoint.expected_tensors import expected_shapes
from dspine_export.checkpoint.load import Checkpoint
from dspine_export.checkpoint.target import TargetInfo
from dspine_export.lowering.weights import write_weights
from dspine_export.passes.fold_tables import TOKEN_TABLE as FOLDED
from dspine_export.vllm.drafter_lookup import SERVING_FOLDER
from dspine_export.vllm.serving_config import drafter_document
from dspine_export.vllm.weight_names import TOKEN_TABLE

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def write_files(bundle: Path, checkpoint: Checkpoint, target: TargetInfo, dtype: str, verifier: str) -> Path:
    """Write ``bundle/vllm`` from a DSpine checkpoint; returns it.

    Args:
        dtype: of the weights, ``bfloat16`` or ``float32``.
        verifier: the target as ``vllm serve OUT`` shall load it: a directory or a Hugging Face name.

    Raises:
        CheckpointError: the transfer codes are absent and may not be recomputed. OSError: the directory cannot be written.
    """
    folder = bundle / SERVING_FOLDER
    folder.mkdir()
    names = [*expected_shapes(checkpoint.config), FOLDED]
    write_weights(checkpoint, target, names, folder / WEIGHTS_FILE, _DTYPES[dtype], stored_names={FOLDED: TOKEN_TABLE})
    document = drafter_document(
        checkpoint.config, dtype, {"name_or_path": verifier, "architectures": [target.architecture]}
    )
    (folder / CONFIG_FILE).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return folder
