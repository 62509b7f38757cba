"""Small calls of the operators of residual streams, legal calls near their limits, and what they mean, by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.operators.limit_cases import t

Make = Callable[[torch.dtype], dict[str, Any]]
F32 = torch.float32
EPS = 1e-3
"""An epsilon whose absence at any place is seen in float32."""


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, F32)


def _random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, dtype=torch.float64) * scale).to(dtype)


def _gates(*lead: int, n: int = 4, d: int = 32, gamma: bool = False, swap: bool = False) -> Make:
    """Streams x, weights phi, alpha and bias; the streams of `swap` are transposed in memory."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        x, wide = _random(*lead, n, d, dtype=dtype), _wide(dtype)
        gates = n * n + 2 * n
        return {
            "x": x.transpose(0, 1).contiguous().transpose(0, 1) if swap else x,
            "phi": _random(gates, n * d, dtype=wide, scale=(n * d) ** -0.5),
            "alpha": _random(3, dtype=wide),
            "bias": _random(gates, dtype=wide),
        } | ({"gamma": _random(n, d, dtype=wide)} if gamma else {})

    return make


def _more(make: Make, names: dict[str, str] | None = None, **more: Any) -> Make:
    return lambda dtype: {(names or {}).get(name, name): each for name, each in make(dtype).items()} | more


_HC = {"phi": "hc_fn", "alpha": "hc_scale", "bias": "hc_base"}


def _matrices(*lead: int, n: int = 4, **more: Any) -> Make:
    return lambda dtype: {"x": _random(*lead, n, n, dtype=_wide(dtype), scale=2.0), **more}


def _behind(*names: str, lead: tuple[int, ...] = (2, 3), n: int = 4, d: int = 32, matrix: bool = True) -> Make:
    """Streams, matrix, result of the layer and gate, by `names`."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        shapes = ((*lead, n, d), (*lead, n, n), (*lead, d), (*lead, n))
        made = [_random(*shape, dtype=each) for shape, each in zip(shapes, (dtype, _wide(dtype)) * 2, strict=True)]
        pairs = zip(names, made, strict=True)
        return {name: each if matrix or index != 1 else None for index, (name, each) in enumerate(pairs)}

    return make


_NPU, _CANN = ("x", "h_res", "h_out", "h_post"), ("x", "hRes", "hOut", "hPost")
_CUSTOM = ("residual", "comb", "x", "post")
_FORM = {"hcMult": 4, "hcEps": EPS, "normEps": EPS, "outFlag": False}

CASES: tuple[tuple[str, str, Make], ...] = (
    ("npu_mhc_pre", "tokens", _more(_gates(5), norm_eps=EPS, hc_eps=EPS)),
    ("npu_mhc_pre", "batch, six streams, a gain", _gates(2, 3, n=6, d=16, gamma=True)),
    ("npu_mhc_pre", "transposed", _gates(2, 3, swap=True)),
    ("npu_mhc_sinkhorn", "tokens", _matrices(5, num_iters=20)),
    ("npu_mhc_sinkhorn", "batch, once", _matrices(2, 3, n=6, num_iters=1, eps=EPS)),
    ("npu_mhc_sinkhorn", "batch, three times", _matrices(2, 3, num_iters=3, eps=EPS)),
    ("npu_mhc_post", "batch", _behind(*_NPU)),
    ("npu_mhc_post", "tokens, without a matrix", _behind(*_NPU, lead=(5,), matrix=False)),
    ("cann_ops_transformer::mhc_pre_sinkhorn", "batch", _more(_gates(2, 3), numIters=20, **_FORM)),
    ("cann_ops_transformer::mhc_pre_sinkhorn", "once", _more(_gates(1, 5), numIters=1, **_FORM)),
    ("cann_ops_transformer::mhc_post", "batch", _behind(*_CANN)),
    ("cann_ops_transformer::mhc_post", "tokens", _behind(*_CANN, lead=(5,))),
    ("custom::npu_hc_pre", "batch", _more(_gates(2, 3), _HC, hc_sinkhorn_iters=2, norm_eps=EPS, hc_eps=EPS)),
    ("custom::npu_hc_pre", "tokens", _more(_gates(5), _HC)),
    ("custom::npu_hc_post", "batch", _behind(*_CUSTOM)),
)


def reference_matrices(x: Tensor, eps: float = 1e-6, num_iters: int = 20, out_flag: int = 0) -> Tensor:
    """Divide entry by entry: columns and rows in turns."""
    result = torch.empty_like(x)
    for index in range(x[..., 0, 0].numel()):
        place = torch.unravel_index(torch.tensor(index), x.shape[:-2])
        logits, n = x[place], x.shape[-1]
        rows = [[logits[i, j].exp() / logits[i].exp().sum() + eps for j in range(n)] for i in range(n)]
        for step in range(2 * num_iters - 1):
            if step % 2:
                rows = [[each / (sum(row) + eps) for each in row] for row in rows]
            else:
                sums = [sum(row[j] for row in rows) + eps for j in range(n)]
                rows = [[each / total for each, total in zip(row, sums, strict=True)] for row in rows]
        result[place] = torch.stack([torch.stack(row) for row in rows])
    return result


def reference_gates(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None = None, norm_eps: float = 1e-6,
    hc_eps: float = 1e-6,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Normalise the streams of each token first, then multiply row by row."""
    n = x.shape[-2]
    flat = x.reshape(*x.shape[:-2], -1)
    inverse = 1 / ((flat * flat).sum(-1) / flat.shape[-1] + norm_eps).sqrt()
    mixed = torch.stack([(flat * (row if gamma is None else row * gamma.reshape(-1))).sum(-1) for row in phi], -1)
    logits = mixed * inverse[..., None]
    pre = 1 / (1 + (-(alpha[0] * logits[..., :n] + bias[:n])).exp()) + hc_eps
    post = 2 / (1 + (-(alpha[1] * logits[..., n : 2 * n] + bias[n : 2 * n])).exp())
    res = torch.stack(
        [torch.stack([alpha[2] * logits[..., k] + bias[k] for k in range(2 * n + n * i, 3 * n + n * i)], -1)
         for i in range(n)], -2,
    )  # fmt: skip
    return sum(pre[..., i, None] * x[..., i, :] for i in range(n)), post, res, inverse, mixed, pre


def _both(x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, times: int, eps: float, norm_eps: float):
    hidden, post, res, *_ = reference_gates(x, phi, alpha, bias, None, norm_eps, eps)
    return hidden, post, reference_matrices(res, eps, times)


def _cann_gates(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, hcMult: int, numIters: int, hcEps: float, normEps: float,
    outFlag: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    hidden, post, matrices = _both(x, phi, alpha, bias, numIters, hcEps, normEps)
    return hidden, post, matrices.reshape(*x.shape[:2], -1), *(x.new_empty(0) for _ in range(5))


def _hc_gates(
    x: Tensor, hc_fn: Tensor, hc_scale: Tensor, hc_base: Tensor, hc_sinkhorn_iters: int = 20, norm_eps: float = 1e-6,
    hc_eps: float = 1e-6,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _both(x, hc_fn, hc_scale, hc_base, hc_sinkhorn_iters, hc_eps, norm_eps)


def reference_update(x: Tensor, matrix: Tensor | None, out: Tensor, post: Tensor) -> Tensor:
    """Add stream by stream."""
    n = x.shape[-2]
    rows = []
    for i in range(n):
        mixed = x[..., i, :] if matrix is None else sum(matrix[..., j, i, None] * x[..., j, :] for j in range(n))
        rows.append(post[..., i, None] * out + mixed)
    return torch.stack(rows, -2)


REFERENCES = {
    "npu_mhc_pre": reference_gates,
    "npu_mhc_sinkhorn": reference_matrices,
    "npu_mhc_post": lambda x, h_res, h_out, h_post: reference_update(x, h_res, h_out, h_post),
    "cann_ops_transformer::mhc_pre_sinkhorn": _cann_gates,
    "cann_ops_transformer::mhc_post": lambda x, hRes, hOut, hPost: reference_update(x, hRes, hOut, hPost),
    "custom::npu_hc_pre": _hc_gates,
    "custom::npu_hc_post": lambda x, residual, post, comb: reference_update(residual, comb, x, post),
}

# Legal calls to search both sides of each limit from ----------------------------------------------------------------

CHIPS = ("ascend910b", "ascend910_93", "ascend950")
_PHI = {"phi": t(24, 512, dtype=F32), "alpha": t(3, dtype=F32), "bias": t(24, dtype=F32)}
_WIDE = {"hc_fn": t(24, 4 * 4096, dtype=F32), "hc_scale": t(3, dtype=F32), "hc_base": t(24, dtype=F32)}


def _updating(names: tuple[str, ...], d: int = 128, lead: tuple[int, ...] = (2, 3)) -> dict[str, Any]:
    made = (t(*lead, 4, d), t(*lead, 4, 4, dtype=F32), t(*lead, d), t(*lead, 4, dtype=F32))
    return dict(zip(names, made, strict=True))


EDGES: list[tuple[str, tuple[str, ...], dict[str, Any], dict[str, Any], str]] = [
    ("npu_mhc_pre", CHIPS[2:], {"x": t(2, 3, 4, 128), **_PHI}, {}, ""),
    (
        "npu_mhc_pre", CHIPS[2:], {"x": t(2, 3, 4, 128), **_PHI},
        {"x": t(2, 3, 3, 128), **_PHI, "phi": t(15, 384, dtype=F32), "bias": t(15, dtype=F32)}, "N in (4, 6, 8)",
    ),
    (
        "npu_mhc_pre", CHIPS[2:], {"x": t(2, 3, 4, 128), **_PHI},
        {"x": t(2, 3, 4, 120), **_PHI, "phi": t(24, 480, dtype=F32)}, "D % 16 == 0",
    ),
    ("npu_mhc_sinkhorn", CHIPS[2:], {"x": t(2, 3, 4, 4, dtype=F32), "num_iters": 100}, {}, ""),
    ("npu_mhc_post", CHIPS[2:], _updating(_NPU), _updating(_NPU, lead=(2, 3, 2)), "rank(x) in (3, 4)"),
    (
        "cann_ops_transformer::mhc_pre_sinkhorn", CHIPS[:2], {"x": t(2, 3, 4, 128), **_PHI, "numIters": 20, **_FORM},
        {"x": t(2, 3, 4, 128), **_PHI, "numIters": 19, **_FORM}, "numIters == 20",
    ),
    (
        "cann_ops_transformer::mhc_pre_sinkhorn", CHIPS[:2], {"x": t(2, 3, 4, 128), **_PHI, "numIters": 20, **_FORM},
        {"x": t(2, 3, 6, 128), "numIters": 20, **_FORM, "hcMult": 6, "phi": t(48, 768, dtype=F32),
         "alpha": t(3, dtype=F32), "bias": t(48, dtype=F32)}, "N == 4",
    ),
    (
        "cann_ops_transformer::mhc_pre_sinkhorn", CHIPS[:2], {"x": t(2, 3, 4, 128), **_PHI, "numIters": 20, **_FORM},
        {"x": t(2, 3, 4, 64), **_PHI, "phi": t(24, 256, dtype=F32), "numIters": 20, **_FORM}, "D % 128 == 0",
    ),
    (
        "cann_ops_transformer::mhc_post", CHIPS[:2], _updating(_CANN), _updating(_CANN, lead=(2, 3, 2)),
        "rank(x) in (3, 4)",
    ),
    ("custom::npu_hc_pre", CHIPS[1:], {"x": t(2, 3, 4, 4096), **_WIDE}, {}, ""),
    (
        "custom::npu_hc_pre", CHIPS[1:], {"x": t(2, 3, 4, 4096), **_WIDE},
        {"x": t(2, 3, 4, 2048), **_WIDE, "hc_fn": t(24, 8192, dtype=F32)}, "D in (4096, 7168)",
    ),
    (
        "custom::npu_hc_pre", CHIPS[1:], {"x": t(2, 3, 4, 4096), **_WIDE},
        {"x": t(2, 3, 6, 4096), "hc_mult": 6, "hc_fn": t(48, 6 * 4096, dtype=F32), "hc_scale": t(3, dtype=F32),
         "hc_base": t(48, dtype=F32)}, "N == 4",
    ),
    (
        "custom::npu_hc_post", CHIPS[1:], _updating(_CUSTOM, 4096), _updating(_CUSTOM, 4096, (2, 3, 2)),
        "rank(residual) in (3, 4)",
    ),
]  # fmt: skip
