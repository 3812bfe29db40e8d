"""Draft models as TensorRT-LLM makes and feeds them: through the registry, on modules of a target that has weights only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from dspine_export.bundle import Bundle
from dspine_export.model.drafter import Drafter
from dspine_export.trtllm.draft_model import DSpineForCausalLM
from dspine_export.trtllm.register import register_builder
from dspine_export.trtllm.settings import ExecutorName, ModuleSettings
from dspine_export.trtllm.worker_cache import WorkerContext

from .conftest import Package, Tables
from .worker_loop import ScriptedTarget, ServingLoop

REQUESTS = 4


class Head(torch.nn.Module):
    """A target's module with a weight: embedding or head."""

    def __init__(self, weight: torch.Tensor, *, embeds: bool) -> None:
        super().__init__()
        self.weight, self.embeds = torch.nn.Parameter(weight, requires_grad=False), embeds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(x, self.weight) if self.embeds else x @ self.weight.T


def logits_processor(hidden: torch.Tensor, head: Head, attention: Any, return_context_logits: bool) -> torch.Tensor:
    return head(hidden).float()


def make_draft_model(
    package: Package,
    bundle: Bundle,
    tables: Tables,
    *,
    backend: str,
    width: int = 8,
    executor: ExecutorName = "torch",
) -> DSpineForCausalLM:
    """Through the registry, as TensorRT-LLM makes it."""
    register_builder(bundle, ModuleSettings("../..", executor, 7), bundle.file("trtllm/dspine_trtllm/__init__.py"))
    mode = package.load("_torch.speculative.interface").SpeculativeDecodingMode.DSPARK
    builder = package.load("_torch.models.modeling_utils").get_registered_draft_model_builder(mode)
    spec = SimpleNamespace(max_draft_len=width - 1, attention_backend=backend, target_layer_ids=None)
    pretrained = SimpleNamespace(max_position_embeddings=2048)
    with torch.device("meta"):  # TensorRT-LLM constructs models without memory
        model = builder(SimpleNamespace(spec_config=spec), SimpleNamespace(pretrained_config=pretrained), None, None)
    model.load_weights({}, weight_mapper=None)
    return give_weights(model, tables, package.device)


def give_weights(model: DSpineForCausalLM, tables: Tables, device: str) -> DSpineForCausalLM:
    """The target's modules, as TensorRT-LLM hands them over once they are loaded."""
    model.logits_processor = logits_processor
    embedding, head = (
        Head(table.to(device), embeds=name == "embed")
        for name, table in (("embed", tables.embed_tokens), ("head", tables.lm_head))
    )
    model.load_weights_from_target_model(SimpleNamespace(model=SimpleNamespace(embed_tokens=embedding), lm_head=head))
    return model


def make_metadata(package: Package, draft: DSpineForCausalLM, hidden: int) -> Any:
    """The worker's own metadata class; its required fields are few enough to name."""
    kind = package.load("_torch.speculative.dflash").DFlashSpecMetadata
    sizes = {
        "max_num_requests": REQUESTS,
        "layers_to_capture": list(draft.target_layer_ids),
        "hidden_size": hidden,
        "max_num_tokens": 256,
    }
    drafted = draft.block_size - 1
    if package.is_stub:
        return kind(**sizes, runtime_draft_len=drafted, device=package.device)
    mode = package.load("_torch.speculative.interface").SpeculativeDecodingMode.DSPARK
    lengths = {"max_draft_len": drafted, "max_total_draft_tokens": drafted}
    metadata = kind(**lengths, spec_dec_mode=mode, dtype=torch.float32, **sizes)
    metadata.runtime_draft_len = drafted
    return metadata


def make_serving_loop(package: Package, draft: DSpineForCausalLM, backend: str, reference: Drafter) -> ServingLoop:
    """The worker around a draft model, and the reference beside it."""
    config, width = draft.drafter_config, draft.block_size
    sizes = {"max_draft_len": width - 1, "tokens_per_gen_step": width}
    options = SimpleNamespace(**sizes, attention_backend=backend, mask_token_id=None)
    worker = package.load("_torch.speculative.dspark").DSparkWorker(options, None)
    worker.set_draft_model(draft)
    metadata = make_metadata(package, draft, config.hidden_size)
    target = ScriptedTarget(config.vocab_size, config.num_taps, config.hidden_size, package.device)
    return ServingLoop(worker, metadata, draft, target, config.target_layer_ids, reference)


def whole_context(keys: torch.Tensor, values: torch.Tensor) -> WorkerContext:
    """Keys and values [G, L, Hkv, C, D] as a cache of one slot per sequence."""
    return WorkerContext(keys.unbind(1), values.unbind(1), torch.arange(keys.shape[0])[:, None])
