"""out = Σᵢ exp(lseᵢ - lse) outᵢ, lse = log Σᵢ exp(lseᵢ): attention over parts of the keys, merged.

*Matches* merges of two to eight parts, by the log-sum-exps of their scores, in float32: softmax over the stack of them,
exponentials of what is left of a maximum or of the log-sum-exp of all, a sigmoid of the difference of two, or one merge
after the other. *Replaces with* `npu_attention_update`, which reads each part once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fusion import Rule, lowering, pattern, tensor

OUTPUT = 0
"""The update type that gives the merged output, and no log-sum-exp."""


@dataclass(frozen=True)
class AttentionUpdate(Rule):
    """Outputs of attention over parts of the keys, merged by their log-sum-exps."""

    def reference(self, outs: list[Tensor], sums: list[Tensor]) -> Tensor:
        """The meaning: outs [*B, D] and sums [*B] of each part → [*B, D]."""
        weights = torch.stack(sums).softmax(0).unsqueeze(-1)
        return (weights * torch.stack(outs)).sum(0)

    @pattern
    def rounded(
        self, p, out0=tensor("*B D"), sum0=tensor("*B"), out1=tensor("*B D"), sum1=tensor("*B"),
        out2=tensor("*B D", optional=True), sum2=tensor("*B", optional=True),
        out3=tensor("*B D", optional=True), sum3=tensor("*B", optional=True),
        out4=tensor("*B D", optional=True), sum4=tensor("*B", optional=True),
        out5=tensor("*B D", optional=True), sum5=tensor("*B", optional=True),
        out6=tensor("*B D", optional=True), sum6=tensor("*B", optional=True),
        out7=tensor("*B D", optional=True), sum7=tensor("*B", optional=True),
    ):  # fmt: skip
        """In the dtype of the parts."""
        return p.as_dtype(
            p.merged_parts(
                out0=out0, sum0=sum0, out1=out1, sum1=sum1, out2=out2, sum2=sum2, out3=out3, sum3=sum3,
                out4=out4, sum4=sum4, out5=out5, sum5=sum5, out6=out6, sum6=sum6, out7=out7, sum7=sum7,
            ),
            out0,
        )  # fmt: skip

    @pattern
    def wide(
        self, p, out0=tensor("*B D"), sum0=tensor("*B"), out1=tensor("*B D"), sum1=tensor("*B"),
        out2=tensor("*B D", optional=True), sum2=tensor("*B", optional=True),
        out3=tensor("*B D", optional=True), sum3=tensor("*B", optional=True),
        out4=tensor("*B D", optional=True), sum4=tensor("*B", optional=True),
        out5=tensor("*B D", optional=True), sum5=tensor("*B", optional=True),
        out6=tensor("*B D", optional=True), sum6=tensor("*B", optional=True),
        out7=tensor("*B D", optional=True), sum7=tensor("*B", optional=True),
    ):  # fmt: skip
        """In the dtype in which it is computed."""
        return p.merged_parts(
            out0=out0, sum0=sum0, out1=out1, sum1=sum1, out2=out2, sum2=sum2, out3=out3, sum3=sum3,
            out4=out4, sum4=sum4, out5=out5, sum5=sum5, out6=out6, sum6=sum6, out7=out7, sum7=sum7,
        )  # fmt: skip

    @lowering
    def stored(
        self, out0, out1, out2, out3, out4, out5, out6, out7, sum0, sum1, sum2, sum3, sum4, sum5, sum6, sum7
    ):  # fmt: skip
        """The parts as they are stored."""
        outs, sums = (out0, out1, out2, out3, out4, out5, out6, out7), (sum0, sum1, sum2, sum3, sum4, sum5, sum6, sum7)
        return _merged([each for each in outs if each is not None], [each for each in sums if each is not None])

    @lowering
    def widened(
        self, out0, out1, out2, out3, out4, out5, out6, out7, sum0, sum1, sum2, sum3, sum4, sum5, sum6, sum7
    ):  # fmt: skip
        """The parts in the dtype of their sums, which the result has."""
        outs, sums = (out0, out1, out2, out3, out4, out5, out6, out7), (sum0, sum1, sum2, sum3, sum4, sum5, sum6, sum7)
        wide = [each.to(sum0.dtype) for each in outs if each is not None]
        return _merged(wide, [each for each in sums if each is not None])


def _merged(outs: list[Tensor], sums: list[Tensor]) -> Tensor:
    """One row after the other: [R, D] and [R]."""
    rows = [each.reshape(-1, each.shape[-1]) for each in outs]
    y, _ = torch.ops.npu.npu_attention_update([each.reshape(-1) for each in sums], rows, OUTPUT)
    return y.reshape(outs[0].shape)
