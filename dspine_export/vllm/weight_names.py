"""Names of the tensors a drafter directory for vLLM holds beyond DFlash's own.

Two forms are served. A SpecForge checkpoint carries ``transfer_codes [V, r]`` (and ``transfer_ready``), folded when it is loaded. The
directory that ``dspine-export build --target vllm`` writes carries ``injection.token_table [V, 2m]`` instead, as
`model.token_table.fold_token_table` makes it, and no codes. All other names are the checkpoint's canonical ones in both.
"""

from __future__ import annotations

from dspine_export.checkpoint.expected_tensors import CODES, READY

INJECTION_PREFIX = "injection."
TOKEN_TABLE = "injection.token_table"

__all__ = ["CODES", "INJECTION_PREFIX", "READY", "TOKEN_TABLE", "canonical", "is_injection"]

_PREFIXES = ("draft_model.", "model.")


def canonical(name: str) -> str:
    """A stored tensor's name without the prefix that some exporters put before all of them."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def is_injection(name: str) -> bool:
    """Whether a canonical name belongs to the injection and its transfer space rather than to the DFlash backbone."""
    return name.startswith(INJECTION_PREFIX) or name in (CODES, READY)
