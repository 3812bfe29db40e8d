"""Timing on a GPU for the developer tools: the benchmark's own."""

from dspine_export.runtime.bench.timing import call_us, capture, copy_bandwidth_gb_s, gemm_tflop_s, replay_us

__all__ = ["call_us", "capture", "copy_bandwidth_gb_s", "gemm_tflop_s", "replay_us"]
