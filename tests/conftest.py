"""float32 in every test means float32, also where a test module imports TensorRT-RTX before the product can rule TF32 out."""

from __future__ import annotations

import os

os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
