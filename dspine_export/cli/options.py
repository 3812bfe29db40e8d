"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
TargetModel = Annotated[
    Path | None,
    typer.Option("--target-model", metavar="DIR", help="The target's Hugging Face directory.", show_default=False),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change one recipe value, e.g. profile.batch.opt=4. Repeatable.",
        show_default=False,
    ),
]
PluginLibrary = Annotated[
    Path | None,
    typer.Option(
        "--plugin-library",
        metavar="FILE",
        help="Use this libdspine_trt_plugins.so instead of building one.",
        show_default=False,
    ),
]
