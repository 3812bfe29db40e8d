"""``dspine-export triton-repo``: a model repository for Triton Inference Server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from dspine_export.cli.guard import command
from dspine_export.cli.options import AsJson, TargetModel

if TYPE_CHECKING:
    from dspine_export.pipeline.triton import Repository


def triton_repo(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A bundle.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="The repository to create.", show_default=False)
    ] = None,
    target_model: TargetModel = None,
    flavor: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FLAVOR",
            help="dspine: text and drafter models of our own backend; llmapi: TensorRT-LLM; vllm: vLLM; plan: bare TensorRT plans. "
            "Repeatable.",
            show_default="dspine",
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the text model.")] = "dspine",
    max_batch_size: Annotated[int, typer.Option(metavar="N", help="Sequences held at once.")] = 16,
    max_seq_len: Annotated[int, typer.Option(metavar="N", help="Tokens of prompt and output together.")] = 2048,
    instances: Annotated[int, typer.Option(metavar="N", help="Processes of the text model.")] = 1,
    decoupled: Annotated[
        bool, typer.Option("--decoupled/--no-decoupled", help="Whether the text model can stream.")
    ] = True,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    files: Annotated[
        str,
        typer.Option(
            help="How bundle and target get into the repository: link (hard links where possible), copy, reference."
        ),
    ] = "link",
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Change a parameter of the backend, e.g. max_queue=64. Repeatable.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing repository once the new one is complete.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a repository from which tritonserver serves text with BUNDLE and its target."""
    with command(as_json=as_json) as console:
        from dspine_export.errors import UsageError
        from dspine_export.pipeline.triton import make_repository
        from dspine_export.triton.options import Flavor, Placement, RepositoryOptions, parse_assignments

        if target_model is None or output is None:
            missing = "no --target-model" if target_model is None else "no -o"
            raise UsageError(
                "triton-repo needs more arguments", got=missing, expected="triton-repo BUNDLE --target-model DIR -o DIR"
            )
        options = RepositoryOptions(
            flavors=cast(tuple[Flavor, ...], tuple(dict.fromkeys(flavor or ["dspine"]))),
            name=name,
            max_slots=max_batch_size,
            max_seq_len=max_seq_len,
            instances=instances,
            decoupled=decoupled,
            device=device,
            files=cast(Placement, files),
            parameters=parse_assignments(assignments or []),
        )
        made = make_repository(bundle, target_model, output, options, console, force=force)
        document = {"repository": str(made.path), "models": made.models, "served": made.served, "files": made.files}
        console.result(document, _lines(made))


def _lines(made: Repository) -> Iterator[str]:
    yield f"{made.path}: {made.files} files, models {', '.join(made.models)}"
    yield f"  start it: {made.path / 'launch.sh'}"
