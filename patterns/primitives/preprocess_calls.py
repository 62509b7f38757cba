"""How the front of latent attention is put to `npu_mla_preprocess`: weights in lines, pages as they lie, one call."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fusion import require
from patterns.attention.calls import laid
from patterns.primitives import latent_calls
from patterns.primitives.quant_matmul import NZ

EPSILON = 1e-6  # compiled into the kernel
Both = tuple[Tensor, Tensor]
Three = tuple[Tensor, Tensor, Tensor]
Layer = tuple[Tensor | None, Tensor]
"""A bias and a weight."""
Constants = tuple[Tensor | None, float, Tensor | None, float]
"""A scale and a number that it is multiplied by; a zero point and a number that is added to it."""


def epsilons(*given: float) -> None:
    """Refuse what the kernel takes no argument for."""
    other = next((each for each in given if each != EPSILON), EPSILON)
    require(other == EPSILON, "a norm adds {other}, the kernel of npu_mla_preprocess 1e-6", other=other)


def rows(q: Tensor, kv: Tensor, wide: Tensor, up: Tensor, turning: Any, source: str) -> Both:
    """What belongs to rows of the layers of x (dkv and dq), and of the heads (uq), in the order of the operator."""
    return torch.cat((_by_halves(kv, 1, turning, source), q)), _by_halves(wide, up.shape[0], turning, source)


def _by_halves(weight: Tensor, heads: int, turning: Any, source: str) -> Tensor:
    """Rows of a layer [N · W, ..], the last of each head in the order in which they are rotated by halves."""
    if source == "half":
        return weight
    each = weight.unflatten(0, (heads, -1))
    kept, pairs = each[:, :-turning], each[:, -turning:]
    return torch.cat((kept, pairs[:, ::2], pairs[:, 1::2]), dim=1).flatten(0, 1)


def called(
    x: Tensor, gammas: tuple[Tensor, ...], betas: Both, weights: Both, scales: Both, up: Tensor, tables: Both,
    caches: Both, slots: Tensor, heads_first: bool, cache_mode: str,
    **how: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Rotated and absorbed queries, and both caches with new rows."""
    require(all(each.is_contiguous() for each in caches), "the pages are not contiguous")
    whole = all(weight.shape[1] % latent_calls.WHOLE_LINE == 0 for weight in weights)
    require(whole, "the weights do not fill lines of 32 numbers")
    tokens, (heads, _, width) = slots.numel(), up.shape
    turning: Any = tables[0].shape[-1]
    cos, sin = (latent_calls.of_tokens(each, x).reshape(tokens, turning) for each in tables)
    (down, wide), (down_scale, wide_scale) = map(_lines, weights), (each.float() for each in scales)
    kv, kr = (_laid(each, cache_mode) for each in caches)
    query, kv, rope, kr = torch.ops.atb.npu_mla_preprocess.functional(
        x.reshape(tokens, -1), gammas[0], betas[0], down, down_scale, gammas[1], betas[1], wide, wide_scale, gammas[2],
        cos, sin, up.contiguous(), kv, kr, slots.reshape(-1).to(torch.int32), cache_mode=cache_mode,
        q_out0=torch.empty((tokens, heads, width), dtype=kv.dtype, device=x.device), kv_cache_out0=kv,
        q_out1=torch.empty((tokens, heads, turning), dtype=x.dtype, device=x.device), kv_cache_out1=kr, **how,
    )  # fmt: skip
    query, rope = (each.unflatten(0, x.shape[:-1]) if x.dim() == 3 else each for each in (query, rope))
    rope = rope.transpose(1, 2) if heads_first else rope
    return rope, latent_calls.heads_before(query), kv.reshape(caches[0].shape), kr.reshape(caches[1].shape)


def _lines(weight: Tensor) -> Tensor:
    """A weight [out, in] as [1, in / 32, out, 32]."""
    lines = weight.unflatten(1, (-1, latent_calls.WHOLE_LINE)).transpose(0, 1)
    return torch.ops.npu.npu_format_cast(lines.contiguous()[None], NZ)


def _laid(pages: Tensor, cache_mode: str) -> Tensor:
    """Pages of one head as the operator reads them: [Block, Size, 1, D], or in lines [Block, D / L, Size, L]."""
    if cache_mode == "krope_ctkv":
        return latent_calls.in_rows(pages, None)
    return laid(pages, pages.shape[-2], "lines").squeeze(1)


# constants of quantisation


def of_int32(*biases: Any) -> None:
    """Refuse biases that are not added among the whole numbers."""
    other = next((each.dtype for each in biases if each is not None and each.dtype != torch.int32), torch.int32)
    require(other == torch.int32, "a layer adds a bias of {dtype}, the operator one of int32", dtype=other)


def joined(weights: Three, scales: Three, up: Tensor, cos: Tensor, source: str) -> tuple[Both, Both]:
    """Weights and scales of the layers of x, and of the heads, as the operator reads them; given as dq, dkv, uq."""
    return rows(*weights, up, cos.shape[-1], source), rows(*scales, up, cos.shape[-1], source)


def biases(dq: Layer, dkv: Layer, uq: Layer, up: Tensor, cos: Tensor, source: str) -> Both:
    """The same of biases, each of which stands before its weight; zeros where there is none."""
    return rows(_bias(*dq), _bias(*dkv), _bias(*uq), up, cos.shape[-1], source)


def told(x: Tensor, added: Both, first: Constants, second: Constants) -> dict[str, Any]:
    """What the operator is told of constants: a scale, its factor, a zero point and a number beside it, twice."""
    constants = {
        name: of
        for n, (scale, by, zero, shift) in enumerate((first, second))
        for name, of in ((f"quant_scale{n}", scale_of(scale, by, x)), (f"quant_offset{n}", _zero(zero, shift, x)))
    }
    return dict(quant_mode="per_tensor_quant_asymm", bias0=added[0], bias1=added[1], **constants)


def beta_of(beta: Tensor | None, gamma: Tensor) -> Tensor:
    """What a norm adds behind its gain."""
    return torch.zeros_like(gamma) if beta is None else beta


def _bias(bias: Tensor | None, weight: Tensor) -> Tensor:
    if bias is not None:
        return bias
    return torch.zeros((weight.shape[0],), dtype=torch.int32, device=weight.device)


def scale_of(scale: Tensor | None, by: float, like: Tensor) -> Tensor:
    """The scale [1] in the dtype of `like`, which must hold it as it is."""
    if scale is None:
        lanes = math.frexp(by)[0] * 2 / torch.finfo(like.dtype).eps
        require(abs(lanes - round(lanes)) < 1e-9, "the dtype of x does not hold the scale {by} as it is", by=by)
        return torch.full((1,), by, dtype=like.dtype, device=like.device)
    same = scale.dtype == like.dtype and by == 1
    require(same, "a scale of {dtype} is not one in the dtype of x, as the operator takes it", dtype=scale.dtype)
    return scale


def _zero(zero: Tensor | None, shift: float, like: Tensor) -> Tensor:
    return torch.full((1,), int(shift), dtype=torch.int8, device=like.device) if zero is None else zero
