"""What the lab keeps of an arm: a folder ``<letter><seed>`` with its weights, its sizes, its log and its measurements."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tools.training.arms import ARMS, Arm, Starts
from tools.training.checkpoint import load_drafter, save_drafter
from tools.training.drafter import DrafterShape, TrainDrafter
from tools.training.lockstep import Learner
from tools.training.target import load_target

WEIGHTS, ARM_FILE, MEASURED, EXACT, SLOTS = "drafter.safetensors", "arm.json", "measured.json", "exact.json", "slots.json"
SERVABLE = "abekl"  # arms that are a DFlash or a DSpine drafter and nothing else


def is_trained(folder: Path) -> bool:
    """Whether the arm's training has finished: its description is the last file written."""
    return (folder / ARM_FILE).is_file()


def save_arm(learner: Learner, folder: Path, num_target_layers: int, about: dict[str, Any]) -> None:
    """Write bfloat16 weights and the description; `SERVABLE` arms also as a checkpoint that can be served, in ``checkpoint/``."""
    folder.mkdir(parents=True, exist_ok=True)
    drafter = learner.drafter
    drafter.fold()
    state = {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in drafter.state_dict().items()}
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    if learner.arm.letter in SERVABLE:
        save_drafter(drafter, num_target_layers, folder / "checkpoint")
    used = sum(v.numel() for n, v in state.items() if learner.arm.inject or learner.arm.align or not n.startswith("injection."))
    described = {**asdict(learner.arm), "drafts_by": learner.arm.drafts_by, "seed": learner.seed, "trained_numbers": used}
    write_json(folder / ARM_FILE, {**described, "shape": asdict(drafter.shape), **about})


def adopt(a: argparse.Namespace) -> None:
    """The command: make an arm's folder of a DSpine checkpoint trained elsewhere, so that it can be measured beside the lab's."""
    drafter, arm = load_drafter(a.checkpoint, load_target(a.target, torch.device("cpu"), torch.float32)), ARMS[a.folder.name[0]]
    a.folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.to(torch.bfloat16) for name, value in drafter.state_dict().items()}, a.folder / WEIGHTS)
    described = {**asdict(arm), "drafts_by": arm.drafts_by, "seed": int(a.folder.name[1:]), "adopted": a.checkpoint.name}
    write_json(a.folder / ARM_FILE, {**described, "shape": asdict(drafter.shape)})


def load_arm(folder: Path, starts: Starts) -> tuple[Arm, TrainDrafter]:
    """The arm of a folder, ready to draft; its codes come from ``starts``, so the transfer rank must be the one it was trained with."""
    described = read_json(folder / ARM_FILE)
    shape = DrafterShape(**{**described["shape"], "taps": tuple(described["shape"]["taps"])})
    drafter = TrainDrafter(shape, starts.codes.cpu())
    drafter.load_state_dict(load_file(folder / WEIGHTS))
    drafter = drafter.to(starts.target.device).eval()
    drafter.codes = starts.codes
    return ARMS[described["letter"]], drafter


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object."""
    return dict(json.loads(path.read_text()))


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write through a temporary name: a slice that ends meanwhile leaves no half file."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=None if "prompts" in value else 1) + "\n")
    partial.replace(path)
