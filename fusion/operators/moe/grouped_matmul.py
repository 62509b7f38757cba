"""Grouped matrix products: sorted rows, each group times its own matrix, in floats or in int8.

Row i is of group g where counts[0] + .. + counts[g - 1] <= i < counts[0] + .. + counts[g].

    floats    out[i] = x[i] · weight[g]        W8A8    out[i] = (x[i] · weight[g]) · scale[g] · per_token_scale[i]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from fusion.operators import encodings
from fusion.operators.calling import Given
from fusion.operators.dtype_sets import BFLOAT16, FLOAT32, FLOATS, HALVES, INT8, INT32, INT64, compute_dtype
from fusion.operators.flops import product
from fusion.operators.limits import A2_A3, HOST, Limit
from fusion.operators.operator import Operator
from fusion.operators.quant.quantisation import CODES, group_of_rows, int8_product, result_dtype


@dataclass(frozen=True)
class _Groups:
    """Number of rows of each group [G], and index of its matrix [G], None if matrices are in the order of groups."""

    counts: Tensor
    matrix: Tensor | None = None

    def ordered(self, each: Tensor) -> Tensor:
        """Gather from `each`, with one entry for each matrix, the entries of the matrices of the groups, in their
        order.
        """
        return each if self.matrix is None else each[self.matrix]


def _groups_of(group_list: Tensor, group_list_type: int) -> _Groups:
    """Read `group_list` by its type: ends of groups [G] (0), their numbers of rows [G] (1), or pairs of a matrix and a
    number of rows [G, 2] (2)."""
    if group_list_type == 2:
        matrix, counts = group_list.unbind(-1)
        return _Groups(counts, matrix)
    return _Groups(group_list if group_list_type else group_list.diff(prepend=group_list.new_zeros(1)))


def _matrix_of_row(counts: Tensor, rows: int) -> Tensor:
    """Return the group of each of `rows` rows, for groups of `counts` [G] rows; the last group for rows behind it,
    whose results no kernel defines.
    """
    return group_of_rows(counts.cumsum(0), rows).clamp(max=counts.shape[0] - 1)


def _first(given: Given, name: str) -> Tensor | None:
    """Return the only tensor of the list argument `name`, None if it is not given."""
    return None if given[name] is None else given[name][0]


def _grouped_matmul(given: Given) -> list[Tensor]:
    rows, matrices = given["x"][0], given["weight"][0]
    groups = _groups_of(given["group_list"], given["group_list_type"])
    scale, bias = _first(given, "scale"), _first(given, "bias")
    if rows.dtype == torch.int8 and scale is not None:
        tokens = _first(given, "per_token_scale")
        y = _dequantised(rows, groups.ordered(matrices), (groups.ordered(scale), tokens), groups, bias)
        return [_activated(y, given["act_type"]).to(result_dtype(scale, given["output_dtype"]))]
    antiquant = _first(given, "antiquant_scale")
    if antiquant is not None:
        matrices = _restored(matrices, antiquant, _first(given, "antiquant_offset"), rows.dtype)
    if bias is None and not given["act_type"]:
        return [_product(rows, matrices, groups.counts)]
    wide = compute_dtype(rows)
    y = _by_blocks(rows.to(wide), matrices.to(wide), groups.counts)
    y = y if bias is None else y + bias.to(wide)[_matrix_of_row(groups.counts, rows.shape[0])]
    return [_activated(y, given["act_type"]).to(rows.dtype)]


def _product(rows: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """Multiply each group of `rows` by its own of `matrices`, by torch's grouped kernel if it takes them.

    `counts` are the numbers of rows of the groups.
    """
    if _has_kernel(rows, matrices):
        return torch.ops.aten._grouped_mm.default(rows, matrices, counts.cumsum(0).to(torch.int32))
    return _by_blocks(rows, matrices, counts)


def _restored(weight: Tensor, scale: Tensor, offset: Tensor | None, stored: torch.dtype) -> Tensor:
    """Dequantise an int8 `weight` [G, K, N] to `stored`: round((weight + offset) · scale), with scales and offsets
    [G, N] per channel."""
    wide = torch.promote_types(torch.float32, stored)
    floats = weight.to(wide) if offset is None else weight.to(wide) + offset.to(wide).unsqueeze(1)
    return (floats * scale.to(wide).unsqueeze(1)).to(stored)


_ACTIVATIONS: dict[int, Callable[[Tensor], Tensor]] = {
    1: torch.relu,
    2: partial(gelu, approximate="tanh"),
    4: lambda x: x * torch.sigmoid(1.702 * x),
    5: silu,
}
"""Value of `act_type` -> activation: relu, gelu by tanh, the fast gelu, silu."""


def _activated(x: Tensor, kind: int | None) -> Tensor:
    return _ACTIVATIONS[kind](x) if kind else x


def _dequantised(
    rows: Tensor, matrices: Tensor, scales: tuple[Tensor, Tensor | None], groups: _Groups, bias: Tensor | None = None
) -> Tensor:
    """Multiply each group of int8 `rows` by its matrix, then by `scales` per channel [G, N] and per row [M]; add `bias`
    [G, N] before the scales if it is integer, else after them."""
    channels, tokens = scales
    wide, group = compute_dtype(channels), _matrix_of_row(groups.counts, rows.shape[0])
    total = _by_blocks(rows, matrices, groups.counts)
    if bias is not None and not bias.is_floating_point():
        total = total + groups.ordered(bias)[group]
    out = total.to(wide) * channels.to(wide)[group]
    out = out if tokens is None else out * tokens.to(wide).unsqueeze(-1)
    return out + groups.ordered(bias).to(wide)[group] if bias is not None and bias.is_floating_point() else out


def _has_kernel(rows: Tensor, matrices: Tensor) -> bool:
    """Return True if torch's grouped kernel takes `rows` and `matrices`: bfloat16, contiguous, lines a multiple of 16
    bytes.
    """
    lines = all(size % 8 == 0 for size in matrices.shape[1:])
    plain = matrices.is_contiguous() or matrices.mT.is_contiguous()
    return rows.dtype == matrices.dtype == torch.bfloat16 and lines and plain and rows.is_contiguous()


def _by_blocks(rows: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """Multiply each group of `rows` by its matrix in a batch of blocks of equal length, the last one of a group padded;
    int8 is summed in int32.

    All rows of a block have one matrix. Blocks are as long as an average group, so there are at most twice as many
    blocks as groups, and no more blocks than rows: padding at most doubles the work.
    """
    count, groups = rows.shape[0], matrices.shape[0]
    size = torch.sym_max((count + groups - 1) // groups, 1)
    blocks_of = (counts + (size - 1)) // size
    row_ends, block_ends = counts.cumsum(0), blocks_of.cumsum(0)
    row_starts, block_starts = row_ends - counts, block_ends - blocks_of
    block = torch.arange(torch.sym_min(count, count // size + groups), device=rows.device)
    group = torch.searchsorted(block_ends, block, right=True).clamp(max=groups - 1)
    first = (block - block_starts[group]) * size + row_starts[group]
    places = first.unsqueeze(-1) + torch.arange(size, device=rows.device)
    multiply = int8_product if rows.dtype == torch.int8 else torch.bmm
    products = multiply(rows[places.clamp(0, count - 1)], matrices[group])
    row, group = torch.arange(count, device=rows.device), _matrix_of_row(counts, count)
    flat = products.flatten(0, 1)
    return flat[(block_starts[group] * size + (row - row_starts[group])).clamp(max=flat.shape[0] - 1)]


_INT8 = "dtype(x) == 'int8'"
_UNSETTLED = "op-plugin documents biases of one dim, CANN of one line for each group"
_GROUPED = (
    "K < 65536 and N < 65536",
    "G <= 1024",
    Limit("dtype(weight) == dtype(x)", when="not given(antiquant_scale)"),
    Limit("not given(bias)", because=_UNSETTLED),
    Limit("given(per_token_scale)", when=_INT8, because="pages disagree on the scales of rows without their own"),
    Limit("dtype(antiquant_scale) == dtype(x)", when="given(antiquant_scale)"),
    Limit("dtype(antiquant_offset) == dtype(x)", when="given(antiquant_offset)"),
    Limit("G > 1", when="group_list_type == 1", because="a list of counts has more than one"),
    Limit("dtype(scale) == 'float32'", when="output_dtype == 5", because="bfloat16 scales give bfloat16"),
)

GROUPED_MATMUL = Operator(
    schema=(
        "npu::npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None, "
        "Tensor[]? offset=None, Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None, "
        "Tensor[]? per_token_scale=None, Tensor? group_list=None, Tensor[]? activation_input=None, "
        "Tensor[]? activation_quant_scale=None, Tensor[]? activation_quant_offset=None, int? split_item=0, "
        "int? group_type=None, int? group_list_type=0, int? act_type=0, int[]? tuning_config=None, "
        "int? output_dtype=None, int? x_dtype=None, int? weight_dtype=None, int? scale_dtype=None, "
        "int? per_token_scale_dtype=None) -> Tensor[]"
    ),
    compute=_grouped_matmul,
    uncomputed={
        "offset": "the page takes none",
        "activation_input activation_quant_scale activation_quant_offset": "they are for training, or reserved",
        "x_dtype weight_dtype scale_dtype per_token_scale_dtype": "formats of 8 and 4 bits are not decomposed",
    },
    without_effect=frozenset({"split_item", "group_type", "tuning_config"}),
    outputs=lambda x, weight, scale, output_dtype: [
        x[0].new_empty(
            (x[0].shape[0], weight[0].shape[2]),
            dtype=x[0].dtype if scale is None else result_dtype(scale[0], output_dtype),
        )
    ],
    dims={
        "weight": "G K N",
        "x": "M K",
        "group_list": "G / Gl 2",
        "scale": "G N",
        "per_token_scale": "M",
        "bias antiquant_scale antiquant_offset": "G N",
    },
    dtypes={
        "x weight": FLOATS | INT8,
        "group_list": INT64,
        "scale": FLOAT32 | BFLOAT16,
        "per_token_scale": FLOAT32,
        "bias": FLOATS | INT32,
        "antiquant_scale antiquant_offset": HALVES,
    },
    limits={
        HOST: (
            Limit("length(x) == 1 and length(weight) == 1", because="lists of tensors are not decomposed"),
            Limit("given(group_list)", because="groups are told by a tensor"),
            Limit("group_type == 0", because="groups of rows are decomposed"),
            Limit("split_item in (2, 3)", because="the result is one tensor"),
            "group_list_type in (0, 1, 2)",
            Limit("rank(group_list) == 1", when="group_list_type in (0, 1)"),
            Limit("rank(group_list) == 2", when="group_list_type == 2", because="it lists pairs"),
            Limit(_INT8, when="group_list_type == 2", because="the page has pairs beside int8 alone"),
            Limit("act_type in (None, 0, 1, 2, 4, 5)", because="there is no other activation"),
            Limit("given(scale) and given(output_dtype)", when=_INT8, because="scales in int64 are not decomposed"),
            *(Limit(f"not given({name})", when=f"not ({_INT8})", because="products of floats have none")
              for name in ("scale", "per_token_scale", "output_dtype")),
            Limit(f"output_dtype in {tuple(CODES)}", when=_INT8, because="results in integers are not decomposed"),
            Limit("dtype(weight) == 'int8'", when=f"{_INT8} or given(antiquant_scale)"),
            Limit("dtype(weight) != 'int8'", when=f"not ({_INT8}) and not given(antiquant_scale)"),
            Limit(f"not ({_INT8})", when="given(antiquant_scale)", because="it restores weights for floats"),
            Limit("given(antiquant_scale)", when="given(antiquant_offset)"),
            Limit("dtype(bias) != 'int32'", when=f"given(bias) and not ({_INT8})"),
        ),
        **dict.fromkeys(A2_A3, _GROUPED),
    },
    either=frozenset({"weight"}),
    flops=lambda x, weight: product(x[0], weight[0].shape[2]),
    source=(
        "op-plugin: torch_npu.npu_grouped_matmul (A2 and A3; x, weight and result one tensor each); of int8 CANN: "
        "aclnnGroupedMatmulV5, whose table has float32 scales beside bfloat16 results, that of op-plugin bfloat16 alone"
    ),
    summary=(
        "out[i] = round(act(x[i] · weight[g] + bias[g])), of int8 round(act(int32(x[i] · weight[g] + bias[g]) · "
        "scale[g] · per_token_scale[i])), or + bias[g] behind the scales where it is floating, for row i of group g; "
        "int8 weights of floats: round((weight + antiquant_offset) · antiquant_scale); group_list: rows of each group, "
        "where each ends, or pairs of a matrix and its rows; act_type: none, relu, gelu by tanh, fast gelu, silu"
    ),
)  # fmt: skip


def _swiglu_quant(
    x: Tensor, weight: Sequence[Tensor], weight_scale: Sequence[Tensor], x_scale: Tensor, group_list: Tensor,
    group_list_type: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    groups = _groups_of(group_list, group_list_type)
    gate, up = _dequantised(x, weight[0], (weight_scale[0], x_scale), groups).chunk(2, -1)
    return encodings.INT8.quantised(silu(gate) * up)


def _swiglu_quant_outputs(x: Tensor, weight_scale: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    lanes = weight_scale[0].shape[1] // 2
    wide = compute_dtype(weight_scale[0])
    return x.new_empty((x.shape[0], lanes)), x.new_empty(x.shape[:1], dtype=wide)


GROUPED_MATMUL_SWIGLU_QUANT_V2 = Operator(
    schema=(
        "npu::npu_grouped_matmul_swiglu_quant_v2(Tensor x, Tensor[] weight, Tensor[] weight_scale, Tensor x_scale, "
        "Tensor group_list, *, Tensor? smooth_scale=None, Tensor[]? weight_assist_matrix=None, Tensor? bias=None, "
        "int? dequant_mode=0, int? dequant_dtype=6, int? quant_mode=0, int? quant_dtype=1, int? group_list_type=0, "
        "int[]? tuning_config=None, int? x_dtype=None, int? weight_dtype=None, int? weight_scale_dtype=None, "
        "int? x_scale_dtype=None) -> (Tensor, Tensor)"
    ),
    compute=_swiglu_quant,
    uncomputed={
        "smooth_scale": "it is for weights in int4",
        "weight_assist_matrix": "it is for weights in int4",
        "bias": "the page takes none",
        "x_dtype weight_dtype weight_scale_dtype x_scale_dtype": "formats of 8 and 4 bits are not decomposed",
    },
    without_effect=frozenset({"dequant_mode", "dequant_dtype", "quant_mode", "quant_dtype", "tuning_config"}),
    outputs=_swiglu_quant_outputs,
    dims={"weight": "G K N", "x": "M K", "weight_scale": "G N", "x_scale": "M", "group_list": "G"},
    dtypes={"x weight": INT8, "weight_scale": FLOATS, "x_scale": FLOAT32, "group_list": INT64},
    limits={
        HOST: (
            Limit("length(weight) == 1 and length(weight_scale) == 1", because="lists of tensors are not decomposed"),
            "N % 2 == 0",
            "group_list_type in (0, 1)",
            "dequant_mode == 0",
            "dequant_dtype == 6",
            "quant_mode == 0",
            "quant_dtype == 1",
        ),
        **dict.fromkeys(A2_A3, ("K < 65536", "N <= 10240", "G <= 1024")),
    },
    flops=lambda x, weight: product(x, weight[0].shape[2]),
    source=(
        "torch_npu 2.13.0: docstring of npu_grouped_matmul_swiglu_quant_v2; op-plugin: its page; CANN: "
        "aclnnGroupedMatmulSwigluQuantV2 (A2 and A3; the weight in FRACTAL_NZ alone)"
    ),
    summary=(
        "a, b = halves of int32(x[i] · weight[g]) · weight_scale[g] · x_scale[i] in float32, for row i of group g; "
        "y, scale = dynamic quantisation of a · sigmoid(a) · b"
    ),
)  # fmt: skip
