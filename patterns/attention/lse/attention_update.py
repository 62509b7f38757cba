"""out = Σᵢ exp(lseᵢ - lse) outᵢ, lse = log Σᵢ exp(lseᵢ): attention over parts of the keys, merged.

*Matches* merges of two to eight parts, by the log-sum-exps of their scores, in float32: softmax over the stack of the
log-sum-exps, exponentials of their differences to the maximum or to the total log-sum-exp, a sigmoid of the difference
of two, or a chain of merges of two. *Replaces with* `npu_attention_update`, which reads each part once.
"""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Group, Rule, lowering, pattern, tensor
from patterns.attention.words import PARTS

OUTPUT = 0
"""The update type that returns the merged output alone, without a log-sum-exp."""


@dataclass(frozen=True)
class _PartFields(Group):
    """The fields out0, lse0, out1, … of two or more parts."""

    def listed(self, name: str) -> list[Any]:
        """List the fields `name` ("out" or "lse") of all parts."""
        every = (getattr(self, f"{name}{number}") for number in range(PARTS))
        return [each for each in every if each is not None]

    def merged(self, p):
        """Build the term of the merge of the parts."""
        return p.lse_merge(**vars(self))


_FIELDS = (("out", "*B D"), ("lse", "*B"))
Parts: Any = make_dataclass(
    "Parts",
    [(f"{name}{n}", Any, tensor(dims, optional=n > 1)) for n in range(PARTS) for name, dims in _FIELDS],
    bases=(_PartFields,),
    frozen=True,
)
"""The outputs and log-sum-exps of attention over parts of the keys."""


@dataclass(frozen=True)
class AttentionUpdate(Rule):
    """Outputs of attention over parts of the keys, merged by their log-sum-exps."""

    aliases = ("lse_merge",)

    def reference(self, outs: list[Tensor], lses: list[Tensor]) -> Tensor:
        """Compute the merge [*B, D] of `outs` [*B, D] with log-sum-exps `lses` [*B], one of each part."""
        weights = torch.stack(lses).softmax(0).unsqueeze(-1)
        return (weights * torch.stack(outs)).sum(0)

    @pattern
    def rounded(self, p, parts: Any = Parts):
        """Σᵢ exp(lseᵢ - lse) outᵢ, cast to the dtype of outᵢ"""
        return p.as_dtype(parts.merged(p), parts.out0)

    @pattern
    def wide(self, p, parts: Any = Parts):
        """Σᵢ exp(lseᵢ - lse) outᵢ, in the dtype in which it is computed"""
        return parts.merged(p)

    @lowering
    def stored(self, parts):
        """Emit npu_attention_update on the parts in their own dtype."""
        return _merged(parts.listed("out"), parts.listed("lse"))

    @lowering
    def widened(self, parts):
        """Emit npu_attention_update on parts cast to the dtype of their log-sum-exps, the dtype of the result."""
        return _merged([each.to(parts.lse0.dtype) for each in parts.listed("out")], parts.listed("lse"))


def _merged(outs: list[Tensor], lses: list[Tensor]) -> Tensor:
    """Emit npu_attention_update on `outs` [*B, D] as rows [R, D] and `lses` [*B] as [R]; returns [*B, D]."""
    rows = [each.reshape(-1, each.shape[-1]) for each in outs]
    y, _ = torch.ops.npu.npu_attention_update([each.reshape(-1) for each in lses], rows, OUTPUT)
    return y.reshape(outs[0].shape)
