"""Lowered graphs against the torch model: random states, several batch sizes and context lengths, ragged lengths, mixed temperatures.

Tokens and candidates must be equal, except where the reference's own logits are within a near-tie, which is counted; floats keep to the
tolerance table. The first tensor that differs is named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from dspine_export.checkpoint.load import Checkpoint
from dspine_export.checkpoint.target import TargetInfo
from dspine_export.errors import VerificationError
from dspine_export.lowering.codes import pair_codes
from dspine_export.lowering.onnx_session import OnnxSession
from dspine_export.lowering.portable import TWIN_FILE
from dspine_export.model.drafter import Drafter
from dspine_export.model.loading import LoadedCheckpoint, warn_of_foreign_codes
from dspine_export.model.output import DraftOutput
from dspine_export.model.state import DraftState
from dspine_export.model.transition import unary_logits
from dspine_export.tolerance import NEAR_TIE, TOLERANCES

CONTEXT_GRAPH = "context.onnx"
DRAFT_GRAPHS = ("draft.onnx", TWIN_FILE)
# (batch, context rows); lengths inside a batch are ragged and include 0 and the full capacity.
CASES = ((1, 1), (1, 33), (2, 7), (3, 64), (5, 24))


@dataclass
class VerificationReport:
    """What was compared and how it came out.

    Attributes:
        graphs: file name -> number of cases compared.
        tokens: tokens compared per graph; near_ties: choices that differ inside a near-tie of the reference.
        largest_error: tensor name -> largest absolute difference seen.
        first_difference: the first tensor outside its bound, with details; None when everything holds.
    """

    dtype: str = "float32"
    graphs: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    near_ties: int = 0
    largest_error: dict[str, float] = field(default_factory=dict)
    first_difference: str | None = None

    @property
    def passed(self) -> bool:
        return self.first_difference is None and bool(self.graphs)


def verify_onnx(
    checkpoint: Checkpoint,
    target: TargetInfo,
    portable_dir: Path,
    *,
    cases: tuple[tuple[int, int], ...] = CASES,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> VerificationReport:
    """Runs both graphs of a portable folder and the fused draft graph's twin in ONNX Runtime against torch, float32.

    Raises:
        BuildError: ONNX Runtime cannot load a graph. A difference does not raise: see `require_passed`.
    """
    drafter = _reference(checkpoint, target)
    report = VerificationReport()
    generator = torch.Generator().manual_seed(seed)
    prepared = [_prepare(drafter, batch, rows, generator) for batch, rows in cases]
    for name in (CONTEXT_GRAPH, *DRAFT_GRAPHS):
        if progress is not None:
            progress(f"comparing {name} with torch")
        session = OnnxSession(portable_dir / name)
        for case in prepared:
            if name == CONTEXT_GRAPH:
                _compare_context(session, case, report)
            else:
                _compare_draft(session, case, report)
            if report.first_difference is not None:
                return report
    return report


def require_passed(report: VerificationReport) -> None:
    """Raises VerificationError (exit code 6) naming the first tensor that differs."""
    if not report.passed:
        raise VerificationError(
            "The exported graphs do not reproduce the torch model",
            where=report.first_difference or "no graph was compared",
            expected="equal tokens, floats within the tolerance table",
            fix="please report this with the checkpoint's config.json; --no-verify builds without the check",
        )


def _reference(checkpoint: Checkpoint, target: TargetInfo) -> Drafter:
    embed = target.read_embed_tokens().float()
    head = embed if target.tie_word_embeddings else target.read_lm_head().float()
    rows = checkpoint.config.vocab_size
    codes = pair_codes(checkpoint, target)
    if codes is not None and checkpoint.codes is not None:
        warn_of_foreign_codes(codes, head[:rows])
    bound = LoadedCheckpoint(checkpoint)
    return bound.bind(embed_tokens=embed[:rows], lm_head=head[:rows], check_codes=False, codes=codes)


@dataclass(frozen=True)
class _Case:
    """One random state with the torch model's answers: context rows from `start` on, and a draft with its unary logits."""

    context_feeds: dict[str, Tensor]
    context: dict[str, Tensor]
    draft_feeds: dict[str, Tensor]
    draft: DraftOutput
    logits: Tensor
    draws: tuple[Tensor, Tensor] | None


def _prepare(drafter: Drafter, batch: int, rows: int, generator: torch.Generator) -> _Case:
    config = drafter.config
    hidden = torch.randn(batch, rows, config.num_taps * config.hidden_size, generator=generator)
    start = torch.randint(0, config.max_position_embeddings, (batch,), generator=generator)
    positions = start[:, None] + torch.arange(rows)
    with torch.no_grad():
        context = dict(
            zip(("new_keys", "new_values"), drafter.model.context_keys_values(hidden, positions), strict=True)
        )
    lengths = torch.randint(0, rows + 1, (batch,), generator=generator)
    lengths[0] = rows
    if batch > 1:
        lengths[1] = 0
    state = drafter.new_state(batch, rows)
    drafter.append_context(state, hidden, lengths)
    feeds, draws = _draft_feeds(drafter, state, generator)
    temperature, uniforms = draws or (None, None)
    anchors = feeds["anchor_ids"]
    draft = drafter.draft_from(state, anchors, temperature, uniforms=uniforms, return_intermediates=True)
    assert draft.hidden_states is not None
    logits = unary_logits(draft.hidden_states[:, 1:], drafter.lm_head)
    return _Case({"target_hidden": hidden, "start_positions": start}, context, feeds, draft, logits, draws)


def _draft_feeds(
    drafter: Drafter, state: DraftState, generator: torch.Generator
) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor] | None]:
    config, batch = drafter.config, state.batch
    feeds = {
        "anchor_ids": torch.randint(0, config.vocab_size, (batch,), generator=generator),
        "context_lengths": state.lengths,
        "keys": state.keys,
        "values": state.values,
        "embed_tokens": drafter.embed_tokens,
        "lm_head": drafter.lm_head,
    }
    if config.transfer is None:
        return feeds, None
    # greedy and sampled rows in one batch
    temperature = torch.arange(batch).remainder(2).float()
    uniforms = torch.rand(batch, config.block_size - 1, generator=generator)
    return feeds | {"temperature": temperature, "uniforms": uniforms}, (temperature, uniforms)


def _compare_context(session: OnnxSession, case: _Case, report: VerificationReport) -> None:
    got = session.run(case.context_feeds)
    for name, tensor in case.context.items():
        _compare_floats(session.path.name, name, got[name], tensor, report)
    report.graphs[session.path.name] = report.graphs.get(session.path.name, 0) + 1


def _compare_draft(session: OnnxSession, case: _Case, report: VerificationReport) -> None:
    got, want, name = session.run(case.draft_feeds), case.draft, session.path.name
    if not _same_choices(name, got, case, report):
        return
    if want.transition_scores is not None and want.q is not None:
        _compare_floats(name, "transition_scores", got["transition_scores"], want.transition_scores, report)
        _compare_floats(name, "q", got["q"], want.q, report)
    report.graphs[name] = report.graphs.get(name, 0) + 1


def _same_choices(name: str, got: dict[str, Tensor], case: _Case, report: VerificationReport) -> bool:
    """Whether candidates and tokens are equal; differences inside a near-tie are counted and end the comparison of the case."""
    want, logits = case.draft, case.logits
    report.tokens += want.tokens.numel()
    pairs = [("unrefined_tokens", want.unrefined_tokens.unsqueeze(-1), got["unrefined_tokens"].unsqueeze(-1))]
    if want.candidate_ids is not None:
        pairs.insert(0, ("candidate_ids", want.candidate_ids, got["candidate_ids"]))
    for tensor, expected, actual in pairs:
        differs = expected != actual
        if not bool(differs.any()):
            continue
        gap = (logits.gather(-1, expected) - logits.gather(-1, actual)).abs()
        if bool((gap[differs] > NEAR_TIE).any()):
            return _fail(report, name, tensor, f"{int(differs.sum())} of {differs.numel()} ids differ")
        report.near_ties += int(differs.sum())
        report.graphs[name] = report.graphs.get(name, 0) + 1
        return False
    differs = want.tokens != got["tokens"]
    if not bool(differs.any()):
        return True
    parted = differs.any(dim=1).nonzero().flatten().tolist()
    if all(_is_near_tie(want, got["tokens"], case.draws, row) for row in parted):
        report.near_ties += int(differs.sum())
        report.graphs[name] = report.graphs.get(name, 0) + 1
        return False
    return _fail(report, name, "tokens", f"{int(differs.sum())} of {differs.numel()} tokens differ")


def _is_near_tie(want: DraftOutput, tokens: Tensor, draws: tuple[Tensor, Tensor] | None, row: int) -> bool:
    """Whether one sequence's walks part at a near-tie of the reference; what follows the parting is a consequence."""
    if want.candidate_ids is None or want.transition_scores is None or want.q is None or draws is None:
        return False
    temperature, uniforms = draws
    slot = int((want.tokens[row] != tokens[row]).nonzero()[0])
    ids = want.candidate_ids[row]
    places = [(ids[slot] == token).nonzero().flatten() for token in (want.tokens[row, slot], tokens[row, slot])]
    if any(place.numel() != 1 for place in places):
        return False
    low, high = sorted(int(place) for place in places)
    if float(temperature[row]) > 0:  # the draw lies on the border between the two
        borders = want.q[row, slot].cumsum(0)[low:high]
        return bool(((borders - uniforms[row, slot]).abs() <= NEAR_TIE).all())
    before = int((ids[slot - 1] == want.tokens[row, slot - 1]).nonzero()[0]) if slot else 0
    scores = want.transition_scores[row, slot, before]
    return bool((scores[low] - scores[high]).abs() <= NEAR_TIE)


def _compare_floats(graph: str, tensor: str, got: Tensor, want: Tensor, report: VerificationReport) -> None:
    bound = TOLERANCES[report.dtype]
    error = (got.double() - want.double()).abs()
    worst = float(error.max()) if error.numel() else 0.0
    report.largest_error[tensor] = max(report.largest_error.get(tensor, 0.0), worst)
    allowed = bound.absolute + bound.relative * want.double().abs()
    if not bool((error <= allowed).all()):  # NaN fails too
        _fail(report, graph, tensor, f"largest difference {worst:.3e}, shape {list(want.shape)}")


def _fail(report: VerificationReport, graph: str, tensor: str, detail: str) -> bool:
    if report.first_difference is None:
        report.first_difference = f"{graph}: {tensor}: {detail}"
    return False
