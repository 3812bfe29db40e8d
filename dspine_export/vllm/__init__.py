"""vLLM: ``method: dspine`` as a plugin. A thin adapter; the maths is in `model` and the kernels.

vLLM finds `register` through the entry point group ``vllm.general_plugins`` and calls it in each of its processes. ``dspine`` is an alias:
inside vLLM the drafter runs as ``dspark``, the block-parallel method with a sequential stage, with an architecture of its own.

Importing this package loads neither torch nor vllm.
"""

from __future__ import annotations

import logging

__all__ = ["register"]

_logger = logging.getLogger("vllm.dspine_export")


def register() -> None:
    """Make ``dspine`` known to vLLM. Never raises: a plugin that does ends every run of vLLM, also those that do not use it."""
    try:
        from dspine_export.vllm.plugin import install

        install()
    except Exception as error:
        _logger.warning("dspine-export: method 'dspine' is not available: %s: %s", type(error).__name__, error)
