"""out = Σᵢ exp(lseᵢ - lse) outᵢ, lse = log Σᵢ exp(lseᵢ): attention over parts of the keys, merged.

*Matches* merges of two to eight parts, by the log-sum-exps of their scores, in float32: softmax over the stack of them,
exponentials of what is left of a maximum or of the log-sum-exp of all, a sigmoid of the difference of two, or one merge
after the other. *Replaces with* `npu_attention_update`, which reads each part once.
"""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Group, Rule, lowering, pattern, tensor
from patterns.attention.words import PARTS

OUTPUT = 0
"""The update type that gives the merged output, and no log-sum-exp."""


@dataclass(frozen=True)
class _Numbered(Group):
    """Fields out0, lse0, out1, …, of parts of which there are two at least."""

    def of(self, name: str) -> list[Any]:
        """The outputs or the log-sum-exps of all parts that there are."""
        every = (getattr(self, f"{name}{number}") for number in range(PARTS))
        return [each for each in every if each is not None]

    def merged(self, p):
        """The term of their merge."""
        return p.lse_merge(**vars(self))


_FIELDS = (("out", "*B D"), ("lse", "*B"))
Parts: Any = make_dataclass(
    "Parts",
    [(f"{name}{n}", Any, tensor(dims, optional=n > 1)) for n in range(PARTS) for name, dims in _FIELDS],
    bases=(_Numbered,),
    frozen=True,
)
"""Outputs and log-sum-exps of attention over parts of the keys."""


@dataclass(frozen=True)
class AttentionUpdate(Rule):
    """Outputs of attention over parts of the keys, merged by their log-sum-exps."""

    aliases = ("lse_merge",)

    def reference(self, outs: list[Tensor], lses: list[Tensor]) -> Tensor:
        """The meaning: outs [*B, D] and log-sum-exps [*B] of each part → [*B, D]."""
        weights = torch.stack(lses).softmax(0).unsqueeze(-1)
        return (weights * torch.stack(outs)).sum(0)

    @pattern
    def rounded(self, p, parts: Any = Parts):
        """In the dtype of the parts."""
        return p.as_dtype(parts.merged(p), parts.out0)

    @pattern
    def wide(self, p, parts: Any = Parts):
        """In the dtype in which it is computed."""
        return parts.merged(p)

    @lowering
    def stored(self, parts):
        """The parts as they are stored."""
        return _merged(parts.of("out"), parts.of("lse"))

    @lowering
    def widened(self, parts):
        """The parts in the dtype of their log-sum-exps, which the result has."""
        return _merged([each.to(parts.lse0.dtype) for each in parts.of("out")], parts.of("lse"))


def _merged(outs: list[Tensor], lses: list[Tensor]) -> Tensor:
    """One row after the other: [R, D] and [R]."""
    rows = [each.reshape(-1, each.shape[-1]) for each in outs]
    y, _ = torch.ops.npu.npu_attention_update([each.reshape(-1) for each in lses], rows, OUTPUT)
    return y.reshape(outs[0].shape)
