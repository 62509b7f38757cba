"""Rotary position embedding: y = x · cos + rotate(x) · sin, where `rotate` turns each pair of components by 90°."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fusion._torch.tensors import memory_order
from fusion.operators.attention.layouts import with_strides_of
from fusion.operators.dtype_sets import FLOATS, compute_dtype
from fusion.operators.limits import A2_A3, Limit
from fusion.operators.operator import Operator

_PAGES = "op-plugin: torch_npu.{0}; CANN: {1}; kernel and tiling: ops-transformer posembedding/{2}"


Pairing = Callable[[Tensor, Tensor, Tensor, torch.dtype], Tensor]
"""Function (x, cos, sin, stored) -> rotated x, for one pairing of components; cos and sin have the order of the result.
First and second components are rounded to `stored` before they are joined: no wide tensor of the size of `x` is built.
"""


def half(x: Tensor, cos: Tensor, sin: Tensor, stored: torch.dtype) -> Tensor:
    """Rotate the pairs (i, i + D/2) of `x` [.., D] by `cos` and `sin`, and round to `stored`."""
    (a, b), (cos_a, cos_b), (sin_a, sin_b) = x.chunk(2, -1), cos.chunk(2, -1), sin.chunk(2, -1)
    return torch.cat(((a * cos_a - b * sin_a).to(stored), (b * cos_b + a * sin_b).to(stored)), dim=-1)


def _interleave(x: Tensor, cos: Tensor, sin: Tensor, stored: torch.dtype) -> Tensor:
    """Rotate the pairs (2i, 2i + 1) of `x` [.., D], which keep their positions, by `cos` and `sin`, and round to
    `stored`.
    """
    a, b = x[..., 0::2], x[..., 1::2]
    first = a * cos[..., 0::2] - b * sin[..., 0::2]
    second = b * cos[..., 1::2] + a * sin[..., 1::2]
    return torch.stack((first.to(stored), second.to(stored)), dim=-1).flatten(-2)


def _quarter(x: Tensor, cos: Tensor, sin: Tensor, stored: torch.dtype) -> Tensor:
    """Rotate the pairs (i, i + D/4) inside each half of `x` [.., D] by `cos` and `sin`, and round to `stored`."""
    x, cos, sin = (tensor.unflatten(-1, (2, -1)) for tensor in (x, cos, sin))
    return half(x, cos, sin, stored).flatten(-2)


def interleave_half(x: Tensor, cos: Tensor, sin: Tensor, stored: torch.dtype) -> Tensor:
    """Rotate the pairs (2i, 2i + 1) of `x` [.., D] by `cos` and `sin`, move them to (i, i + D/2), and round to
    `stored`.
    """
    a, b = x[..., 0::2], x[..., 1::2]
    (cos_a, cos_b), (sin_a, sin_b) = cos.chunk(2, -1), sin.chunk(2, -1)
    return torch.cat(((a * cos_a - b * sin_a).to(stored), (b * cos_b + a * sin_b).to(stored)), dim=-1)


def rotated(pairing: Pairing, x: Tensor, cos: Tensor, sin: Tensor, stored: torch.dtype) -> Tensor:
    """Rotate `x` [.., D] by `pairing`, one of the functions above, in float32 or wider, and round once to `stored`."""
    wide = compute_dtype(x)
    return pairing(x.to(wide), cos.to(wide), sin.to(wide), stored)


def first_rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R lanes of `x` [.., M, D] by `cos` and `sin` [.., R]: as pairs (2i, 2i + 1), moved to
    (i, i + R/2)."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    rope, rest = x.split([sin.shape[-1], x.shape[-1] - sin.shape[-1]], dim=-1)
    return torch.cat((rotated(interleave_half, rope, cos, sin, x.dtype), rest), dim=-1)


_MODES: dict[str, Pairing] = {
    "half": half,
    "interleave": _interleave,
    "quarter": _quarter,
    "interleave-half": interleave_half,
}


def _rotated_like(x: Tensor, pairing: Pairing, cos: Tensor, sin: Tensor, wide: torch.dtype) -> Tensor:
    """Rotate `x` in `wide`; the result has the dtype and strides of `empty_like(x)`, without a copy if the last dim is
    contiguous."""
    order = [*(dim for dim in memory_order(x) if dim != x.ndim - 1), x.ndim - 1]
    if order == list(range(x.ndim)):
        return with_strides_of(pairing(x.to(wide), cos.to(wide), sin.to(wide), x.dtype), x)
    back = [order.index(dim) for dim in range(x.ndim)]
    permuted, cos, sin = (each.permute(order).to(wide) for each in (x, cos, sin))
    return with_strides_of(pairing(permuted, cos, sin, x.dtype).permute(back), x)


def _rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str, rotate: Tensor | None) -> Tensor:
    cos, sin = r1.to(input.dtype), r2.to(input.dtype)  # as op-plugin casts them first
    if rotate is None:
        return rotated(_MODES[rotary_mode], input, cos, sin, input.dtype).contiguous()
    compute = compute_dtype(input)
    x = input.to(compute)
    return (x * cos.to(compute) + (x @ rotate.to(compute)) * sin.to(compute)).to(input.dtype).contiguous()


_IS_HALF = "rotary_mode == 'half' and rank(input) == 4 and not given(rotate)"
_IS_BNSD = f"{_IS_HALF} and size(r1, 0) != I and size(r1, 1) != J and size(r1, 2) != 1"
_UNKNOWN_LAYOUT = "the kernel reads BNSD, BSND, SBND or TND from which dims broadcast"

_WIDTH = ("D % 2 == 0", Limit("D % 4 == 0", when="rotary_mode == 'quarter'"))
_ROTARY_MUL = (
    "dtype(r1) == dtype(input)",
    "dtype(r2) == dtype(input)",
    "shape(r1) == shape(r2)",
)
_ROTARY_MUL_A2 = (
    *_ROTARY_MUL,
    Limit("dtype(rotate) == dtype(input)", when="given(rotate)"),
    "rotary_mode in ('half', 'interleave')",
    "D < 896",
    Limit(
        "rotary_mode == 'half'",
        when="not given(rotate)",
        lowering="torchair",
        because="its GE converter leaves rotary_mode out",
    ),
    Limit("N < 1000", when="rank(input) == 3"),
    Limit("size(r1, 0) == I or size(r1, 1) == 1 or size(r1, 2) == 1", when=_IS_HALF, because=_UNKNOWN_LAYOUT),
    Limit(
        "I == 1 or J == 1 or K == 1",
        when=f"{_IS_HALF} and size(r1, 0) == 1 and size(r1, 1) == 1 and size(r1, 2) == 1",
        because=_UNKNOWN_LAYOUT,
    ),
    Limit("I < 1000", when=f"{_IS_HALF} and size(r1, 0) != I", because="a broadcast dim is B or N"),
    Limit("J < 1000", when=f"{_IS_HALF} and size(r1, 1) != J", because="a broadcast dim is B or N"),
    Limit("K < 1000", when=f"{_IS_HALF} and size(r1, 2) != K", because="a broadcast dim is B or N"),
    Limit(
        "I * J <= 8 * K",
        when=f"{_IS_BNSD} and D * itemsize(input) % 64 == 0",
        because="the kernel refuses BNSD with B · N > 8 · S; transpose to BSND before",
    ),
    Limit(
        "D >= 80",
        when=f"{_IS_BNSD} and D * itemsize(input) % 64 != 0",
        because="the kernel refuses short unaligned heads in BNSD; transpose to BSND before",
    ),
    Limit(
        "size(r1, 1) == 1 and size(r1, 2) == 1 and size(r1, 0) == I and J * K < 1000 or "
        "size(r1, 0) == 1 and size(r1, 2) == 1 and size(r1, 1) == J and I * K < 1000 or "
        "size(r1, 0) == 1 and size(r1, 1) == 1 and size(r1, 2) == K and I * J < 1000",
        when="rotary_mode == 'interleave' and rank(input) == 4 and not given(rotate)",
        because="interleave takes cos as S11D, 1S1D or 11SD, with B · N < 1000",
    ),
    Limit(
        "size(r1, 1) == 1",
        when="rotary_mode == 'interleave' and rank(input) == 3 and not given(rotate)",
        because="interleave takes cos as T1D",
    ),
)

ROTARY_MUL = Operator(
    schema=(
        'npu::npu_rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode="half", Tensor? rotate=None) -> Tensor'
    ),
    compute=_rotary_mul,
    outputs=lambda input: input.new_empty(input.shape),
    dims={"input": "I J K D / T N D", "r1 r2": "1|I 1|J 1|K D / T 1|N D", "rotate": "D D"},
    dtypes={"input": FLOATS, "r1": FLOATS, "r2": FLOATS, "rotate": FLOATS},
    limits={
        "host": ("rotary_mode in ('half', 'interleave', 'quarter', 'interleave-half')", *_WIDTH),
        **dict.fromkeys(A2_A3, _ROTARY_MUL_A2),
        "ascend950": (*_ROTARY_MUL, "D <= 1024", "not given(rotate)"),
    },
    source=_PAGES.format("npu_rotary_mul", "aclnnRotaryPositionEmbedding(V2)", "rotary_position_embedding"),
    summary="y = round(input · r1 + rotate(input) · r2), in float32; rotate by halves, by pairs, or by a matrix",
)


def _apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, rotary_mode: str
) -> tuple[Tensor, Tensor]:
    # The kernel computes float16 in float16, and widens only bfloat16.
    compute = torch.float32 if query.dtype == torch.bfloat16 else query.dtype
    cos, sin = cos.to(compute), sin.to(compute)
    q, k = (_rotated_like(x, _MODES[rotary_mode], cos, sin, compute) for x in (query, key))
    return q, k


_COS = "layout=BSND: 1|B S 1 D / layout=SBND: S 1|B 1 D / layout=BNSD: 1|B 1 S D / layout=TND: T 1 D"
_APPLY = ("dtype(key) == dtype(query)", "dtype(cos) == dtype(query)", "dtype(sin) == dtype(query)")
_APPLY_A2 = (
    *_APPLY,
    "layout in ('BSND', 'TND')",
    "rotary_mode == 'half'",
    Limit("D in (64, 128)", because="D is the width of a head that is rotated"),
    Limit("size(cos, 0) == B and size(sin, 0) == B", when="layout == 'BSND'"),
    "size(query, 0) > 0 and size(query, 1) > 0",
    "N + Nkv <= 255",
    Limit("10 * (N + Nkv) * D + 8 * D <= 196608", because="the heads of one token must fit the 192 KiB unified buffer"),
    Limit(
        "20 * (N + Nkv) * D + 16 * D <= 196608",
        when="dtype(query) != 'float16'",
        because="the heads of one token must fit the 192 KiB unified buffer",
    ),
)

APPLY_ROTARY_POS_EMB = Operator(
    schema=(
        "npu::npu_apply_rotary_pos_emb(Tensor query, Tensor key, Tensor cos, Tensor sin, "
        'str layout="BSND", str rotary_mode="half") -> (Tensor, Tensor)'
    ),
    compute=_apply_rotary_pos_emb,
    without_effect=frozenset({"layout"}),  # cos and sin broadcast by their own dims
    outputs=lambda query, key: (torch.empty_like(query), torch.empty_like(key)),
    dims={
        "query": "layout=BSND: B S N D / layout=SBND: S B N D / layout=BNSD: B N S D / layout=TND: T N D",
        "key": "layout=BSND: B S Nkv D / layout=SBND: S B Nkv D / layout=BNSD: B Nkv S D / layout=TND: T Nkv D",
        "cos sin": _COS,
    },
    dtypes={"query": FLOATS, "key": FLOATS, "cos": FLOATS, "sin": FLOATS},
    limits={
        "host": ("rotary_mode in ('half', 'interleave', 'quarter')", *_WIDTH),
        **dict.fromkeys(A2_A3, _APPLY_A2),
        "ascend950": (*_APPLY, "D <= 1024"),
    },
    source=_PAGES.format("npu_apply_rotary_pos_emb", "aclnnApplyRotaryPosEmbV2", "apply_rotary_pos_emb"),
    rounds="x · cos and rotate(x) · sin",
    summary="q, k = round(x · cos + rotate(x) · sin) for x = query, key; bfloat16 in float32, float16 in itself",
    overwrites=frozenset({"query", "key"}),
)


def _interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _rotated_like(x, interleave_half, cos, sin, compute_dtype(x))


_INTERLEAVE = (
    "dtype(cos) == dtype(x)",
    "dtype(sin) == dtype(x)",
    "shape(cos) == shape(sin)",
    Limit("D == 64", because="D is the width of a head that is rotated"),
    Limit("size(cos, 1) == 1", because="all heads of a token share its cosines"),
)
_HALVES = Limit("dtype(x) != 'float32'", because="run the model in bfloat16 or float16")
_INTERLEAVE_A2 = (*_INTERLEAVE, _HALVES, "size(cos, 0) == B", "B > 0 and S > 0")

INTERLEAVE_ROPE = Operator(
    schema="npu::npu_interleave_rope(Tensor x, Tensor cos, Tensor sin) -> Tensor",
    compute=_interleave_rope,
    outputs=lambda x: torch.empty_like(x),
    dims={"x": "B N S D", "cos": "1|B 1|N 1|S D", "sin": "1|B 1|N 1|S D"},
    dtypes={"x": FLOATS, "cos": FLOATS, "sin": FLOATS},
    limits={
        "host": ("D % 2 == 0",),
        **dict.fromkeys(A2_A3, _INTERLEAVE_A2),
        "ascend950": _INTERLEAVE,
    },
    source=_PAGES.format("npu_interleave_rope", "aclnnInterleaveRope", "interleave_rope"),
    summary="u = even components of x, then odd; y = round(u · cos + rotate_half(u) · sin), in float32",
)
