"""Stub of the options: the fields used, and the two rules of their validation that a configuration can break."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from tensorrt_llm._torch.speculative.interface import SpeculativeDecodingMode


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class DSparkDecodingConfig(_Strict):
    decoding_type: Literal["DSpark"] = "DSpark"
    max_draft_len: int
    speculative_model: str
    attention_backend: Literal["VANILLA", "TRTLLM"] = "VANILLA"
    block_size: int | None = None
    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    moe_backend: str | None = None

    @model_validator(mode="after")
    def _resolve(self) -> DSparkDecodingConfig:
        checkpoint = json.loads((Path(self.speculative_model) / "config.json").read_text())
        taps = checkpoint.get("dflash_config", {}).get("target_layer_ids")
        if self.target_layer_ids is None:
            self.target_layer_ids = taps
        elif taps is not None and taps != self.target_layer_ids:
            raise ValueError("target_layer_ids must match the checkpoint's")
        block = self.block_size or checkpoint.get("block_size") or self.max_draft_len
        if block != self.max_draft_len:
            raise ValueError(f"block_size must equal max_draft_len; got {block} and {self.max_draft_len}")
        return self

    @property
    def spec_dec_mode(self) -> SpeculativeDecodingMode:
        return SpeculativeDecodingMode.DSPARK


class KvCacheConfig(_Strict):
    free_gpu_memory_fraction: float = 0.9


class TorchLlmArgs(_Strict):
    model: str
    speculative_config: DSparkDecodingConfig
    kv_cache_config: KvCacheConfig = KvCacheConfig()
    max_batch_size: int = 8
    max_seq_len: int | None = None
    backend: Literal["pytorch"] = "pytorch"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1


def parse(document: dict[str, Any], model: str | None = None) -> TorchLlmArgs:
    return TorchLlmArgs.model_validate({**document, **({"model": model} if model else {})})
