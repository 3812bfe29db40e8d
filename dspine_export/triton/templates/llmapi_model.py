"""Registers the bundle's drafter with TensorRT-LLM, then becomes NVIDIA's llmapi model, which is not part of this repository.

LLMAPI_MODEL names the folder with that model's own model.py and helpers.py: `triton_backend/all_models/llmapi/tensorrt_llm/1` of
TensorRT-LLM's sources.
"""

import importlib.util
import os
import sys
from pathlib import Path

DEFAULT = "/app/all_models/llmapi/tensorrt_llm/1"

BUNDLE = "bundle"  # from the repository's directory

folder = Path(os.environ.get("LLMAPI_MODEL", DEFAULT))
if not (folder / "model.py").is_file():
    raise FileNotFoundError(
        f"no model.py in {folder}: set LLMAPI_MODEL to TensorRT-LLM's all_models/llmapi/tensorrt_llm/1"
    )

sys.path[:0] = [
    str(Path(__file__).resolve().parents[3] / BUNDLE / "trtllm"),
    str(folder),
]  # the registration; their helpers.py
import dspine_trtllm  # noqa: E402, F401

spec = importlib.util.spec_from_file_location("llmapi_model", folder / "model.py")
assert spec is not None and spec.loader is not None
module = importlib.util.module_from_spec(spec)
sys.modules["llmapi_model"] = module
spec.loader.exec_module(module)
TritonPythonModel = module.TritonPythonModel
