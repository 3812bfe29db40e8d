"""All checks, in a fixed order; the slow ones run side by side."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from dspine_export.doctor.builders import check_builder
from dspine_export.doctor.check import Check
from dspine_export.doctor.machine import check_machine
from dspine_export.doctor.python_packages import check_optional, check_python, check_required, required_packages
from dspine_export.doctor.toolchain import check_compilers, check_plugins, check_tritonserver
from dspine_export.doctor.trtllm import check_trtllm_hooks
from dspine_export.doctor.vllm import check_vllm_hooks


def examine(*, fix: bool = False) -> list[Check]:
    """Every finding on this machine. With ``fix``, repair what can be repaired first."""
    questions: list[Callable[[], list[Check]]] = [
        check_python,
        *(partial(check_required, name) for name in required_packages()),
        partial(check_builder, "tensorrt-rtx", fix=fix),
        partial(check_builder, "tensorrt", fix=fix),
        check_compilers,
        check_plugins,
        check_machine,
        check_optional,
        check_trtllm_hooks,
        check_vllm_hooks,
        check_tritonserver,
    ]
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        return [check for checks in pool.map(lambda question: question(), questions) for check in checks]
