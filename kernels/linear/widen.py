"""Float8 (e4m3) weights as bfloat16, in registers, four at a time.

A GPU of compute capability 9.0 converts sixteen values a clock and multiprocessor, which is less than its memory brings. Bits moved by
integer instructions are several times as many: the seven bits of exponent and fraction, put where bfloat16 has the last of its exponent
and the first of its fraction, are the number times 2^-120, subnormal ones included, and one multiplication takes that back.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from dspine_kernels.dependent import is_recent
from torch import Tensor
from triton.runtime.jit import JITFunction


@triton.jit
def widened(values, like, BITS: tl.constexpr):
    """`values` in the type of `like`; BITS: float8_e4m3fn to bfloat16, none of them NaN."""
    if BITS:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high, a, b, factor;
            prmt.b32 low, $2, 0, 0x1404;
            prmt.b32 high, $2, 0, 0x3424;
            shr.u32 a, low, 4;
            shr.u32 b, high, 4;
            and.b32 a, a, 0x07F007F0;
            and.b32 b, b, 0x07F007F0;
            lop3.b32 a, low, 0x80008000, a, 0xEA;
            lop3.b32 b, high, 0x80008000, b, 0xEA;
            mov.b32 factor, 0x7B807B80;
            mul.rn.bf16x2 $0, a, factor;
            mul.rn.bf16x2 $1, b, factor;
            }""",
            "=r,=r,r", [values.to(tl.uint8, bitcast=True)], dtype=tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    return values.to(like.dtype)


def by_bits(weight: Tensor, x: Tensor) -> bool:
    """Whether `widened` may move bits: from compute capability 9.0, where bfloat16 numbers are multiplied in pairs."""
    native = isinstance(widened, JITFunction) and is_recent(x.device)
    return native and weight.dtype == torch.float8_e4m3fn and x.dtype == torch.bfloat16
