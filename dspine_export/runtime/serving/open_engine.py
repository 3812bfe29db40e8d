"""Opening a pair of directories as an engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dspine_export.bundle import is_bundle, open_bundle
from dspine_export.checkpoint.load import open_checkpoint
from dspine_export.checkpoint.pairing import check_pairing, read_target
from dspine_export.errors import UsageError, VerificationError
from dspine_export.runtime.load_target import open_target
from dspine_export.runtime.open_executor import drafter_folder, open_executor
from dspine_export.runtime.prompts import load_tokenizer
from dspine_export.runtime.serving.engine import Engine, EngineSettings
from dspine_export.runtime.serving.slot_models import SlotModels

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


def open_models(pair: PairSource, slots: int, max_seq_len: int, *, count_near_ties: bool | None = None) -> SlotModels:
    """Loads both models, checked against each other.

    Args:
        count_near_ties: None counts them in float32, where exactness is promised.

    Raises:
        UsageError, CheckpointError, DependencyError, VerificationError: whatever is unfit.
    """
    if pair.check_hashes and is_bundle(pair.source):
        check_bundle(pair.source)
    checkpoint = open_checkpoint(drafter_folder(pair.source))
    check_pairing(checkpoint, read_target(pair.target_model))
    on_cpu = pair.device == "cpu"
    dtype = ("float32" if on_cpu else "bfloat16") if pair.dtype == AUTO else pair.dtype
    target = open_target(pair.target_model, checkpoint.config.target_layer_ids, dtype=dtype, device=pair.device)
    if max_seq_len > target.max_positions:
        expected = f"at most {target.max_positions}, the target's positions"
        raise UsageError(
            "Sequences longer than the target can hold", where="max_seq_len", got=max_seq_len, expected=expected
        )
    executor = None
    if pair.speculate:
        automatic = "onnxruntime" if on_cpu and is_bundle(pair.source) else "torch"
        name = automatic if pair.executor == AUTO else pair.executor
        executor = open_executor(name, pair.source, target.embed_tokens, target.lm_head)
    ties = dtype == "float32" if count_near_ties is None else count_near_ties
    return SlotModels(target, executor, slots=slots, max_seq_len=max_seq_len, count_near_ties=ties)


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
