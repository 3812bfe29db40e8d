"""Stub of `trtllm-serve`: imports the given module directories as the real command does, checks the options, builds the draft model.

Serves nothing. Prints one line that says so.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import yaml

from tensorrt_llm._torch.models.modeling_utils import get_registered_draft_model_builder
from tensorrt_llm.llmapi.llm_args import parse


def import_directory(path: Path) -> None:
    """A directory is imported as the package it is, with its parent on the search path."""
    sys.path.insert(0, str(path.absolute().parent))
    importlib.import_module(path.name)


def main() -> None:
    parser = argparse.ArgumentParser("trtllm-serve (STUB)")
    parser.add_argument("model")
    parser.add_argument("--custom_module_dirs", nargs="+", type=Path, default=[])
    parser.add_argument("--config", type=Path, required=True)
    options = parser.parse_args()
    for directory in options.custom_module_dirs:
        import_directory(directory)
    args = parse(yaml.safe_load(options.config.read_text()), options.model)
    builder = get_registered_draft_model_builder(args.speculative_config.spec_dec_mode)
    assert builder is not None
    config = SimpleNamespace(pretrained_config=SimpleNamespace(max_position_embeddings=4096))
    draft = builder(SimpleNamespace(spec_config=args.speculative_config), config, None, None)
    print(
        f"STUB trtllm-serve {options.model}: draft model {type(draft).__name__}, block {draft.block_size}; nothing is served"
    )


if __name__ == "__main__":
    main()
