"""Build the training prompts from their four sources and drop everything close to an evaluation prompt.

    python -m tools.build_prompts --out prompts.jsonl.gz

Needs ``reasoning-gym`` 0.1.25. The function-writing prompts depend on the installed packages, so another environment gives other
prompts of the same kind; the file's sha256 is printed and recorded with the training results.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import hashlib
import json
import random
import re
from collections.abc import Iterable
from pathlib import Path

from tools.training.prompt_sources import BOXED, chat, function_writing, grade_school_math, reasoning_gym
from tools.training.prompts import read_prompts

SHARED_WORDS = 10  # a run of this many words in common is an overlap
SIMILAR = 0.8  # so is this share of common words, for short prompts
_WORD = re.compile(r"[a-z0-9]+")
_FRAME = re.compile(r"write a solution to the following problem and make sure that it passes the tests", re.IGNORECASE)


def words_of(prompt: str) -> list[str]:
    """Lower-case words, without the phrases that frame whole suites."""
    return _WORD.findall(_FRAME.sub(" ", prompt.replace(BOXED.strip(), " ")).lower())


class Overlap:
    """Tells whether a prompt comes close to one of the evaluation prompts."""

    def __init__(self, prompts: Iterable[str]) -> None:
        self.runs: set[tuple[str, ...]] = set()
        self.by_word: dict[str, set[int]] = collections.defaultdict(set)
        self.sets: list[frozenset[str]] = []
        for prompt in prompts:
            words = words_of(prompt)
            self.runs.update(self._runs(words))
            for word in set(words):
                self.by_word[word].add(len(self.sets))
            self.sets.append(frozenset(words))

    @staticmethod
    def _runs(words: list[str]) -> set[tuple[str, ...]]:
        return {tuple(words[i : i + SHARED_WORDS]) for i in range(max(len(words) - SHARED_WORDS + 1, 0))}

    def hits(self, prompt: str) -> bool:
        """True when the prompt shares a long run of words, or most of its words, with an evaluation prompt."""
        words = words_of(prompt)
        own = frozenset(words)
        if not self.runs.isdisjoint(self._runs(words)):
            return True
        if len(own) > 60:
            return False
        counts = collections.Counter(i for word in own for i in self.by_word.get(word, ()))
        return any(common / len(own | self.sets[i]) >= SIMILAR for i, common in counts.items() if common >= SIMILAR * len(own))


def build(seed: int, scale: float, evaluation: list[Path]) -> list[dict[str, object]]:
    """The prompts in random order, as objects of a prompt file. ``scale`` shrinks the open-ended sources."""
    rng = random.Random(seed)
    sources = {
        "gsm8k_train": grade_school_math(rng),
        "reasoning_gym": reasoning_gym(rng, max(int(64 * scale), 1)),
        "functions": function_writing(rng, max(int(9000 * scale), 1)),
        "chat": chat(rng, max(int(130 * scale), 1)),
    }
    overlap = Overlap(turn for path in evaluation for p in read_prompts(path) for turn in p["turns"])
    rows: list[dict[str, object]] = []
    seen: set[str] = set()
    for source, prompts in sources.items():
        kept = dropped = 0
        for prompt in prompts:
            if prompt in seen:
                continue
            seen.add(prompt)
            if overlap.hits(prompt):
                dropped += 1
                continue
            rows.append({"turns": [prompt], "source": source})
            kept += 1
        print(f"{source}: {kept} prompts, {dropped} dropped for closeness to an evaluation prompt", flush=True)
    rng.shuffle(rows)
    return rows


def main(argv: list[str] | None = None) -> None:
    """Write the prompt file and print its size and sha256."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0)
    default = Path(__file__).resolve().parent.parent / "tests" / "data" / "prompts"
    parser.add_argument("--evaluation", type=Path, default=default, help="folder of evaluation prompt files to stay away from")
    a = parser.parse_args(argv)
    rows = build(a.seed, a.scale, sorted(a.evaluation.glob("*.jsonl")))
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    a.out.write_bytes(gzip.compress(text, mtime=0) if a.out.suffix == ".gz" else text)
    print(f"{len(rows)} prompts, sha256 of the text {hashlib.sha256(text).hexdigest()}")


if __name__ == "__main__":
    main()
