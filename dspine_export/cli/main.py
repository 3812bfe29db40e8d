"""Entry point: the command table. Command modules import nothing heavy until a command runs."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from dspine_export.cli import bench, build, doctor, inspect, recipes, run, triton_repo, verify
from dspine_export.cli.guard import DEBUG_VARIABLE, EXIT_INTERRUPTED, EXIT_USAGE, usage_failure
from dspine_export.cli.signals import install_handlers
from dspine_export.version import __version__

app = typer.Typer(
    name="dspine-export",
    help="Compile DSpine speculative-decoding drafters to verified ONNX graphs and TensorRT engines.",
    epilog="Exit codes: 0 ok, 1 internal, 2 usage or recipe, 3 checkpoint, 4 dependency or hardware, 5 build, 6 verification, "
    "7 output exists, is locked or cannot be written, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"dspine-export {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    if debug:
        os.environ[DEBUG_VARIABLE] = "1"


app.command("build")(build.build)
app.command("inspect")(inspect.inspect)
app.command("verify")(verify.verify)
app.command("run")(run.run)
app.command("triton-repo")(triton_repo.triton_repo)
app.command("bench")(bench.bench)
app.command("doctor")(doctor.doctor)
app.command("recipes")(recipes.recipes)


def main() -> None:
    """Run the command line; always leaves by SystemExit."""
    # libgomp's default makes waiting threads spin for milliseconds: several times slower where something else uses a core as well.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    install_handlers()
    try:
        app()
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None
    except SystemExit as leave:
        if (
            leave.code == EXIT_USAGE and not leave.__suppress_context__
        ):  # raised by the option parser, not by `guard.command`
            usage_failure(sys.argv[1:])
        raise
