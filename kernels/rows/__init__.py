"""Row-wise steps between the matrix products: embedding, norm, SwiGLU, and the injection's write with the following norm."""

from dspine_kernels.rows.kernel import embed_block, rms_norm, silu_mul, write_and_norm
from dspine_kernels.rows.merged import write_and_project
from dspine_kernels.rows.reference import rms_norm_reference, silu_mul_reference, write_and_norm_reference
from dspine_kernels.rows.rounded import round_rows, round_rows_reference

__all__ = [
    "embed_block",
    "rms_norm",
    "rms_norm_reference",
    "round_rows",
    "round_rows_reference",
    "silu_mul",
    "silu_mul_reference",
    "write_and_norm",
    "write_and_norm_reference",
    "write_and_project",
]
