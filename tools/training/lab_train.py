"""The lab's training command: arms of one seed in lock-step, in slices of time."""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tools.training.arms import ARMS, Starts, arm_objective, arm_shape
from tools.training.checkpoint import load_drafter
from tools.training.data import Corpus, load_corpus
from tools.training.drafter import DrafterShape, TrainDrafter, _Attention, norm_rotate
from tools.training.graph_optimiser import GraphOptimiser
from tools.training.lab_files import is_trained, save_arm
from tools.training.lockstep import Learner, LockStep, make_inputs, ordered_batches
from tools.training.objective import Objective, ObjectiveConfig
from tools.training.optimiser import learning_rate
from tools.training.target import Target, load_target

WINDOW = 50  # steps whose means make one entry of the log
FIT_AFTER = 100  # steps after which the time of a step is known


def base_shape(a: argparse.Namespace, target: Target) -> DrafterShape:
    """The sizes all arms share."""
    t = target.shape
    return DrafterShape(
        hidden_size=t.hidden_size, num_layers=a.layers, num_heads=t.num_heads, num_kv_heads=t.num_kv_heads, head_dim=t.head_dim,
        intermediate_size=a.intermediate_size, vocab_size=t.vocab_size, taps=tuple(a.taps), block_size=a.block_size,
        mask_token_id=a.mask_token_id, rank=a.rank, message_size=a.message_size, top_k=a.top_k, rms_norm_eps=1e-6,
        rope_theta=t.rope_theta,
    )  # fmt: skip


@torch.no_grad()
def tap_scale(target: Target, corpus: Corpus, a: argparse.Namespace) -> Tensor:
    """Root mean square of every tapped column over a batch that no seed changes (see `tools.train_drafter.column_scale`)."""
    batch = next(ordered_batches(corpus, a.sequences, 0, a.widths))
    tapped, _ = target.forward(batch.ids.to(target.device), tuple(a.taps))
    columns = torch.arange(batch.ids.shape[1])
    inside = ((columns > 0) & (columns < batch.lengths[:, None])).to(target.device)
    return tapped[inside].float().square().mean(0).sqrt().clamp_min(1e-3)


def start_from(drafter: TrainDrafter, folder: Path, target: Target, scale: Tensor) -> None:
    """Take the weights of the checkpoint ``folder``, whose sizes must be the drafter's (the number of candidates is no size)."""
    ready = load_drafter(folder, target)
    if replace(ready.shape, top_k=drafter.shape.top_k) != drafter.shape:
        raise SystemExit(f"{folder} cannot be continued: it holds {ready.shape}, this run trains {drafter.shape}")
    drafter.load_state_dict(ready.state_dict())
    with torch.no_grad():  # the checkpoint's fc reads raw taps
        drafter.fc.weight.mul_(scale)
        drafter.tap_scale.copy_(scale)


class Run:
    """The training of one seed: learners, where they stand, what was logged."""

    def __init__(self, a: argparse.Namespace, seed: int, letters: list[str], starts: Starts, corpus: Corpus) -> None:
        self.a, self.seed, self.corpus, self.target = a, seed, corpus, starts.target
        scale, base, gpu = tap_scale(self.target, corpus, a), base_shape(a, self.target), self.target.device.type == "cuda"
        self.learners = []
        for letter in letters:
            drafter = starts.build(arm_shape(ARMS[letter], base, a.head_rank), seed)
            if a.init is None:
                drafter.tap_scale.copy_(scale)
            else:
                start_from(drafter, a.init, self.target, scale)
            config = arm_objective(ARMS[letter])
            objective = Objective(config, self.target.head, compiled=gpu and not a.no_compile, candidates=config.refine)
            self.learners.append(Learner(ARMS[letter], seed, drafter, objective, GraphOptimiser(drafter, a.lr)))
        self.lock = LockStep(self.learners, self.target, scale, graph=gpu and not a.no_graphs)
        self.step, self.steps, self.seconds = 0, a.steps, 0.0
        self.log: list[dict[str, Any]] = []
        self.marked: tuple[int, float] | None = None  # a step and when it was over, to tell the pace
        self.state_path = a.out / f"state_{''.join(letters)}{seed}.pt"
        if self.state_path.is_file():
            self._resume()

    def _resume(self) -> None:
        saved = torch.load(self.state_path, map_location=self.target.device, weights_only=True)
        self.step, self.steps, self.seconds, self.log = saved["step"], saved["steps"], saved["seconds"], saved["log"]
        with torch.no_grad():
            for learner in self.learners:
                for own, value in zip(learner.tensors(), saved["tensors"][learner.name], strict=True):
                    own.copy_(value)
        print(f"seed {self.seed}: goes on at step {self.step} of {self.steps}", flush=True)

    def keep(self) -> None:
        """Write everything the next slice needs."""
        tensors = {learner.name: [t.detach() for t in learner.tensors()] for learner in self.learners}
        saved = {"step": self.step, "steps": self.steps, "seconds": self.seconds, "log": self.log, "tensors": tensors}
        torch.save(saved, self.state_path)
        print(f"seed {self.seed}: kept at step {self.step} of {self.steps} in {self.state_path.name}", flush=True)

    def advance(self, deadline: float) -> bool:
        """Train until done (True) or until ``deadline`` on the monotonic clock (False)."""
        batches = ordered_batches(self.corpus, self.a.sequences, self.seed, self.a.widths, start=self.step)
        began, first, replaced_until = time.monotonic(), self.step, ObjectiveConfig()
        while self.step < self.steps:
            progress = self.step / self.steps
            alignment, replacement = replaced_until.schedule(progress)
            if self.a.init is not None:
                replacement = 0.0  # a help for the first steps only
            rate, left = learning_rate(self.step, self.steps, self.a.warmup), ObjectiveConfig.left(progress)
            self.lock.step(make_inputs(next(batches), self.a.anchors, self.seed, self.step, replacement, alignment, rate, left))
            self.step += 1
            if self.step % WINDOW == 0 or self.step == self.steps:
                self._report(self.seconds + time.monotonic() - began)
                self._fit(began, first)
                if time.monotonic() > deadline and self.step < self.steps:
                    self.seconds += time.monotonic() - began
                    return False
        self.seconds += time.monotonic() - began
        return True

    def _fit(self, began: float, first: int) -> None:
        """Once, early: fewer steps when they would not fit, for all arms alike."""
        if self.a.fit_seconds is None or first > 0 or self.step != 2 * FIT_AFTER or self.marked is None:
            return
        pace = (time.monotonic() - self.marked[1]) / (self.step - self.marked[0])
        possible = int(self.step + max(self.a.fit_seconds - (time.monotonic() - began), 0) / pace)
        if possible < self.steps:
            print(f"seed {self.seed}: {self.steps} steps would not fit, {possible} do ({pace * 1000:.0f} ms a step)", flush=True)
            self.steps = max(possible, self.step + 1)

    def _report(self, seconds: float) -> None:
        count = self.step - (self.log[-1]["step"] if self.log else 0)
        entry: dict[str, Any] = {"step": self.step, "seconds": round(seconds, 1)}
        for learner in self.learners:
            entry[learner.name] = {name: round(float(value) / count, 4) for name, value in learner.sums.items()}
            for value in learner.sums.values():
                value.zero_()
        self.log.append(entry)
        if self.step == FIT_AFTER:
            self.marked = (self.step, time.monotonic())
        bad = [learner.name for learner in self.learners if not math.isfinite(entry[learner.name]["loss"])]
        if bad:
            raise SystemExit(f"training diverged by step {self.step}: {', '.join(bad)}")
        if self.step % (5 * WINDOW) == 0 or self.step in (WINDOW, 2 * WINDOW, self.steps):
            print(json.dumps(entry), flush=True)

    def finish(self, about: dict[str, Any]) -> None:
        """Write every arm's folder."""
        for learner in self.learners:
            log = [{"step": e["step"], "seconds": e["seconds"], **e[learner.name]} for e in self.log]
            together = [other.arm.letter for other in self.learners]
            described = {"steps": self.steps, "seconds_together": round(self.seconds, 1), "trained_together": together, **about}
            save_arm(learner, self.a.out / learner.name, self.target.shape.num_layers, {**described, "log": log})
        self.state_path.unlink(missing_ok=True)


def train(a: argparse.Namespace) -> None:
    """Train what is not trained yet; returns early when the slice is over."""
    deadline = time.monotonic() + a.slice_seconds if a.slice_seconds else math.inf
    device = torch.device(a.device)
    a.out.mkdir(parents=True, exist_ok=True)
    todo = {seed: [x for x in a.arms if not is_trained(a.out / f"{x}{seed}")] for seed in a.seeds}
    if not any(todo.values()):
        print("nothing left to train", flush=True)
        return
    target = load_target(a.target, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    corpus = load_corpus(a.corpus)
    if device.type == "cuda" and not a.no_compile:
        torch._dynamo.config.cache_size_limit = 64
        torch._dynamo.config.specialize_float = True
        _Attention.rotary = staticmethod(torch.compile(norm_rotate, dynamic=True))
    starts = Starts(target, a.rank)
    recorded = {name: str(value) if isinstance(value, Path) else value for name, value in vars(a).items() if name != "command"}
    usable = int((corpus.lengths <= max(a.widths)).sum())
    counts = {"corpus_sequences": len(corpus), "usable_sequences": usable, "corpus_tokens": len(corpus.tokens)}
    about = {"arguments": recorded, **counts, "device": _device_name(device), "torch": torch.__version__}
    for seed, letters in todo.items():
        if not letters:
            continue
        run = Run(a, seed, letters, starts, corpus)
        if not run.advance(deadline):
            run.keep()
            return
        run.finish(about)
        print(f"seed {seed}: {' '.join(letters)} trained, {run.steps} steps in {run.seconds:.0f} s", flush=True)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


