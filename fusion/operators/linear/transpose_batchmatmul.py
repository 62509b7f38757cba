"""Batched products with weights, transposed to tokens first; and the cast of a weight to another storage format."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusion.operators.dtype_sets import FLOATS, INT8
from fusion.operators.flops import product
from fusion.operators.limits import A2_A3, Limit
from fusion.operators.operator import Operator


def _permuted(
    input: Tensor, weight: Tensor, perm_x1: Sequence[int] | None, perm_x2: Sequence[int] | None
) -> tuple[Tensor, Tensor]:
    given = ((input, perm_x1), (weight, perm_x2))
    x1, x2 = (x.permute(list(perm)) if perm and tuple(perm) != (0, 1, 2) else x for x, perm in given)
    return x1, x2


def transpose_batchmatmul(
    input: Tensor, weight: Tensor, perm_x1: Sequence[int] | None = None, perm_x2: Sequence[int] | None = None
) -> Tensor:
    """Compute y[m, b] = x1[b, m] · w[b], contiguous [M, B, N], where x1 [B, M, K] is `input` permuted by `perm_x1`, and
    w [B, K, N] is `weight` permuted by `perm_x2`."""
    x1, x2 = _permuted(input, weight, perm_x1, perm_x2)
    return torch.bmm(x1, x2).transpose(0, 1).contiguous()


def _transpose_batchmatmul(
    input: Tensor, weight: Tensor, perm_x1: Sequence[int] | None, perm_x2: Sequence[int] | None, batch_split_factor: int
) -> Tensor:
    """Compute `transpose_batchmatmul` [M, B, N]; if `batch_split_factor` is not 1, as [parts, M, B / parts · N] of that
    many parts of the batch.
    """
    y = transpose_batchmatmul(input, weight, perm_x1, perm_x2)
    if batch_split_factor == 1:
        return y
    return y.unflatten(1, (batch_split_factor, -1)).flatten(2).transpose(0, 1).contiguous()


def _outputs(
    input: Tensor, weight: Tensor, perm_x1: Sequence[int] | None, perm_x2: Sequence[int] | None, batch_split_factor: int
) -> Tensor:
    x1, x2 = _permuted(input, weight, perm_x1, perm_x2)
    rows, batch, columns = x1.shape[1], x1.shape[0], x2.shape[2]
    if batch_split_factor == 1:
        return input.new_empty(rows, batch, columns)
    return input.new_empty(batch_split_factor, rows, batch // batch_split_factor * columns)


_PERMUTED_1 = "perm_x1 == (1, 0, 2)"
_PERMUTED_2 = "perm_x2 == (0, 2, 1)"
_A2 = (
    "dtype(weight) == dtype(input)",
    Limit("K % 16 == 0", because="K is the number of lanes that each head multiplies"),
    Limit(
        "V % 16 == 0 and V < 65536", when=f"not {_PERMUTED_2}", because="V is the number of lanes that each head gives"
    ),
    Limit("U % 16 == 0 and U < 65536", when=_PERMUTED_2),
    Limit("K * W < 65536", when=_PERMUTED_1, because="the kernel reads the heads of one token as one row"),
)

TRANSPOSE_BATCHMATMUL = Operator(
    schema=(
        "npu::npu_transpose_batchmatmul(Tensor input, Tensor weight, *, Tensor? bias=None, Tensor? scale=None, "
        "int[]? perm_x1=None, int[]? perm_x2=None, int[]? perm_y=None, int? batch_split_factor=1) -> Tensor"
    ),
    compute=_transpose_batchmatmul,
    uncomputed={"bias": "the operator has none", "scale": "quantised results are not decomposed"},
    without_effect=frozenset({"perm_y"}),
    outputs=_outputs,
    dims={"input": "I J K", "weight": "W U V"},
    dtypes={"input": FLOATS, "weight": FLOATS},
    limits={
        "host": (
            Limit("perm_x1 in ((0, 1, 2), (1, 0, 2))", when="given(perm_x1)"),
            Limit("perm_x2 in ((0, 1, 2), (0, 2, 1))", when="given(perm_x2)"),
            Limit("perm_y == (1, 0, 2)", when="given(perm_y)"),
            Limit("given(batch_split_factor) and batch_split_factor > 0"),
            Limit("I % batch_split_factor == 0", when=f"not {_PERMUTED_1}", because="parts have as many matrices"),
            Limit("J % batch_split_factor == 0", when=_PERMUTED_1, because="parts have as many matrices"),
            Limit(
                "I == W", when=f"not {_PERMUTED_1}", because="each matrix of the weight has its own rows of the input"
            ),
            Limit("J == W", when=_PERMUTED_1, because="each matrix of the weight has its own rows of the input"),
            Limit("K == U", when=f"not {_PERMUTED_2}"),
            Limit("K == V", when=_PERMUTED_2),
        ),
        **dict.fromkeys(A2_A3, (*_A2, Limit("batch_split_factor == 1", because="no rule asks for parts"))),
    },
    flops=lambda input, weight, perm_x2: product(input, weight.shape[1 if list(perm_x2 or ()) == [0, 2, 1] else 2]),
    source="op-plugin: torch_npu.npu_transpose_batchmatmul (A2 and A3; perm_x2 [0, 2, 1] from CANN 8.5)",
    summary="y[m, b] = round(x1[b, m] · w[b]), x1 = input.permute(perm_x1), w = weight.permute(perm_x2), in float32; "
    "with batch_split_factor in as many parts, [parts, M, B / parts · N]",
)


ND = 2
FRACTAL_NZ = 29


_LIMITS = ("rank(input) >= 2",)

FORMAT_CAST = Operator(
    schema=(
        "npu::npu_format_cast(Tensor input, int acl_format, *, int? customize_dtype=None, int? input_dtype=None) "
        "-> Tensor"
    ),
    uncomputed={"customize_dtype input_dtype": "no number changes its dtype"},
    without_effect=frozenset({"acl_format"}),
    # Other devices have no storage formats; the result must not alias the input.
    compute=lambda input: input.clone(memory_format=torch.contiguous_format),
    outputs=lambda input: input.new_empty(input.shape),
    dims={"input": "*D"},
    dtypes={"input": FLOATS | INT8},
    limits={
        "host": (f"acl_format in ({ND}, {FRACTAL_NZ})",),
        **dict.fromkeys(A2_A3, _LIMITS),
    },
    moves=True,
    lowerings=frozenset({"eager"}),
    source="torch_npu.npu_format_cast; it has neither a Meta kernel nor a GE converter in 2.13.0",
    summary="the same values, stored as acl_format says: 2 row-major, 29 fractal NZ; elsewhere a copy",
)
