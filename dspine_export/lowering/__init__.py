"""Graphs -> files: ONNX in two forms with external weights, their verification, and TensorRT plans."""

from dspine_export.lowering.onnx_export import export_onnx
from dspine_export.lowering.portable import export_portable
from dspine_export.lowering.verify import VerificationReport, require_passed, verify_onnx

__all__ = ["VerificationReport", "export_onnx", "export_portable", "require_passed", "verify_onnx"]
