"""The injection's weights inside vLLM: replicated on every tensor-parallel rank, gates stacked, transfer codes folded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.errors import CheckpointError
from dspine_export.model.injection import AdjacentInjection
from dspine_export.model.token_table import fold_token_table
from dspine_export.vllm.weight_names import CODES, INJECTION_PREFIX, READY, TOKEN_TABLE


class FoldedInjection(AdjacentInjection):
    """`AdjacentInjection` with what the kernels read: stacked gates and the token table.

    Attributes:
        gates: [3m, r], G_r above G_p above M; the three weights of the parent class are views of it.
        token_table: [V, 2m], [M p_v ; G_p p_v].
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        assert config.transfer is not None
        r, m = config.transfer.rank, config.transfer.message_size
        self.gates = nn.Parameter(torch.empty(3 * m, r))
        self.token_table = nn.Parameter(torch.empty(config.vocab_size, 2 * m))
        gates = (self.receiver_gate, self.predecessor_gate, self.message)
        for gate, rows in zip(gates, self.gates.data.chunk(3), strict=True):
            gate.weight = nn.Parameter(rows)
        self.requires_grad_(False)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes all tensors of the injection by canonical name; a SpecForge checkpoint's codes are folded here.

        Raises:
            CheckpointError: tensors missing, unknown or of the wrong shape, codes absent or not ready.
        """
        mine = {f"{INJECTION_PREFIX}{name}": value for name, value in self.named_parameters()}
        mine.pop(f"{INJECTION_PREFIX}gates")
        stored = {name: value for name, value in tensors.items() if name not in (CODES, READY)}
        table = mine.pop(TOKEN_TABLE) if TOKEN_TABLE not in stored else None
        if stored.keys() != mine.keys():
            raise _wrong_names(stored, mine)
        for name, value in mine.items():
            _copy(name, value, stored[name])
        if table is not None:
            self._fold(table, tensors)

    def _fold(self, table: Tensor, tensors: Mapping[str, Tensor]) -> None:
        codes, ready = tensors.get(CODES), tensors.get(READY)
        expected = (table.shape[0], self.rank)
        if codes is None or tuple(codes.shape) != expected or (ready is not None and not bool(ready.all())):
            raise CheckpointError(
                "The drafter brings no usable transfer codes",
                where=f"{CODES}, {READY}",
                got="no transfer_codes" if codes is None else f"{list(codes.shape)}, ready: {ready}",
                expected=f"{CODES} {list(expected)} with {READY} true, or {TOKEN_TABLE} {list(table.shape)}",
                fix="dspine-export build --target vllm resolves the codes and writes the table",
            )
        table.copy_(fold_token_table(codes, self.message.weight, self.predecessor_gate.weight))


def _copy(name: str, parameter: Tensor, value: Tensor) -> None:
    if parameter.shape != value.shape:
        raise CheckpointError(
            f"Tensor {name} has the wrong shape", got=list(value.shape), expected=list(parameter.shape)
        )
    parameter.copy_(value)


def _wrong_names(stored: Iterable[str], expected: Iterable[str]) -> CheckpointError:
    missing, unknown = sorted(set(expected) - set(stored)), sorted(set(stored) - set(expected))
    return CheckpointError(
        "The drafter's injection tensors are not those of a DSpine drafter",
        got=f"missing {missing[:6]}, unknown {unknown[:6]}",
        expected=f"{INJECTION_PREFIX}* for every layer",
    )
