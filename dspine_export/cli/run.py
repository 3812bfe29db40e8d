"""``dspine-export run``: generate text with a drafter and its target."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dspine_export.cli.guard import command
from dspine_export.cli.options import AsJson, TargetModel

if TYPE_CHECKING:
    from dspine_export.cli.console import Console
    from dspine_export.pipeline.run import RunOutcome
    from dspine_export.runtime.lossless import GreedyComparison


def run(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A bundle or a drafter checkpoint.")],
    target_model: TargetModel = None,
    prompt: Annotated[
        str, typer.Option("-p", "--prompt", help="The user's message; - reads standard input.", show_default=False)
    ] = "-",
    system: Annotated[str | None, typer.Option(help="A system message.", show_default=False)] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    max_new_tokens: Annotated[int, typer.Option(metavar="N")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus, at temperature > 0.")] = 1.0,
    seed: Annotated[int, typer.Option()] = 0,
    executor: Annotated[
        str | None,
        typer.Option(
            help="What runs the drafter: torch (kernels on a GPU), eager, onnxruntime or tensorrt.",
            show_default="onnxruntime for a bundle on the CPU, else torch",
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16.", show_default="float32 on the CPU, else bfloat16")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    weights: Annotated[
        str, typer.Option(help="full, or fp8: the torch executor on a GPU drafts with rounded matrices.")
    ] = "full",
    compare: Annotated[
        bool, typer.Option("--compare", help="Generate with the target alone as well; exit 6 unless equal.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Generate with the pair: streams text, then acceptance length (tau), acceptance per position and target calls saved."""
    with command(as_json=as_json) as console:
        from dspine_export.errors import UsageError
        from dspine_export.pipeline.run import RunRequest, open_session
        from dspine_export.pipeline.run import compare as run_comparison
        from dspine_export.pipeline.run import run as run_pair
        from dspine_export.runtime.generation import Settings

        if target_model is None:
            raise UsageError("run needs the target", got="no --target-model", expected="--target-model DIR")
        if compare and temperature > 0:
            raise UsageError("Only greedy output can be compared token for token", where="--compare", got=temperature)
        settings = Settings(max_new_tokens, temperature, top_p, seed)
        text = _read_prompt(console) if prompt == "-" else prompt
        session = open_session(RunRequest(source, target_model, executor, dtype, device, weights), console)
        outcome = run_pair(session, text, settings, chat=not raw, system=system, write=console.write)
        console.write("\n")
        found = None
        if compare:
            with console.stage("compare", "generating with the target alone"):
                found = run_comparison(session, text, outcome, settings, chat=not raw, system=system)
        document = {
            "text": outcome.text,
            "token_ids": outcome.result.token_ids,
            "finish_reason": outcome.result.finish_reason,
            "prompt_tokens": outcome.prompt_tokens,
            "seconds": round(outcome.seconds, 3),
            "executor": session.executor.name,
            "statistics": outcome.result.statistics.to_json(),
        }
        if found is not None:
            document["comparison"] = {"equal": found.equal, **asdict(found)}
        console.result(document, _lines(outcome, session.executor.config.block_size, found))


def _read_prompt(console: Console) -> str:
    from dspine_export.errors import UsageError

    if sys.stdin.isatty():
        console.note("reading the prompt from standard input, up to Ctrl-D")
    text = sys.stdin.read()
    if not text:
        raise UsageError(
            "no prompt", got="nothing on standard input", expected="--prompt TEXT, or text on standard input"
        )
    return text


def _lines(outcome: RunOutcome, block_size: int, found: GreedyComparison | None) -> Iterator[str]:
    statistics, count = outcome.result.statistics, len(outcome.result.token_ids)
    speed = count / outcome.seconds if outcome.seconds else 0.0
    yield ""
    yield f"tokens        {count} in {outcome.seconds:.1f} s ({speed:.1f}/s), finished by {outcome.result.finish_reason}"
    yield (
        f"target calls  {statistics.target_calls} after the prompt's, {statistics.target_calls_saved} saved: "
        f"acceptance length (tau) {statistics.acceptance_length:.2f} of at most {block_size}"
    )
    rates = " ".join(f"{rate:.2f}" for rate in statistics.per_position_rates)
    yield f"drafts        {statistics.drafts}, acceptance rate {statistics.acceptance_rate:.1%}, per position {rates or '-'}"
    if found is not None:
        ties = f", {len(found.near_ties)} near-ties" if found.near_ties else ""
        yield f"compared      equal to the target alone, {found.tokens} tokens{ties}"
