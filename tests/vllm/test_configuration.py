"""Every way to ask for ``dspine`` ends in the same engine configuration."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from dspine_export.vllm.drafter_lookup import add_to_registry

from .conftest import BLOCK_SIZE, Configure, Edit

LENGTH = BLOCK_SIZE - 1


def check(config: Any, drafter: Path, length: int = LENGTH) -> None:
    speculative = config.speculative_config
    draft = speculative.draft_model_config
    assert (speculative.method, speculative.num_speculative_tokens) == ("dspark", length)
    assert (draft._architecture, Path(draft.model)) == ("DSpineDraftModel", drafter)
    assert (draft.hf_config.sample_from_anchor, draft.hf_config.dspark_bonus_anchor) == (False, True)
    assert draft.hf_config.dflash_config == {"mask_token_id": 319, "target_layer_ids": [0, 2], "causal": True}
    assert draft.hf_config.eagle_aux_hidden_state_layer_ids == [1, 3]
    assert config.num_lookahead_tokens == length + 1, "a slot for the anchor as well"


def parse(*arguments: str) -> EngineArgs:
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    return AsyncEngineArgs.from_cli_args(parser.parse_args(list(arguments)))


def test_by_method_and_path(pair: Any, configure: Configure) -> None:
    config = configure({"method": "dspine", "model": str(pair.drafter)})
    check(config, pair.drafter)
    pickle.loads(pickle.dumps(config.speculative_config.draft_model_config))  # vLLM sends it to its other processes


@pytest.mark.parametrize("method", [None, "dspark"])
def test_a_dspine_directory_is_recognised(method: str | None, pair: Any, configure: Configure) -> None:
    check(configure({"method": method, "model": str(pair.drafter)}), pair.drafter)


@pytest.mark.parametrize("asked", ["fp8", "fp8_per_channel", "fp8_per_tensor"])
def test_float8_of_the_drafter(asked: str, pair: Any, configure: Configure) -> None:
    """The target stays as it is; `fp8` is one scale per output channel."""
    config = configure({"method": "dspine", "model": str(pair.drafter), "quantization": asked}, dtype="bfloat16")
    check(config, pair.drafter)
    wanted = "fp8_per_tensor" if asked == "fp8_per_tensor" else "fp8_per_channel"
    assert config.speculative_config.draft_model_config.quantization == wanted
    assert config.model_config.quantization is None


@pytest.mark.parametrize("length", [1, 4, LENGTH])
def test_shorter_drafts(length: int, pair: Any, configure: Configure) -> None:
    options = {"method": "dspine", "model": str(pair.drafter), "num-speculative-tokens": length}
    check(configure(options), pair.drafter, length)


def test_by_variable(pair: Any, configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPINE_DRAFTER", str(pair.drafter))
    check(configure({"model": "dspine"}), pair.drafter)
    check(configure({"method": "dspine"}), pair.drafter)


def test_by_registry(pair: Any, configure: Configure) -> None:
    add_to_registry(str(pair.target), pair.drafter)
    check(configure({"model": "dspine"}), pair.drafter)


@pytest.mark.parametrize("prefix", ["--spec", "--speculative"])
def test_by_flags(prefix: str, pair: Any, configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = {"--spec": "--spec-tokens", "--speculative": "--num-speculative-tokens"}[prefix]
    model = ("--model", str(pair.target))
    given = parse(*model, f"{prefix}-method", "dspine", f"{prefix}-model", str(pair.drafter), tokens, "5")
    flags = {name: getattr(given, name) for name in ("spec_method", "spec_model", "spec_tokens")}
    check(configure(**flags), pair.drafter, 5)
    monkeypatch.setenv("DSPINE_DRAFTER", str(pair.drafter))
    check(configure(spec_model=parse(*model, "--speculative-model", "dspine").spec_model), pair.drafter)


def test_the_word_without_a_drafter(configure: Configure, pair: Any) -> None:
    with pytest.raises(ValueError, match="no drafter is known for this target") as caught:
        configure({"model": "dspine"})
    assert "DSPINE_DRAFTER" in str(caught.value) and "--register" in str(caught.value)


def test_hf_overrides_of_the_target_still_apply(pair: Any, configure: Configure) -> None:
    config = configure({"method": "dspine", "model": str(pair.drafter)}, hf_overrides=_marked)
    check(config, pair.drafter)
    assert config.model_config.hf_config.marked and config.speculative_config.draft_model_config.hf_config.marked
    assert config.model_config.hf_overrides is _marked


def test_size_aliases_of_the_transfer_space(pair: Any, configure: Configure, edited: Edit) -> None:
    sizes = {"transfer_dim": 32, "message_dim": 16, "top_k": 8}
    drafter = edited(pair.drafter, dspine_config=sizes)
    found = configure({"method": "dspine", "model": str(drafter)}).speculative_config.draft_model_config.hf_config
    assert {"transfer_rank": 32, "message_size": 16, "top_k": 8}.items() <= found.dspine_config.items()


def test_requests_are_limited_to_what_a_draft_pass_holds(pair: Any, configure: Configure) -> None:
    options = {"method": "dspine", "model": str(pair.drafter)}
    config = configure(options, max_num_seqs=64, max_num_batched_tokens=256)
    assert config.scheduler_config.max_num_active_seqs == 256 // BLOCK_SIZE
    assert configure(options, max_num_seqs=16, max_num_batched_tokens=256).scheduler_config.max_num_active_seqs is None


def _marked(hf_config: Any) -> Any:
    hf_config.marked = True
    return hf_config
