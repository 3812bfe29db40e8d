"""Opening a pair of directories as an engine."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from dspine_export.bundle import is_bundle, open_bundle
from dspine_export.checkpoint.load import open_checkpoint
from dspine_export.checkpoint.pairing import check_pairing
from dspine_export.checkpoint.target import TargetInfo, read_target
from dspine_export.errors import UsageError, VerificationError
from dspine_export.runtime.executor import DrafterExecutor
from dspine_export.runtime.load_target import DTYPES, check_device, open_target
from dspine_export.runtime.open_executor import drafter_folder, open_executor
from dspine_export.runtime.prompts import load_tokenizer
from dspine_export.runtime.serving.engine import Engine, EngineSettings
from dspine_export.runtime.serving.slot_models import SlotModels

LOG = logging.getLogger(__name__)
AUTO = "auto"


@dataclass(frozen=True)
class PairSource:
    """What to serve and where.

    Attributes:
        source: a bundle or a drafter checkpoint. target_model: the target's Hugging Face directory.
        executor: "auto" is onnxruntime for a bundle on the CPU, else torch. dtype: "auto" is float32 on the CPU, else bfloat16.
        check_hashes: compare every file of a bundle with its manifest.
        speculate: False serves the target alone.
    """

    source: Path
    target_model: Path
    executor: str = AUTO
    device: str = "cpu"
    dtype: str = AUTO
    check_hashes: bool = True
    speculate: bool = True

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"

    @property
    def resolved_dtype(self) -> str:
        return ("float32" if self.on_cpu else "bfloat16") if self.dtype == AUTO else self.dtype

    @property
    def resolved_executor(self) -> str:
        automatic = "onnxruntime" if self.on_cpu and is_bundle(self.source) else "torch"
        return automatic if self.executor == AUTO else self.executor


def open_models(pair: PairSource, slots: int, max_seq_len: int, *, count_near_ties: bool | None = None) -> SlotModels:
    """Loads both models, checked against each other.

    Args:
        count_near_ties: None counts them in float32, where exactness is promised.

    Raises:
        UsageError, CheckpointError, DependencyError, VerificationError: whatever is unfit.
    """
    taps, _ = _check_pair(pair)
    target = open_target(pair.target_model, taps, dtype=pair.resolved_dtype, device=pair.device)
    if max_seq_len > target.max_positions:
        expected = f"at most {target.max_positions}, the target's positions"
        what = "Sequences longer than the target can hold"
        raise UsageError(what, where="max_seq_len", got=max_seq_len, expected=expected)
    executor = None
    if pair.speculate:
        executor = open_executor(pair.resolved_executor, pair.source, target.embed_tokens, target.lm_head)
    ties = pair.resolved_dtype == "float32" if count_near_ties is None else count_near_ties
    return SlotModels(target, executor, slots=slots, max_seq_len=max_seq_len, count_near_ties=ties)


def open_drafter(pair: PairSource) -> DrafterExecutor:
    """The drafter alone, with its target's embedding and head; the target itself is not loaded. Raises as `open_models`."""
    _, target = _check_pair(pair)
    device = check_device(pair.device)
    dtype = DTYPES.get(pair.resolved_dtype)
    if dtype is None:
        raise UsageError("Unsupported dtype", got=pair.dtype, expected=f"{AUTO}, {' or '.join(DTYPES)}")
    embed_tokens = target.read_embed_tokens().to(device, dtype)
    lm_head = embed_tokens if target.tie_word_embeddings else target.read_lm_head().to(device, dtype)
    return open_executor(pair.resolved_executor, pair.source, embed_tokens, lm_head)


def _check_pair(pair: PairSource) -> tuple[tuple[int, ...], TargetInfo]:
    """Checks both directories; returns the drafter's taps and the target's description."""
    if pair.check_hashes and is_bundle(pair.source):
        check_bundle(pair.source)
    checkpoint, target = open_checkpoint(drafter_folder(pair.source)), read_target(pair.target_model)
    for warning in check_pairing(checkpoint, target):
        LOG.warning("%s", warning)
    return checkpoint.config.target_layer_ids, target


def check_bundle(path: Path) -> None:
    """Compares every file with the manifest. Raises VerificationError that says how to get a good bundle again."""
    try:
        open_bundle(path, check_hashes=True)
    except VerificationError as error:
        raise VerificationError(
            error.what,
            where=error.where,
            got=error.got,
            expected=error.expected,
            fix=f"build it again: dspine-export build DRAFTER --target-model TARGET -o {path} --force",
        ) from error


def open_engine(pair: PairSource, settings: EngineSettings) -> Engine:
    """An engine that is ready to be started. Raises as `open_models`."""
    models = open_models(pair, settings.slots, settings.limits.max_seq_len)
    return Engine(models, load_tokenizer(pair.target_model), settings)
