"""Generates `include/dspine/schema_generated.h` from the operator schema, the only place where operands are declared.

`python -m dspine_plugins.schema_header` rewrites the header; `--check` exits with 1 when the committed file is out of date.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from dspine_export.errors import UsageError
from dspine_export.ops_schema import DOMAIN, OPS, VERSION, Operand, OpSchema

HEADER_PATH = Path(__file__).resolve().parent / "include" / "dspine" / "schema_generated.h"

_DIM = re.compile(r"^(?:(?P<scale>\d+)\*)?(?P<symbol>[A-Za-z])(?P<offset>[+-]\d+)?$")
_ELEMENT = {"T": "kCompute", "float32": "kFloat32", "int64": "kInt64"}
_SYMBOL_MEANING = {
    "N": ("kBatch", "sequences"),
    "B": ("kBlock", "slots of a block, the anchor included"),
    "d": ("kHidden", "hidden size"),
    "r": ("kRank", "transfer rank"),
    "m": ("kMessage", "message size"),
    "K": ("kCandidates", "candidates of a slot"),
    "V": ("kVocab", "vocabulary rows"),
}


def render_header() -> str:
    """Returns the text of the header for the current operator schema."""
    parts = [_PREAMBLE.format(domain=DOMAIN, version=VERSION, symbols=_symbol_enum())]
    parts.extend(_op_tables(op) for op in OPS)
    names = ", ".join(f"&k{op.op_type}Schema" for op in OPS)
    parts.append(f"inline constexpr OpSchema const* kOps[] = {{{names}}};\n\n}} // namespace dspine\n")
    return "\n".join(parts)


def _symbol_enum() -> str:
    lines = [f"    {name}, //!< {text}" for name, text in _SYMBOL_MEANING.values()]
    return "\n".join([*lines, "    kSymbolCount"])


def _op_tables(op: OpSchema) -> str:
    _check_outputs_follow_inputs(op)
    attributes = ", ".join(f'"{name}"' for name in op.attributes)
    attribute_table = (
        f"inline constexpr char const* k{op.op_type}Attributes[] = {{{attributes}}};\n" if attributes else ""
    )
    attribute_ref = f"k{op.op_type}Attributes" if attributes else "nullptr"
    return (
        f"// {op.doc}\n"
        f"{_operand_table(op.op_type + 'Inputs', op.inputs)}"
        f"{_operand_table(op.op_type + 'Outputs', op.outputs)}"
        f"{attribute_table}"
        f'inline constexpr OpSchema k{op.op_type}Schema{{"{op.op_type}", {len(op.inputs)}, k{op.op_type}Inputs, '
        f"{len(op.outputs)}, k{op.op_type}Outputs, {len(op.attributes)}, {attribute_ref}}};\n"
    )


def _operand_table(name: str, operands: tuple[Operand, ...]) -> str:
    rows = []
    for operand in operands:
        dims = ", ".join(_dim_literal(dim) for dim in operand.shape)
        rows.append(
            f'    {{"{operand.name}", ElementRule::{_ELEMENT[operand.dtype]}, {len(operand.shape)}, {{{dims}}}}},'
        )
    return "\n".join([f"inline constexpr Operand k{name}[] = {{", *rows, "};\n"])


def _dim_literal(dim: str) -> str:
    match = _DIM.match(dim)
    if match is None or match["symbol"] not in _SYMBOL_MEANING:
        raise UsageError("unknown dimension in the operator schema", got=repr(dim), expected="[scale*]symbol[+-offset]")
    symbol = _SYMBOL_MEANING[match["symbol"]][0]
    return f"{{{symbol}, {match['scale'] or 1}, {int(match['offset'] or 0)}}}"


def _check_outputs_follow_inputs(op: OpSchema) -> None:
    """The plugins copy every output dimension from an input dimension with the same expression."""
    available = {dim for operand in op.inputs for dim in operand.shape}
    for operand in op.outputs:
        for dim in operand.shape:
            if dim not in available:
                raise UsageError(
                    "an output dimension is no input dimension", where=f"{op.op_type}.{operand.name}", got=dim
                )


_PREAMBLE = """\
// Generated from dspine_export/ops_schema.py by `python -m dspine_plugins.schema_header`. Do not edit.
#pragma once

#include <cstdint>

namespace dspine
{{

inline constexpr char kNamespace[] = "{domain}";
inline constexpr char kVersion[] = "{version}";
inline constexpr int32_t kMaxRank = 4;

enum class ElementRule : int32_t
{{
    kCompute, //!< float32 or bfloat16, the same for all operands of one node
    kFloat32,
    kInt64,
}};

enum Symbol : int32_t
{{
{symbols}
}};

//! A dimension, scale * symbol + offset.
struct Dim
{{
    Symbol symbol;
    int32_t scale;
    int32_t offset;
}};

struct Operand
{{
    char const* name;
    ElementRule element;
    int32_t rank;
    Dim dims[kMaxRank];
}};

struct OpSchema
{{
    char const* name;
    int32_t nbInputs;
    Operand const* inputs;
    int32_t nbOutputs;
    Operand const* outputs;
    int32_t nbAttributes; //!< scalar float attributes, all required
    char const* const* attributes;
}};
"""


def main(arguments: list[str]) -> int:
    """Writes the header, or with `--check` reports whether it is current."""
    text = render_header()
    if "--check" in arguments:
        return 0 if HEADER_PATH.read_text(encoding="utf-8") == text else 1
    HEADER_PATH.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
