"""The driver half of the backend: one device, the CPU, and one stream, number 0."""

from collections.abc import Callable
from typing import Any

import torch
from triton.backends import compiler as triton_compiler
from triton.backends import driver as triton_driver


class InterpreterDriver(triton_driver.DriverBase):
    """What Triton and vLLM ask a driver for before they launch a kernel."""

    def __init__(self) -> None:
        self.utils = None

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return "void"

    def get_current_target(self) -> triton_compiler.GPUTarget:
        return triton_compiler.GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cpu

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        """There is one device."""

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_benchmarker(self) -> Callable[..., Any]:
        from triton.testing import do_bench

        return do_bench

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        return torch.empty(1)

    def clear_cache(self, cache: torch.Tensor) -> None:
        """The CPU's caches stay as they are."""
