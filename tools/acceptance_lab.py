"""The acceptance lab: DSpine, its ancestors and its ablations trained on the same blocks, measured in the same draft-verify loop.

    python -m tools.acceptance_lab train   --target TARGET --corpus corpus.xz --out LAB --arms a b c d e f g h --steps 2000
    python -m tools.acceptance_lab measure --target TARGET --out LAB --prompts tests/data/prompts/*.jsonl
    python -m tools.acceptance_lab exact   --target TARGET --out LAB --prompts tests/data/prompts/*.jsonl
    python -m tools.acceptance_lab slots   --target TARGET --out LAB --prompts tests/data/prompts/*.jsonl
    python -m tools.acceptance_lab compare --out LAB --result tools/results/acceptance_b8.json

Every arm has a folder of its own and whatever is there is not done again, so work may come in slices: `train` stops after
``--slice-seconds``, keeps its state beside the folders and goes on from there the next time; the others skip finished arms.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from tools.training.arms import ARMS, LADDER
from tools.training.lab_compare import compare
from tools.training.lab_files import adopt
from tools.training.lab_measure import exact, measure
from tools.training.lab_slots import slots
from tools.training.lab_train import train


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line; `train` records all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    _train_arguments(commands.add_parser("train", help="train arms in lock-step").add_argument)
    looks = {
        "measure": "acceptance in the draft-verify loop", "exact": "the loop against plain decoding",
        "slots": "expected acceptance of every slot at temperature 1",
    }  # fmt: skip
    for name, text in looks.items():
        add = commands.add_parser(name, help=text).add_argument
        _common_arguments(add)
        add("--prompts", type=Path, nargs="+", required=True, help="prompt files; the name of a file is the name of its set")
        add("--per-set", type=int, help="use only the first prompts of every set")
        add("--max-new-tokens", type=int, default=256)
        add("--rows", type=int, default=1024, help="sequences decoded at once")
        add("--only", nargs="+", choices=sorted(ARMS), help="arms to look at")
        add("--seeds", type=int, nargs="+", help="seeds to look at")
        add("--candidates", type=int, nargs="*", default=[], help="other numbers of candidates to measure lattices with as well")
        add("--draws", type=int, default=2000, help="draws per prefix of the chi-square test")
    add = commands.add_parser("adopt", help="a folder for a checkpoint trained elsewhere, to be measured").add_argument
    add("--target", type=Path, required=True)
    add("--checkpoint", type=Path, required=True)
    add("--folder", type=Path, required=True, help="LAB/<letter><seed>")
    add = commands.add_parser("compare", help="tables and intervals from the measured arms").add_argument
    add("--out", type=Path, nargs="+", required=True, help="lab folders; arms of one letter are pooled")
    add("--result", type=Path, required=True)
    add("--note", default="", help="a sentence for the result file")
    add("--about", type=Path, help="a JSON object for the result file: date, card, commit, commands")
    return parser.parse_args(argv)


def _common_arguments(add: Callable[..., object]) -> None:
    add("--target", type=Path, required=True, help="Hugging Face directory of the target")
    add("--out", type=Path, required=True, help="lab folder")
    add("--rank", type=int, default=256, help="rank of the transfer space")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def _train_arguments(add: Callable[..., object]) -> None:
    _common_arguments(add)
    add("--corpus", type=Path, required=True, help="file written by tools.write_corpus")
    add("--arms", nargs="+", choices=sorted(ARMS), default=list(LADDER), help="an arm learns the same whatever the others beside it")
    add("--seeds", type=int, nargs="+", default=[1], help="one training after the other; arms of one seed train together")
    add("--steps", type=int, default=2000)
    add("--init", type=Path, help="start every arm from this checkpoint instead of fresh weights")
    add("--fit-seconds", type=float, help="lower --steps, early and for all arms alike, to what this time allows")
    add("--slice-seconds", type=float, help="stop after this time and keep the state for the next slice")
    add("--sequences", type=int, default=64, help="sequences per step")
    add("--anchors", type=int, default=32, help="blocks per sequence")
    add("--lr", type=float, default=4e-3, help="peak learning rate, the same for every arm")
    add("--warmup", type=float, default=0.03, help="share of the run")
    add("--widths", type=int, nargs="+", default=[192, 256, 320, 384, 512, 704], help="padded lengths; longer sequences are left out")
    add("--layers", type=int, default=4)
    add("--intermediate-size", type=int, default=768)
    add("--block-size", type=int, default=8)
    add("--top-k", type=int, default=16)
    add("--message-size", type=int, default=128)
    add("--head-rank", type=int, default=128, help="rank of the ancestors' heads")
    add("--taps", type=int, nargs="+", default=[1, 8, 15, 22, 28], help="target layers whose output is read, 0-based")
    add("--mask-token-id", type=int, default=16, help="a token the target never writes")
    add("--no-graphs", action="store_true", help="on a GPU: launch every kernel anew")
    add("--no-compile", action="store_true", help="on a GPU: no compiled parts")


def main(argv: list[str] | None = None) -> None:
    """Run one command."""
    arguments = parse_arguments(argv)
    commands = {"train": train, "measure": measure, "exact": exact, "slots": slots, "adopt": adopt, "compare": compare}
    commands[arguments.command](arguments)


if __name__ == "__main__":
    main()
