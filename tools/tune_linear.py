"""Which tile suits each product of a draft pass: times candidates of `dspine_kernels.linear` and the vendor GEMM on cold weights.

    python -m tools.tune_linear --rows 16 128 --out tools/results/tune_linear.json

Weights rotate over copies that together exceed the L2 cache, as they do in a pass.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from dspine_kernels.linear import linear
from dspine_kernels.linear.heuristics import Tile

from tools.gpu_timing import capture, copy_bandwidth_gb_s, replay_us

# name: (N, K, glu) of the Qwen3-8B drafter.
PRODUCTS = {
    "qkv": (6144, 4096, False),
    "o": (4096, 4096, False),
    "gate_up": (12288, 4096, True),
    "down": (4096, 12288, False),
    "readout": (1024, 4096, False),
    "write": (4096, 512, False),
    "lm_head": (151936, 4096, False),
}
COLD_BYTES = 256 << 20


def candidates(rows: int, glu: bool) -> list[Tile]:
    """A small grid around what the heuristic would choose."""
    height = max(16, min(128, rows))
    tiles = []
    for columns in (16, 32, 64, 128):
        for inner in (64, 128, 256):
            for warps, stages in ((4, 4), (4, 6), (8, 4)):
                held = (height + columns * (2 if glu else 1)) * inner * 2 * stages
                if held <= 200_000 and held >= 32_000 and not (warps == 8 and columns * height < 2048):
                    tiles.append(Tile(height, columns, inner, warps, stages))
    return tiles


def measure(name: str, rows: int, budget: int) -> dict[str, object]:
    """Best tiles and the vendor GEMM for one product; microseconds."""
    columns, inner, glu = PRODUCTS[name]
    height = columns * (2 if glu else 1)
    copies = max(1, -(-COLD_BYTES // (height * inner * 2)))
    weights = [torch.randn(height, inner, device="cuda", dtype=torch.bfloat16) / inner**0.5 for _ in range(copies)]
    x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
    gain = torch.ones(inner, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)
    wide = torch.empty(rows, height, device="cuda", dtype=torch.bfloat16)
    times = {}
    for shape in candidates(rows, glu)[:budget]:

        def ours(shape: Tile = shape) -> None:
            for weight in weights:
                linear(x, weight, out, norm_weight=gain, eps=1e-6, glu=glu, shape=shape)

        try:
            times[str(shape)] = replay_us(capture(ours, 1), 5, 3) / copies
        except Exception as error:  # a tile may not fit the chip; that is an answer too
            times[f"{shape}: {type(error).__name__}"] = float("inf")

    def vendor() -> None:
        for weight in weights:
            torch.mm(x, weight.T, out=wide)

    best = sorted(times.items(), key=lambda item: item[1])[:4]
    return {"vendor_us": replay_us(capture(vendor), 5, 3) / copies, "bytes": height * inner * 2, "best": best}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[16])
    parser.add_argument("--budget", type=int, default=100, help="candidates per product")
    parser.add_argument("--products", nargs="+", default=list(PRODUCTS))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    bandwidth = copy_bandwidth_gb_s()
    report: dict[str, object] = {"device": torch.cuda.get_device_name(), "copy_gb_s": bandwidth}
    for rows in arguments.rows:
        for name in arguments.products:
            result = measure(name, rows, arguments.budget)
            floor = int(str(result["bytes"])) / bandwidth / 1e3
            report[f"{name}@{rows}"] = result | {"floor_us": floor}
            print(f"{name}@{rows}: floor {floor:.1f} vendor {result['vendor_us']:.1f}", result["best"], flush=True)
    arguments.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
