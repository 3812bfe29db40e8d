"""The lab's table: every arm's acceptance with its interval, differences to the arms the bar names, and the verdict.

The bar was fixed before the run: DSpine passes when the interval of tau(e) - tau(a) lies above 0 at both temperatures. tau(e) minus
the best of b, c, d is reported whatever its sign. The goal, +27.8 % over (a), is the paper's figure for another target and larger drafters.

At temperature 1 a proposal is drawn from q where the method has a joint q (Markov head, lattice) and is the best choice of every slot where
it has none ("t1_public": the bar's reading). An arm without a joint q can also draw every slot on its own from the
whole vocabulary; "t1_best" gives every arm the better of its two ways and is the stricter comparison. Both verdicts are reported.

"t1_k64" and the like: arms with a lattice draft over that many candidates, from the same weights; the others draft as always. Variants of
DSpine's recipe are compared as e is, under "variants", and decide nothing. "bar_without_loops" counts the prompts on which no arm's answer
loops: a loop is drafted almost for nothing, so where many answers loop the plain figure says little.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.training.arms import ARMS, VARIANTS
from tools.training.bootstrap import Resampler, pooled
from tools.training.lab_files import ARM_FILE, EXACT, MEASURED, SLOTS, read_json, write_json
from tools.training.lab_measure import SETTINGS

GOAL = 0.278
Runs = Mapping[str, Sequence[dict[str, Any]]]


def compare(a: argparse.Namespace) -> None:
    """Write the result file and print the table."""
    measured: dict[str, list[dict[str, Any]]] = {}
    described: dict[str, list[dict[str, Any]]] = {}
    exactness: dict[str, Any] = {}
    for folder in sorted(path.parent for out in a.out for path in out.glob(f"*/{MEASURED}")):
        arm, run = read_json(folder / ARM_FILE), read_json(folder / MEASURED)
        if not run.keys() >= SETTINGS.keys():  # a slice ended meanwhile
            continue
        measured.setdefault(arm["letter"], []).append(run)
        described.setdefault(arm["letter"], []).append(arm)
        if (folder / EXACT).is_file():
            exactness[folder.name] = read_json(folder / EXACT)
    if not measured:
        raise SystemExit("no measured arm in " + ", ".join(map(str, a.out)))
    first = next(iter(measured.values()))[0]
    resampler = Resampler(first["sets"])
    result: dict[str, Any] = {
        "what": "Acceptance lab: arms trained on the same blocks, measured in the draft-verify loop", "note": a.note,
        **(read_json(a.about) if a.about else {}),
        "sets": {name: first["sets"].count(name) for name in dict.fromkeys(first["sets"])},
        "max_new_tokens": first["max_new_tokens"], "block_size": first["block_size"],
        "training": _training(described), "arms": {}, "bar": {},
    }  # fmt: skip
    for letter, runs in measured.items():
        entry: dict[str, Any] = {"title": ARMS[letter].title, "seeds": [d["seed"] for d in described[letter]]}
        entry |= {"trained_numbers": described[letter][0].get("trained_numbers")}
        both = (*SETTINGS, *_more(runs))
        result["arms"][letter] = entry | {setting: _setting(resampler, runs, setting, first["sets"]) for setting in both}
        result["arms"][letter] |= {"gain_of_candidates": _gains(resampler, runs)} if _more(runs) else {}
    bars = (*SETTINGS, "t1_public", "t1_best", *_more(measured.get("e", ())))
    result["bar"] = {setting: _bar(resampler, measured, setting, "e") for setting in bars}
    result["bar_without_loops"] = {s: _bar(resampler, measured, s, "e", _straight(measured, s)) for s in SETTINGS}
    result["variants"] = {v: {s: _bar(resampler, measured, s, v) for s in bars} for v in VARIANTS if v in measured}
    for name, hot in (("dspine_passes", "t1_public"), ("dspine_passes_stricter", "t1_best")):
        passed = [_above(result["bar"][s].get("e-a")) for s in ("t0", hot)]
        result[name] = None if None in passed else all(passed)
    result["exactness"] = exactness
    result["slots_at_temperature_1"] = {p.parent.name: read_json(p) for out in a.out for p in sorted(out.glob(f"*/{SLOTS}"))}
    trained = [read_json(path) for out in a.out for path in sorted(out.glob(f"*/{ARM_FILE}"))]
    result["final_training_losses"] = {d["letter"] + str(d["seed"]): d["log"][-1] for d in trained if "log" in d}
    result["trained_not_measured"] = {d["letter"]: d["title"] for d in trained if d["letter"] not in measured}
    write_json(a.result, result)
    _print(result)


def _training(described: Runs) -> dict[str, Any]:
    first = next(iter(described.values()))[0]
    if "adopted" in first:
        return {"adopted": first["adopted"], "shape": first["shape"]}
    keys = ("steps", "seconds_together", "usable_sequences", "corpus_tokens", "device", "torch", "arguments")
    steps = sorted({(d["letter"], d["steps"]) for runs in described.values() for d in runs})
    together = sorted({"".join(d["trained_together"]) for runs in described.values() for d in runs})
    recorded = {key: first[key] for key in keys}
    recorded["arguments"] = {name: _short(value) for name, value in recorded["arguments"].items()}
    return {**recorded, "steps_of_arms": dict(steps), "trained_together": together, "shape": first["shape"]}


def _short(value: Any) -> Any:
    """A path's last part: where a machine keeps its files is nobody's business."""
    return value.rsplit("/", 1)[-1] if isinstance(value, str) else value


def _more(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Settings beyond the usual ones that all runs of an arm have, "t1_k64" say."""
    return sorted(name for name in (runs[0] if runs else {}) if "_k" in name and all(name in run for run in runs))


def _gains(resampler: Resampler, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What other numbers of candidates add to tau, the same weights and prompts."""
    pairs = {name: [pooled([run[s]["answers"] for run in runs]) for s in (name, name.split("_k")[0])] for name in _more(runs)}
    return {name: asdict(resampler.difference(more, own)) for name, (more, own) in pairs.items()}


def _straight(measured: Runs, setting: str) -> NDArray[np.bool_]:
    """Prompts on which no answer of any arm loops."""
    runs = [run[setting]["answers"] for arm in measured.values() for run in arm]
    return np.array([all(not run[i]["looped"] for run in runs) for i in range(len(runs[0]))])


def _setting(resampler: Resampler, runs: Sequence[dict[str, Any]], setting: str, sets: Sequence[str]) -> dict[str, Any]:
    answers = [run[setting]["answers"] for run in runs]
    flat = [entry for run in answers for entry in run]
    calls, whole = sum(e["calls"] for e in flat), sum(e["whole"] for e in flat)
    kept = np.array([e["kept"] for e in flat]).sum(0)
    reached = np.concatenate(([calls], kept[:-1]))
    straight = np.array([all(not run[i]["looped"] for run in answers) for i in range(len(sets))])
    per_set = {}
    for name in dict.fromkeys(sets):
        own = [e for run in answers for e, n in zip(run, sets, strict=True) if n == name]
        per_set[name] = round(sum(e["committed"] for e in own) / max(sum(e["calls"] for e in own), 1), 4)
    return {
        "tau": asdict(resampler.arm(*pooled(answers))),
        "tau_without_loops": asdict(resampler.arm(*pooled(answers, straight))) if straight.any() else None,
        "tau_per_seed": [round(resampler.tau(*pooled([run]))[0], 4) for run in answers],
        "per_set": per_set,
        "kept_per_slot": _shares(kept, calls),
        "kept_when_reached": _shares(kept, reached),
        "covered_per_slot": _shares(np.array([e["covered"] for e in flat]).sum(0), whole),
        "oracle_tau": round(1 + sum(e["oracle"] for e in flat) / max(whole, 1), 4),
        "calls": calls,
        "looped_answers": sum(e["looped"] for e in flat),
        "distinct_1_to_4": np.mean([run[setting]["distinct"] for run in runs], axis=0).round(4).tolist(),
    }  # fmt: skip


def _shares(counts: Any, total: Any) -> list[float]:
    return (counts / np.maximum(total, 1)).round(4).tolist()


def _bar(resampler: Resampler, measured: Runs, setting: str, one: str, keep: NDArray[np.bool_] | None = None) -> dict[str, Any]:
    """Differences of the arm ``one`` to every other over the prompts of ``keep`` (all); "e-best" is to the best of b, c, d."""
    if one not in measured or (keep is not None and not keep.any()):
        return {}
    arms, used = {}, {}
    for letter, runs in measured.items():
        ways = _ways(letter, setting, runs)
        options = {way: pooled([run[way]["answers"] for run in runs], keep) for way in ways}
        used[letter] = max(options, key=lambda way: resampler.tau(*options[way])[0])
        arms[letter] = options[used[letter]]
    table: dict[str, Any] = {"proposals": used} | ({} if keep is None else {"prompts": int(keep.sum())})
    for letter in arms:
        if letter != one:
            table[f"{one}-{letter}"] = asdict(resampler.difference(arms[one], arms[letter]))
            table[f"{one}/{letter}-1"] = asdict(resampler.gain(arms[one], arms[letter]))
    ancestors = {letter: resampler.tau(*arms[letter])[0] for letter in "bcd" if letter in arms}
    if ancestors:
        best = max(ancestors, key=lambda letter: ancestors[letter])
        table |= {"best_ancestor": best, f"{one}-best": table[f"{one}-{best}"]}
    if "a" in arms:
        table["goal_reached"] = bool(table[f"{one}/a-1"]["value"] >= GOAL)
    return table


def _ways(letter: str, setting: str, runs: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """The measured settings an arm may count with."""
    if "_k" in setting:
        return (setting if setting in _more(runs) else setting.split("_k")[0],)
    if setting == "t1_public":
        return ("t1_argmax",) if ARMS[letter].drafts_by == "unary" else ("t1",)
    return ("t1", "t1_argmax") if setting == "t1_best" else (setting,)


def _above(interval: dict[str, float] | None) -> bool | None:
    return None if interval is None else bool(interval["low"] > 0)


def _print(result: dict[str, Any]) -> None:
    for letter, arm in result["arms"].items():
        cells = []
        for setting in SETTINGS:
            tau = arm[setting]["tau"]
            cells.append(f"{setting} {tau['value']:.3f} [{tau['low']:.3f}, {tau['high']:.3f}]")
        straight = arm["t0"]["tau_without_loops"] or {"value": float("nan")}
        extra = f"no loops {straight['value']:.3f}, oracle {arm['t0']['oracle_tau']:.3f}"
        print(f"{letter} {arm['title']:34s} {'  '.join(cells)}  {extra}")
    for one, bars in {"e": result["bar"], **result["variants"]}.items():
        for setting, table in bars.items():
            for pair in (f"{one}-a", f"{one}/a-1", f"{one}-best"):
                if pair in table:
                    print(setting, pair, table.get("best_ancestor", "") if pair.endswith("best") else "", table[pair])
    print("DSpine passes:", result["dspine_passes"], "stricter:", result["dspine_passes_stricter"])
