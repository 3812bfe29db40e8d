"""STUB of tensorrt_llm, hand-written for the contract tests of dspine_export.trtllm. It is not TensorRT-LLM and contains none of its code.

Exactly the hooks that the adapter relies on, with the signatures of `dspine_export.trtllm.snapshots`, and the smallest worker that calls
them in the order the real one does. Runs on the CPU.
"""

import os

STUB = True
__version__ = os.environ.get("STUB_TRTLLM_VERSION", "1.3.0rc29")
