"""How a draft pass runs its injections, by its number of rows; measured by whole passes.

plain   a readout, the gates' product, the write, and the next layer's q, k and v: each waits for the one before.
folded  the gates times the readout are weights of the readout's own product (`PackedLayer.folded`).
merged  the next layer's q, k and v do not wait either. With h before the injection, h' after it, W the following projections times
        their norm's gain: W h' = W h + s (W Wr) z, so (W Wr) z is part of the write's product (`PackedLayer.spread`), and 1 / rms of h'
        is a factor of the result. W h is part of the readout's product (`PackedLayer.read`) where that is the vendor's, which
        leaves nothing of the GPU to others; ours runs beside readout, messages and write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from dspine_export.runtime.packed_weights import PackedDrafter

Form = Literal["plain", "folded", "merged"]

# Most rows. Beyond: plain, because the additional products of the others grow with the rows.
MERGED_ROWS, FOLDED_ROWS = 128, 256


def form_for(rows: int, weights: PackedDrafter) -> Form:
    """The form for that many rows, as far as the weights were packed for it. Float32 is for comparison: plain."""
    if weights.embed_tokens.element_size() != 2 or weights.layers[0].folded is None:
        return "plain"
    if rows > FOLDED_ROWS:
        return "plain"
    return "merged" if weights.merged and rows <= MERGED_ROWS else "folded"


def packing(element_bytes: int) -> dict[str, bool]:
    """Keywords of `packed_weights.pack` for what `form_for` will choose."""
    return {"folded": element_bytes == 2, "merged": element_bytes == 2}
