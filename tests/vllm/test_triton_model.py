"""``model.json`` of the Triton repository's vllm flavour: Triton's vLLM backend hands it to ``AsyncEngineArgs`` as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs

from dspine_export.checkpoint.load import open_checkpoint
from dspine_export.checkpoint.pairing import read_target
from dspine_export.pipeline.sources import summarise
from dspine_export.triton.options import Locations, RepositoryOptions
from dspine_export.triton.repository import vllm_arguments
from dspine_export.vllm.files import write_files

from .conftest import BLOCK_SIZE


def test_accepted_by_async_engine_args(
    pair: Any, plugin: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(pair.drafter)
    (tmp_path / "target").symlink_to(pair.target)
    write_files(tmp_path, checkpoint, read_target(pair.target), "float32", "target")
    options = RepositoryOptions(flavors=("vllm",), max_slots=4, max_seq_len=96)
    document = vllm_arguments(options, Locations("bundle", "target", "vllm"), summarise(checkpoint))
    monkeypatch.chdir(tmp_path)  # the server's working directory is the repository
    config = AsyncEngineArgs(**json.loads(json.dumps(document))).create_engine_config()
    speculative = config.speculative_config
    assert (speculative.method, speculative.num_speculative_tokens) == ("dspark", BLOCK_SIZE - 1)
    assert speculative.draft_model_config._architecture == "DSpineDraftModel"
    assert (config.model_config.max_model_len, config.scheduler_config.max_num_seqs) == (96, 4)
