"""TensorRT-LLM: whether the installed version was signature-checked, and which of the hooks the adapter relies on have moved."""

from __future__ import annotations

import importlib.metadata

from dspine_export.doctor.check import Check
from dspine_export.doctor.probe import ask
from dspine_export.trtllm.versions import recorded_versions, snapshot_for

_NAME = "TensorRT-LLM hooks"
_COMPARE = """
import tensorrt_llm
from dspine_export.trtllm.signatures import compare
from dspine_export.trtllm.snapshots import SNAPSHOTS
from dspine_export.trtllm.versions import snapshot_for
answer["version"] = str(tensorrt_llm.__version__)
snapshot = snapshot_for(answer["version"]) or SNAPSHOTS[-1]
answer["release"], answer["hooks"] = snapshot.release, len(snapshot.hooks)
answer["moved"] = [str(entry) for entry in compare(snapshot)]
"""


def check_trtllm_hooks() -> list[Check]:
    """The comparison of the real signatures with the snapshot; nothing where TensorRT-LLM is not installed."""
    if not _installed():
        return []
    answer = ask(_COMPARE)
    if answer.problem:
        return [
            Check(_NAME, "broken", f"tensorrt_llm is installed and cannot be used: {answer.problem}", "reinstall it")
        ]
    found = answer.values
    version, compared = found["version"], f"{found['hooks']} hooks compared with the {found['release']} signatures"
    if found["moved"]:
        detail = f"{version}: {compared}; moved: " + "; ".join(found["moved"])
        fix = (
            f"install {recorded_versions()}, whose signatures were recorded; or build with --allow-unchecked to use it"
        )
        return [Check(_NAME, "warning", detail, fix)]
    if snapshot_for(version) is None:
        detail = f"{version}: not a signature-checked version, but {compared}, none moved"
        return [Check(_NAME, "warning", detail, "build with --allow-unchecked to use it")]
    return [Check(_NAME, "ok", f"{version}: {compared}, none moved (signature-checked, never run)")]


def _installed() -> bool:
    try:
        importlib.metadata.version("tensorrt_llm")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
