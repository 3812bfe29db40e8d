"""Ways to run DSpine's injections, by whole draft passes in CUDA graphs replayed by turns; DFlash's pass is the measure.

    python -m tools.compare_forms --batches 1 8 --out forms.json

Qwen3-8B's drafter with random weights. Compare within a batch of one run only: the clock falls under load, for all passes alike.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any, get_args

import torch

from dspine_export.model.drafter import Drafter
from dspine_export.runtime.bench.cells import release
from dspine_export.runtime.bench.subjects import QWEN3_8B, kinds, random_drafter
from dspine_export.runtime.bench.timing import capture, replay_us
from dspine_export.runtime.injection_form import Form, packing
from dspine_export.runtime.kernel_pass import CacheView, DraftPass
from dspine_export.runtime.packed_weights import PackedDrafter, pack
from dspine_export.runtime.pass_factory import PassFactory

BASE = "DFlash"


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--batches", type=int, nargs="+", default=[1, 8, 32])
    add("--context", type=int, default=2000)
    add("--forms", choices=get_args(Form), nargs="+", default=list(get_args(Form)))
    add("--fp8", action="store_true", help="both drafters with float8 weights as well")
    add("--samples", type=int, default=25)
    add("--inner", type=int, default=8, help="replays of a sample")
    add("--out", type=Path, required=True)
    return parser.parse_args()


@torch.no_grad()
def measure_batch(
    a: argparse.Namespace,
    batch: int,
    subjects: dict[str, tuple[Drafter, PackedDrafter]],
    narrow: dict[str, PassFactory],
) -> dict[str, Any]:
    """By way: microseconds, per cent over DFlash, and for DSpine's how many tokens equal those of the first form."""
    drafter = subjects["DSpine"][0]
    state = drafter.new_state(batch, a.context + drafter.config.block_size)
    state.keys.normal_()
    state.values.normal_()
    state.lengths.fill_(a.context)
    cache = CacheView(state.keys, state.values, state.lengths)
    passes = {BASE: DraftPass(subjects[BASE][0].config, subjects[BASE][1], cache)}
    passes |= {form: DraftPass(drafter.config, subjects["DSpine"][1], cache, form=form) for form in a.forms}
    passes |= {f"{kind}, float8": made.draft(cache, batch) for kind, made in narrow.items()}
    anchors = torch.randint(drafter.config.mask_token_id, (batch,), device=cache.keys.device)
    graphs = {}
    for name, one in passes.items():
        one.anchor_ids.copy_(anchors)
        graphs[name] = capture(one.launch)
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(a.samples):
        for name, graph in graphs.items():
            samples[name].append(replay_us(graph, samples=1, inner=a.inner))
    first = passes[a.forms[0]].tokens
    found: dict[str, Any] = {}
    for name, one in passes.items():
        time_us, base = median(samples[name]), median(samples[BASE])
        found[name] = {"us": round(time_us, 1), "over_dflash_percent": round((time_us / base - 1) * 100, 2)}
        if name in a.forms:
            found[name]["equal_tokens"] = f"{int((one.tokens == first).sum())} of {first.numel()}"
    return found


def main() -> None:
    """Entry point."""
    a = parse_arguments()
    drafters = {kind: random_drafter(shapes) for kind, shapes in kinds(QWEN3_8B).items()}
    positions = a.context + 2 * QWEN3_8B.block_size
    subjects = {kind: (drafter, pack(drafter, positions, **packing(2))) for kind, drafter in drafters.items()}
    narrow = {kind: PassFactory(drafter, positions, "fp8") for kind, drafter in drafters.items()} if a.fp8 else {}
    report: dict[str, Any] = {
        "what": "ways to run the injections, whole passes by turns",
        "device": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "context": a.context,
        "passes": {},
    }
    for batch in a.batches:
        report["passes"][f"b{batch}"] = found = measure_batch(a, batch, subjects, narrow)
        release()
        print(batch, json.dumps(found), flush=True)
        a.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
