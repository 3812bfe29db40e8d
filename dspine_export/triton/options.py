"""What a Triton model repository is generated from: sources, flavours, names and limits, checked in one place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from dspine_export.errors import UsageError
from dspine_export.triton.contract import DRAFTER_MODEL, DRAFTER_PARAMETERS, TEXT_MODEL, TEXT_PARAMETERS

Flavor = Literal["dspine", "llmapi", "vllm", "plan"]
Placement = Literal["link", "copy", "reference"]
FLAVORS: tuple[Flavor, ...] = get_args(Flavor)
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)

LLMAPI_MODEL, VLLM_MODEL = "tensorrt_llm", "vllm_dspine"
CONTEXT_PLAN, DRAFT_PLAN = "dspine_context_plan", "dspine_draft_plan"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_FIXED = ("kind", "bundle", "target_model", "device", "max_slots", "max_seq_len")  # these have options of their own


@dataclass(frozen=True)
class RepositoryOptions:
    """One repository.

    Attributes:
        flavors: which models it holds; `dspine` stands for the text model and the token-level drafter.
        name: of the text model; the drafter's is derived from it.
        max_slots: sequences held at once by one instance.
        max_seq_len: most tokens of prompt and output together.
        instances: processes of the text model, each with slots of its own.
        decoupled: whether the text model may stream.
        device: cpu, cuda or cuda:N.
        files: whether drafter bundle and target are hard-linked or copied into the repository, or stay where they are.
        parameters: further parameters of the backend, by the names of `contract`.
    """

    flavors: tuple[Flavor, ...] = ("dspine",)
    name: str = TEXT_MODEL
    max_slots: int = 16
    max_seq_len: int = 2048
    instances: int = 1
    decoupled: bool = True
    device: str = "cpu"
    files: Placement = "link"
    parameters: Mapping[str, str] = field(default_factory=dict)

    @property
    def drafter_name(self) -> str:
        """Name of the token-level model."""
        return DRAFTER_MODEL if self.name == TEXT_MODEL else f"{self.name}_drafter"

    @property
    def model_names(self) -> tuple[str, ...]:
        """Every model in the repository, in the order of the flavours."""
        return tuple(name for flavor in self.flavors for name in self._names(flavor))

    @property
    def served_names(self) -> tuple[str, ...]:
        """What `launch.sh` loads unless told otherwise: the first flavour, without the token-level drafter."""
        names = self._names(self.flavors[0])
        return names[:1] if self.flavors[0] == "dspine" else names

    def _names(self, flavor: Flavor) -> tuple[str, ...]:
        names: dict[Flavor, tuple[str, ...]] = {
            "dspine": (self.name, self.drafter_name),
            "llmapi": (LLMAPI_MODEL,),
            "vllm": (VLLM_MODEL,),
            "plan": (CONTEXT_PLAN, DRAFT_PLAN),
        }
        return names[flavor]


@dataclass(frozen=True)
class Locations:
    """Where bundle and target are, seen from the repository's own directory, which is the server's working directory.

    `plans`: the bundle's plans of the plan flavour, by entry; empty without it. `plugins`: what its server must load for them, in the
    bundle; None where they need nothing. `vllm`: the drafter directory of the vllm flavour.
    """

    bundle: str
    target: str
    vllm: str = ""
    plans: Mapping[str, Path] = field(default_factory=dict)
    plugins: str | None = None

    def from_models(self, path: str) -> str:
        """The same path seen from ``model_repository/``, where the backend's relative paths start."""
        return path if Path(path).is_absolute() else f"../{path}"


def check_options(options: RepositoryOptions) -> None:
    """Refuse what would make a repository that no server can load.

    Raises:
        UsageError: naming the option.
    """
    if not options.flavors:
        raise UsageError("a repository holds at least one flavour", where="--flavor", expected=", ".join(FLAVORS))
    _one_of("--flavor", options.flavors, FLAVORS)
    _one_of("--files", (options.files,), PLACEMENTS)
    if not _NAME.fullmatch(options.name):
        raise UsageError(
            "unusable model name",
            where="--name",
            got=options.name,
            expected="letters, digits, '.', '_' and '-', at most 64",
        )
    if len(set(options.model_names)) < len(options.model_names):
        raise UsageError("two models would have the same name", where="--name", got=options.name)
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", options.device):
        raise UsageError("no such device", where="--device", got=options.device, expected="cpu, cuda or cuda:N")
    for name, value in (("--max-batch-size", options.max_slots), ("--instances", options.instances)):
        if not 1 <= value <= 4096:
            raise UsageError("out of range", where=name, got=value, expected="1 .. 4096")
    if not 16 <= options.max_seq_len < 2**31:
        raise UsageError("out of range", where="--max-seq-len", got=options.max_seq_len, expected="at least 16")
    _check_parameters(options.parameters)


def _one_of(option: str, given: tuple[str, ...], known: tuple[str, ...]) -> None:
    for value in given:
        if value not in known:
            raise UsageError("no such choice", where=option, got=value, expected=", ".join(known))


def _check_parameters(given: Mapping[str, str]) -> None:
    known = {parameter.name for parameter in (*TEXT_PARAMETERS, *DRAFTER_PARAMETERS)} - set(_FIXED)
    for name, value in given.items():
        if name not in known:
            raise UsageError(
                "the backend has no such parameter", where="--set", got=name, expected=", ".join(sorted(known))
            )
        if "\n" in value or "\0" in value or not value:
            raise UsageError("unusable parameter value", where=f"--set {name}", got=value)


def parse_assignments(assignments: list[str]) -> dict[str, str]:
    """``NAME=VALUE`` texts as a dictionary.

    Raises:
        UsageError: a text without ``=``.
    """
    parsed = {}
    for text in assignments:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError("not an assignment", where="--set", got=text, expected="NAME=VALUE")
        parsed[name.strip()] = value.strip()
    return parsed
