"""The parameters of a model's configuration, as typed settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspine_export.errors import UsageError
from dspine_export.triton.contract import DRAFTER_PARAMETERS, ENVIRONMENT, TEXT_PARAMETERS, Parameter

if TYPE_CHECKING:
    from dspine_export.runtime.serving.engine import EngineSettings
    from dspine_export.runtime.serving.open_engine import PairSource

_BOOLEANS = {"true": True, "false": False, "1": True, "0": False}


@dataclass(frozen=True)
class ModelParameters:
    """Values of one model's parameters, defaults filled in.

    Attributes:
        values: by name. root: where relative paths start.
    """

    values: Mapping[str, str]
    root: Path

    def text(self, name: str) -> str:
        return self.values[name]

    def integer(self, name: str, least: int = 0) -> int:
        try:
            value = int(self.values[name])
        except ValueError:
            value = least - 1
        if value < least:
            raise _wrong(name, self.values[name], f"a whole number, at least {least}")
        return value

    def number(self, name: str) -> float:
        try:
            value = float(self.values[name])
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            raise _wrong(name, self.values[name], "a number, at least 0")
        return value

    def boolean(self, name: str) -> bool:
        value = self.values[name].strip().lower()
        if value not in _BOOLEANS:
            raise _wrong(name, self.values[name], "true or false")
        return _BOOLEANS[value]

    def path(self, name: str) -> Path:
        """An absolute directory; the environment's override wins."""
        given = os.environ.get(ENVIRONMENT[name]) or self.values[name]
        path = (self.root / given).resolve()
        if not path.is_dir():
            fix = f"correct the parameter, or set {ENVIRONMENT[name]}"
            raise UsageError("A directory of the configuration does not exist", where=name, got=path, fix=fix)
        return path


def read_parameters(config: Mapping[str, Any], model_directory: Path) -> ModelParameters:
    """The parameters of a parsed ``config.pbtxt``.

    Args:
        model_directory: of this model inside the repository; relative paths start at its parent.

    Raises:
        UsageError: an unknown parameter, a missing one, or a kind that does not exist.
    """
    given = {name: str(entry.get("string_value", "")) for name, entry in config.get("parameters", {}).items()}
    kind = given.get("kind", "text")
    known = {"text": TEXT_PARAMETERS, "drafter": DRAFTER_PARAMETERS}.get(kind)
    if known is None:
        raise _wrong("kind", kind, "text or drafter")
    names = {parameter.name for parameter in known}
    unknown = sorted(name for name in given if name not in names and name.islower())  # Triton's own are upper case
    if unknown:
        raise _wrong(unknown[0], given[unknown[0]], f"one of {', '.join(sorted(names))}")
    return ModelParameters({p.name: _value(p, given) for p in known}, model_directory.parent)


def pair_source(parameters: ModelParameters) -> PairSource:
    """The pair to open. Raises UsageError."""
    from dspine_export.runtime.serving.open_engine import PairSource

    return PairSource(
        source=parameters.path("bundle"),
        target_model=parameters.path("target_model"),
        executor=parameters.text("executor"),
        device=parameters.text("device"),
        dtype=parameters.text("dtype"),
        check_hashes=parameters.boolean("check_hashes"),
    )


def engine_settings(parameters: ModelParameters) -> EngineSettings:
    """Settings of the text model's engine. Raises UsageError."""
    from dspine_export.runtime.serving.admission import Limits
    from dspine_export.runtime.serving.engine import EngineSettings

    limits = Limits(
        max_seq_len=parameters.integer("max_seq_len", 2),
        max_prompt_bytes=parameters.integer("max_prompt_bytes", 1),
        max_stop_words=parameters.integer("max_stop_words"),
        default_max_tokens=parameters.integer("default_max_tokens", 1),
        default_deadline_seconds=parameters.integer("default_deadline_ms") / 1000 or None,
    )
    return EngineSettings(
        slots=parameters.integer("max_slots", 1),
        max_queue=parameters.integer("max_queue", 1),
        chunk_tokens=parameters.integer("prefill_chunk_tokens", 1),
        limits=limits,
        threads=parameters.integer("threads") or None,
    )


def _value(parameter: Parameter, given: Mapping[str, str]) -> str:
    value = given.get(parameter.name, parameter.default)
    if value is None and os.environ.get(ENVIRONMENT.get(parameter.name, "")):
        return ""
    if value is None:
        fix = "generate the configuration with dspine-export triton-repo"
        raise UsageError("A parameter is missing", where=f"config.pbtxt: {parameter.name}", got=parameter.doc, fix=fix)
    return value


def _wrong(name: str, got: str, expected: str) -> UsageError:
    return UsageError("Invalid parameter", where=f"config.pbtxt: {name}", got=got, expected=expected)
