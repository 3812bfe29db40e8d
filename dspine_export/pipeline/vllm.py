"""The stage that writes ``OUT/vllm``, and what can be known about it before the build starts."""

from __future__ import annotations

from pathlib import Path

from dspine_export.errors import UsageError
from dspine_export.pipeline.pair import OpenPair
from dspine_export.pipeline.progress import Progress
from dspine_export.pipeline.request import BuildRequest
from dspine_export.vllm.drafter_lookup import SERVING_FOLDER, add_to_registry, read_registry
from dspine_export.vllm.files import write_files


def check_vllm(pair: OpenPair, request: BuildRequest) -> None:
    """Refuse early what the stage or the server would refuse later.

    Raises:
        UsageError: not a DSpine drafter, an engine or model repository asked for as well, or a damaged file of drafters.
    """
    config = pair.checkpoint.config
    if config.transfer is None:
        raise UsageError(
            "--target vllm builds DSpine drafters",
            where=pair.checkpoint.path,
            got=config.architecture,
            fix='vLLM serves a DFlash checkpoint as it is: --speculative-config \'{"method": "dflash", "model": DRAFTER}\'',
        )
    if request.stop_after_onnx or request.triton:
        option = "--stop-after onnx" if request.stop_after_onnx else "--triton"
        raise UsageError(
            "--target vllm builds no graphs", got=option, fix=f"leave {option} out, or build --target trtllm"
        )
    if request.recipe.vllm.register_drafter:
        read_registry()


def write_vllm(pair: OpenPair, request: BuildRequest, staging: Path) -> None:
    """Write ``staging/vllm`` in the recipe's dtype. Raises as `write_files`."""
    verifier = request.recipe.vllm.target or str(request.target_model.absolute())
    write_files(staging, pair.checkpoint, pair.target, request.recipe.build.dtype, verifier)


def register_drafter(request: BuildRequest, progress: Progress) -> None:
    """Enter the finished bundle into the file of drafters, if that was asked for. Raises OutputError: it cannot be written."""
    if not request.recipe.vllm.register_drafter:
        return
    path = add_to_registry(request.recipe.vllm.target or str(request.target_model), request.output / SERVING_FOLDER)
    progress.note(f"--speculative-model dspine now finds it: {path}")
