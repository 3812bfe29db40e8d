"""``--speculative-model``, ``--speculative-method``, ``--num-speculative-tokens``: other names of vLLM's options; ``dspine``: a method."""

from __future__ import annotations

import functools
from typing import Any

from dspine_export.vllm.serving_config import METHOD

ALIASES = {
    "--spec-model": "--speculative-model",
    "--spec-method": "--speculative-method",
    "--spec-tokens": "--num-speculative-tokens",
}


def extend_command_line(engine_args: Any) -> None:
    """Wrap ``EngineArgs.add_cli_args``. A parser without the options that are renamed here stays as it is."""
    original = getattr(engine_args, "add_cli_args", None)
    if original is None:
        return

    @functools.wraps(original)
    def add_cli_args(*args: Any, **kwargs: Any) -> Any:
        parser = original(*args, **kwargs)
        extend_parser(parser)
        return parser

    engine_args.add_cli_args = staticmethod(add_cli_args)


def extend_parser(parser: Any) -> None:
    """Add the aliases and the method to the options of an ``argparse`` parser that has them."""
    known = getattr(parser, "_option_string_actions", {})  # argparse has no public way to add a name to an option
    for option, alias in ALIASES.items():
        action = known.get(option)
        if action is None or alias in known:
            continue
        action.option_strings = [*action.option_strings, alias]
        known[alias] = action
    method = known.get("--spec-method")
    if method is not None and method.choices is not None and METHOD not in method.choices:
        method.choices = [*method.choices, METHOD]
