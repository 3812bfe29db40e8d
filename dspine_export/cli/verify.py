"""``dspine-export verify``: check a finished bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dspine_export.cli.guard import command
from dspine_export.cli.options import AsJson, TargetModel


def verify(
    bundle: Annotated[Path, typer.Argument(metavar="OUT", help="A bundle.", show_default=False)],
    target_model: TargetModel = None,
    as_json: AsJson = False,
) -> None:
    """Check a bundle's files against its manifest and, with --target-model, its graphs against the torch model."""
    with command(as_json=as_json) as console:
        from dspine_export.cli.build import verification_line
        from dspine_export.pipeline.verify import verify_bundle, verify_files

        opened = verify_files(bundle, console)
        count = len(opened.manifest.files)
        document = {"bundle": str(opened.path), "files": count}
        lines = [f"{opened.path}: {count} files as listed"]
        if target_model is not None:
            result = verify_bundle(opened, target_model, console)
            document |= {"verification": result.model_dump(mode="json", exclude_none=True)}
            lines.append(verification_line(result))
        else:
            lines.append("graphs not compared: add --target-model DIR")
        console.result(document, lines)
