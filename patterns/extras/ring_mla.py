"""out, lse = softmax(scale · q kᵀ + mask) v, log Σ exp(scale · q kᵀ + mask): attention over some of the keys.

*Matches* attention whose output and log-sum-exp are used, alone or merged with out₀ and lse₀ of other keys:

    lse' = log(exp(lse₀) + exp(lse))      out' = exp(lse₀ - lse') out₀ + exp(lse - lse') out

*Replaces with* atb's `npu_ring_mla`, which takes queries and keys as two operands each: as many lanes as values have,
and the remaining lanes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusion import Group, attribute, lowering, pattern, require, scalar, tensor, variants
from patterns.attention.calls import Parts, viewed
from patterns.attention.masks.visibility import Visibility
from patterns.attention.results import SoftmaxAttention

TRIANGLE = 512
"""Size of the constant mask [TRIANGLE, TRIANGLE], whatever the lengths of queries and keys are."""


@dataclass(frozen=True)
class Alone(Group):
    """The results of these keys alone."""

    view: Any = attribute()

    def terms(self, p, attended, lse, like):
        """Return the terms of the output, built by `attended`, and of its log-sum-exp `lse`."""
        return attended(output_view=self.view), lse

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of npu_ring_mla that depend on the results of other keys: only that there are none."""
        return dict(calc_type="calc_type_first_ring")

    def restored(self, y: Tensor) -> Tensor:
        """Return the output in the view of the model, given output `y` [B, N, S, E] of the operator."""
        return viewed(y, self.view)


@dataclass(frozen=True)
class Merged(Group):
    """The results of these keys merged with those of other keys.

    Attributes:
        before, lse: the output [B, N, S, E] of the other keys and its log-sum-exp [B, N, S, 1].
        view: the reshapes, permutes and casts from the output of these keys, [B, N, S, E], to the model's value.
    """

    before: Any = tensor("B N S E")
    lse: Any = tensor("B N S I")
    view: Any = attribute()

    def terms(self, p, attended, lse, like):
        """Return the terms of the merged output, in the dtype of `like`, and of its log-sum-exp: out' and lse' of this
        module.

        `attended` builds the output of these keys; `lse` is the term of its log-sum-exp.
        """
        out = p.reshaped(attended(output_view=self.view))
        top = p.op("aten.maximum.default", self.lse, lse)
        old, new = p.op("exp", self.lse - top), p.op("exp", lse - top)
        total = old + new
        y = p.maybe_cast(self.before, to=torch.float32) * old + p.maybe_cast(out, to=torch.float32) * new
        return p.as_dtype(y * p.power(total, -1.0), like), top + p.op("log", total)

    def arguments(self) -> dict[str, Any]:
        """Return the results of the other keys as arguments of npu_ring_mla, [B · S, N, E] and [N, B · S]."""
        pre_out = self.before.transpose(1, 2).flatten(0, 1)
        prev_lse = self.lse.squeeze(-1).transpose(0, 1).flatten(1)
        return dict(calc_type="calc_type_default", pre_out=pre_out, prev_lse=prev_lse)

    def restored(self, y: Tensor) -> Tensor:
        """Return `y`, the merged output [B, N, S, E] of the operator."""
        return y


@dataclass(frozen=True)
class RingMla(SoftmaxAttention):
    """Attention over some of the keys, alone or merged with the results of other keys."""

    aliases = ("ring_attention",)

    @pattern
    @variants(others=(Alone, Merged))
    def written(
        self,
        p,
        others,
        q=tensor("B N S D"),
        k=tensor("B M T D"),
        v=tensor("B M T E"),
        seen: Any = Visibility,
        scale=scalar(),
    ):
        """softmax(scale · q kᵀ, masked) v and log Σ exp of the scores, alone or merged with out₀ and lse₀."""
        captures = dict(q=q, k=k, scale=scale, **seen.captures())
        return others.terms(p, partial(p.softmax_attention, v=v, **captures), p.softmax_lse(**captures, lse_view=()), q)

    def guard(self, q: Any, k: Any, v: Any, seen: Visibility):
        """Refuse lengths, windows, dense masks, and causal masks that are not square.

        Refuse symbolic sizes as well, fewer keys than queries, and queries without more lanes than values.
        """
        rows, keys = q.shape[2], k.shape[2]
        numbers = all(isinstance(each, int) for each in (q.shape[0], rows, keys))
        every = seen.window is None and seen.kv_len is None and seen.kv_lens is None
        require(
            every,
            "keys: a window or a length leaves some out; npu_ring_mla requires all keys of a part; slice the keys",
        )
        require(
            seen.mask_kind != "dense",
            "mask: it is not proven to be causal; npu_ring_mla requires no mask or a causal one; write "
            "torch.ones(S, T, dtype=torch.bool).triu(1) in the model, or name a mask that is passed in by the option "
            "assume",
        )
        require(
            seen.mask_kind == "none" or rows == keys,
            "mask: it is causal with other numbers of queries and keys; npu_ring_mla requires as many queries "
            "as keys under a causal mask; merge the part without a mask and the causal part apart",
        )
        require(
            numbers and rows <= keys,
            "keys: there are fewer than queries, or the numbers of both are symbolic; npu_ring_mla requires at "
            "least as many keys as queries, in static numbers",
        )
        require(
            q.shape[3] > v.shape[3],
            "queries: they have no more lanes than values; npu_ring_mla requires rotated lanes behind as many "
            "as values have",
        )

    @lowering
    def run(self, q, k, v, others, seen, scale):
        """Emit npu_ring_mla on packed queries [B · S, N, D], keys [B · T, M, D] and values [B · T, M, E]."""
        y, lse = _ring_mla(q, k, v, scale, seen.mask_kind != "none", **others.arguments())
        return others.restored(y), lse


def _ring_mla(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, **options: Any) -> Parts:
    """Call npu_ring_mla on `q` [B, N, S, D], `k` [B, M, T, D] and `v` [B, M, T, E]; return output and log-sum-exp.

    `scale` multiplies the scores; `causal` hides later keys, of as many as queries. `options` are the arguments that
    depend on the results of other keys. The results are [B, N, S, E] and [B, N, S, 1].
    """
    batch, heads, rows = q.shape[:3]
    width: Any = v.shape[3]
    packed = (each.transpose(1, 2).flatten(0, 1) for each in (q, k, v))
    query, key, value = packed
    lengths = [torch.full((batch,), size, dtype=torch.int32) for size in (rows, k.shape[2])]
    made: dict[str, Any] = dict(dtype=q.dtype, device=q.device)
    hidden = 1.0 if q.dtype == torch.bfloat16 else -10000.0  # in bfloat16 the kernel multiplies the mask itself
    mask = torch.full((TRIANGLE, TRIANGLE), hidden, **made).triu(1) if causal else torch.empty((1, 1), **made)
    y, lse = torch.ops.atb.npu_ring_mla(
        query[..., :width], query[..., width:], key[..., :width], key[..., width:], value, mask,
        lengths[0] if causal else torch.stack(lengths), heads, k.shape[1], qk_scale=scale,
        kernel_type="kernel_type_high_precision", mask_type="mask_type_triu" if causal else "no_mask",
        input_layout="type_bsnd", **options,
    )  # fmt: skip
    return y.unflatten(0, (batch, rows)).transpose(1, 2), lse.unflatten(1, (batch, rows)).transpose(0, 1).unsqueeze(-1)
