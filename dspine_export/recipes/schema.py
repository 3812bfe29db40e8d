"""What a recipe may say. Unknown keys are refused; ranges are checked here, not where a builder would fail over them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

_DTYPE_ALIASES = {"bf16": "bfloat16", "fp32": "float32"}
_Size = Annotated[int, Field(ge=1, lt=2**31, strict=True)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, str_strip_whitespace=True)


class DimRange(_Strict):
    """The sizes one dynamic dimension may take; kernels are chosen for ``opt``."""

    min: _Size
    opt: _Size
    max: _Size

    @model_validator(mode="after")
    def _ordered(self) -> DimRange:
        if not self.min <= self.opt <= self.max:
            raise ValueError(f"needs min <= opt <= max, got min {self.min}, opt {self.opt}, max {self.max}")
        return self


class Profile(_Strict):
    """Dynamic sizes of both plans.

    ``batch``: sequences per call. ``context``: columns of the K/V cache. ``tokens``: context rows appended per call.
    """

    batch: DimRange = DimRange(min=1, opt=1, max=8)
    context: DimRange = DimRange(min=1, opt=1024, max=4096)
    tokens: DimRange = DimRange(min=1, opt=16, max=1024)

    @model_validator(mode="after")
    def _appendable(self) -> Profile:
        if self.tokens.max > self.context.max:
            raise ValueError(f"tokens.max {self.tokens.max} is more than context.max {self.context.max} can hold")
        return self


class Pair(_Strict):
    """The pair a recipe is for; a checkpoint that differs is refused before anything is built."""

    target_architecture: str | None = None
    target_layers: _Size | None = None
    hidden_size: _Size | None = None
    vocab_size: _Size | None = None


class BuildSettings(_Strict):
    """What to build. ``trtllm`` ends with an engine for TensorRT, ``onnx`` with the graphs, ``vllm`` with a drafter directory for vLLM.

    ``plugins_to_serialize``: the plans carry the plugin library; whatever loads them must allow host code in engines.
    """

    target: Literal["trtllm", "onnx", "vllm"] = "trtllm"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    builder: Literal["auto", "tensorrt", "tensorrt-rtx"] = "auto"
    compute_capability: str | None = None
    plugins_to_serialize: bool = False

    @field_validator("dtype", mode="before")
    @classmethod
    def _alias(cls, value: object) -> object:
        if value in ("float16", "fp16", "half"):
            raise ValueError("float16 overflows on the target's hidden states; use bfloat16 or float32")
        return _DTYPE_ALIASES.get(value, value) if isinstance(value, str) else value

    @field_validator("compute_capability", mode="before")
    @classmethod
    def _as_text(cls, value: object) -> object:
        return str(value) if isinstance(value, float) else value


class Verification(_Strict):
    """Random states on which the built graphs are compared with the torch model.

    ``cases`` are pairs of batch size and context rows; lengths inside a batch are ragged and include 0.
    """

    enabled: bool = True
    cases: Annotated[tuple[tuple[_Size, _Size], ...], Field(min_length=1)] = ((1, 1), (1, 33), (2, 7), (3, 64), (5, 24))
    seed: int = 0


class TrtllmSettings(_Strict):
    """How TensorRT-LLM serves the drafter.

    ``executor``: the torch model or the plan. ``attention_backend``: which context cache TensorRT-LLM keeps for it. ``allow_unchecked``:
    accept TensorRT-LLM versions whose signatures were not checked. ``legacy_layout``: also file the plan as TensorRT-LLM <= 1.2 did.
    """

    executor: Literal["torch", "plan"] = "torch"
    attention_backend: Literal["VANILLA", "TRTLLM"] = "VANILLA"
    allow_unchecked: bool = False
    legacy_layout: bool = False


class VllmSettings(_Strict):
    """How vLLM serves the drafter.

    ``target``: the target as ``vllm serve OUT`` loads it and the file of drafters lists it, None for the directory of the build.
    ``register_drafter``: make this drafter the one that ``--speculative-model dspine`` means for its target on this machine.
    """

    target: str | None = None
    register_drafter: bool = False


class Memory(_Strict):
    """Estimated sizes in GB (1e9 bytes): both plans, the builder's peak, the K/V cache at the profile's maximum."""

    plans_gb: float
    builder_peak_gb: float
    cache_gb: float


class Recipe(_Strict):
    """One recipe file."""

    name: str = "default"
    description: str = ""
    pair: Pair = Pair()
    build: BuildSettings = BuildSettings()
    profile: Profile = Profile()
    verification: Verification = Verification()
    trtllm: TrtllmSettings = TrtllmSettings()
    vllm: VllmSettings = VllmSettings()
    memory: Memory | None = None
