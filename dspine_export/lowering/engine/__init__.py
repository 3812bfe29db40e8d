"""ONNX to TensorRT plans: one builder interface over TensorRT 10, TensorRT 11 and TensorRT-RTX.

``discovery`` finds the builder, ``profile`` and ``weights`` check what it will be given, ``graph`` prepares the ONNX model, ``backend``
drives the library, ``build`` files the result and ``inspect`` looks inside. Importing this package loads neither TensorRT nor onnx.
"""

from dspine_export.lowering.engine.build import build_engines
from dspine_export.lowering.engine.profile import ProfileSpec, Range
from dspine_export.lowering.engine.report import EngineReport, PlanReport

__all__ = ["EngineReport", "PlanReport", "ProfileSpec", "Range", "build_engines"]
