"""The C++ tables are generated from the one operator schema."""

from __future__ import annotations

import pytest
from dspine_plugins import schema_header

from dspine_export.errors import UsageError
from dspine_export.ops_schema import OPS, Operand, OpSchema


def test_committed_header_is_current() -> None:
    assert schema_header.HEADER_PATH.read_text(encoding="utf-8") == schema_header.render_header(), (
        "run: python -m dspine_plugins.schema_header"
    )


def test_every_operand_is_in_the_header() -> None:
    text = schema_header.render_header()
    for op in OPS:
        for operand in (*op.inputs, *op.outputs):
            assert f'"{operand.name}"' in text


def test_unknown_dimension_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = OpSchema("Bad", "bad", (Operand("x", "T", ("N", "Q")),), ())
    monkeypatch.setattr(schema_header, "OPS", (bad,))
    with pytest.raises(UsageError, match="unknown dimension"):
        schema_header.render_header()


def test_output_dimension_without_input_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = OpSchema("Bad", "bad", (Operand("x", "T", ("N",)),), (Operand("y", "T", ("N", "B-1")),))
    monkeypatch.setattr(schema_header, "OPS", (bad,))
    with pytest.raises(UsageError, match="no input dimension"):
        schema_header.render_header()
