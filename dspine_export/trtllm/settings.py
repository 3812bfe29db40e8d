"""What a generated package may say: constants only, checked here before anything is imported on their behalf."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from dspine_export.errors import UsageError

ExecutorName = Literal["torch", "plan"]
EXECUTORS: tuple[ExecutorName, ...] = get_args(ExecutorName)
PACKAGE_NAME = "dspine_trtllm"
ALLOW_VARIABLE = "DSPINE_TRTLLM_ALLOW_UNCHECKED"
"""Set to 1 to run with a TensorRT-LLM whose signatures were not checked, without building again."""


@dataclass(frozen=True)
class ModuleSettings:
    """One generated package.

    Attributes:
        bundle: the bundle's directory, relative to the generated package's.
        executor: ``torch`` runs the torch model, ``plan`` the bundle's TensorRT plan.
        max_draft_len: B-1.
        allow_unchecked: accept TensorRT-LLM versions whose signatures were not checked.
    """

    bundle: str
    executor: ExecutorName
    max_draft_len: int
    allow_unchecked: bool = False

    @classmethod
    def parse(cls, values: dict[str, Any], where: Path) -> ModuleSettings:
        """Settings from a generated ``SETTINGS`` mapping; UsageError names the key that is missing, unknown or unusable."""
        known = {field.name: field for field in fields(cls)}
        missing = {"bundle", "executor", "max_draft_len"} - set(values)
        if unknown := sorted(set(values) - set(known)) + sorted(missing):
            expected = ", ".join(known)
            raise UsageError(
                "The generated package is damaged", where=where, got=unknown[0], expected=expected, fix=AGAIN
            )
        types = {"bundle": str, "executor": str, "max_draft_len": int, "allow_unchecked": bool}
        for name, value in values.items():
            if type(value) is not types[name]:
                raise UsageError("A setting has the wrong type", where=f"{where}: {name}", got=repr(value), fix=AGAIN)
        if values["executor"] not in EXECUTORS:
            raise UsageError("Unknown executor", where=where, got=values["executor"], expected=" or ".join(EXECUTORS))
        return cls(**values)


AGAIN = (
    "undo the changes to this file, or copy the bundle again; if nobody changed it, another version of dspine-export wrote it: "
    "dspine-export build --resume OUT"
)
