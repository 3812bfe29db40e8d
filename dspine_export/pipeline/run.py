"""``run``: generate with a drafter and its target, and say what speculation gained."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspine_export.bundle import is_bundle, open_bundle, sha256_of
from dspine_export.errors import VerificationError
from dspine_export.pipeline.pair import open_pair
from dspine_export.pipeline.progress import Progress
from dspine_export.recipes import Recipe
from dspine_export.runtime.executor import DrafterExecutor
from dspine_export.runtime.generate import generate
from dspine_export.runtime.generation import GenerationResult, Settings
from dspine_export.runtime.load_target import open_target
from dspine_export.runtime.lossless import GreedyComparison, compare_greedy
from dspine_export.runtime.open_executor import (
    DRAFTER_FOLDER,
    PORTABLE_FOLDER,
    check_executor,
    drafter_folder,
    open_executor,
)
from dspine_export.runtime.prompts import StreamDecoder, encode_prompt, load_tokenizer
from dspine_export.runtime.target import TargetExecutor

HASHED_BYTES = 2 << 30  # of a bundle: a matter of seconds; `verify` hashes larger ones


@dataclass(frozen=True)
class RunRequest:
    """What to run and where.

    Attributes:
        source: a bundle or a drafter checkpoint. target_model: the target's Hugging Face directory.
        executor: None for ``onnxruntime`` with a bundle on the CPU, else ``torch``.
        dtype: None for float32 on the CPU, bfloat16 elsewhere.
        weights: ``full`` or ``fp8``, see `open_executor`.
    """

    source: Path
    target_model: Path
    executor: str | None = None
    dtype: str | None = None
    device: str = "cpu"
    weights: str = "full"


@dataclass(frozen=True)
class Session:
    """A pair ready to generate."""

    target: TargetExecutor
    executor: DrafterExecutor
    tokenizer: Any


@dataclass(frozen=True)
class RunOutcome:
    """Text, tokens and counters of one run; `seconds` covers generation alone."""

    text: str
    prompt_tokens: int
    result: GenerationResult
    seconds: float


def open_session(request: RunRequest, progress: Progress) -> Session:
    """Loads both models, checked against each other.

    Raises:
        UsageError, CheckpointError, DependencyError, VerificationError: whatever is unfit.
    """
    on_cpu = request.device == "cpu"
    name = request.executor or ("onnxruntime" if on_cpu and is_bundle(request.source) else "torch")
    check_executor(name, request.weights, request.device)
    if is_bundle(request.source):
        _check_bundle(request.source, progress)
    pair = open_pair(drafter_folder(request.source), request.target_model, Recipe(), progress, finite=False)
    dtype = request.dtype or ("float32" if on_cpu else "bfloat16")
    tokenizer = load_tokenizer(request.target_model)
    with progress.stage("load", f"target in {dtype} on {request.device}"):
        taps = pair.checkpoint.config.target_layer_ids
        target = open_target(request.target_model, taps, dtype=dtype, device=request.device)
    with progress.stage("drafter", name):
        tables = target.embed_tokens, target.lm_head
        executor = open_executor(name, request.source, *tables, weights=request.weights)
    return Session(target, executor, tokenizer)


def _check_bundle(source: Path, progress: Progress) -> None:
    """What the executors read is as it was built; engines are checked where they are loaded."""
    bundle = open_bundle(source)
    read = [e for e in bundle.manifest.files if e.path.startswith((f"{DRAFTER_FOLDER}/", f"{PORTABLE_FOLDER}/"))]
    if sum(entry.size_bytes for entry in read) > HASHED_BYTES:
        return
    with progress.stage("bundle", "hashing"):
        for entry in read:
            if (digest := sha256_of(bundle.file(entry.path))) != entry.sha256:
                raise VerificationError(
                    "a file of the bundle was changed",
                    where=bundle.file(entry.path),
                    got=digest,
                    expected=entry.sha256,
                    fix="copy the whole bundle directory again, or build it again",
                )


def run(
    session: Session,
    prompt: str,
    settings: Settings,
    *,
    chat: bool = True,
    system: str | None = None,
    write: Callable[[str], None] | None = None,
) -> RunOutcome:
    """Generates after one prompt. `write` receives the text as it becomes certain; `settings.eos_ids` empty means the target's own.

    Raises:
        UsageError: the prompt cannot be used.
    """
    ids = encode_prompt(session.tokenizer, prompt, chat=chat, system=system)
    decoder, pieces = StreamDecoder(session.tokenizer), []

    def show(text: str) -> None:
        pieces.append(text)
        if write is not None:
            write(text)

    started = time.monotonic()
    result = generate(
        session.target,
        session.executor,
        ids,
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        seed=settings.seed,
        eos_ids=settings.eos_ids or None,
        on_tokens=lambda tokens: show(decoder.push(tokens)),
    )
    seconds = time.monotonic() - started
    show(decoder.finish())
    return RunOutcome("".join(pieces), len(ids), result, seconds)


def compare(
    session: Session, prompt: str, outcome: RunOutcome, settings: Settings, *, chat: bool, system: str | None
) -> GreedyComparison:
    """Generates greedily with the target alone and compares.

    Raises:
        VerificationError: the outputs differ where no near-tie explains it.
    """
    ids = encode_prompt(session.tokenizer, prompt, chat=chat, system=system)
    comparison = compare_greedy(
        session.target,
        ids,
        outcome.result.token_ids,
        max_new_tokens=settings.max_new_tokens,
        eos_ids=settings.eos_ids or None,
    )
    comparison.require_equal("run")
    return comparison
