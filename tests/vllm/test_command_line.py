"""vLLM's parsers with the aliases, and parsers that never had the options."""

from __future__ import annotations

import argparse

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from dspine_export.vllm.command_line import extend_parser


@pytest.fixture
def parser(plugin: None) -> FlexibleArgumentParser:
    return AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(exit_on_error=False))


@pytest.mark.parametrize(
    ("flag", "value", "name"),
    [
        ("--speculative-model", "dspine", "spec_model"),
        ("--spec-model", "dspine", "spec_model"),
        ("--speculative-method", "dspine", "spec_method"),
        ("--spec-method", "dspine", "spec_method"),
        ("--spec-method", "ngram", "spec_method"),
        ("--num-speculative-tokens", "7", "spec_tokens"),
        ("--speculative_model", "a/b", "spec_model"),
    ],
)
def test_names(flag: str, value: str, name: str, parser: FlexibleArgumentParser) -> None:
    found = getattr(parser.parse_args([flag, value]), name)
    assert str(found) == value


def test_unknown_methods_are_still_refused(parser: FlexibleArgumentParser) -> None:
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        parser.parse_args(["--spec-method", "dspin"])


def test_parser_without_the_options() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--spec-method")
    extend_parser(parser)
    extend_parser(parser)
    assert parser.parse_args(["--speculative-method", "anything"]).spec_method == "anything"
