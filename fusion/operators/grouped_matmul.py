"""Products of groups: sorted rows, each group times its own matrix, of floats or of int8.

Row i is of group g where counts[0] + .. + counts[g - 1] <= i < counts[0] + .. + counts[g].

    floats    out[i] = x[i] · weight[g]        W8A8    out[i] = (x[i] · weight[g]) · scale[g] · per_token_scale[i]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import silu

from fusion.operators.contract import A2_A3, HOST, Limit, Operator, only, unused
from fusion.operators.dtypes import BFLOAT16, FLOAT32, FLOATS, INT8, INT64, compute_dtype
from fusion.operators.flops import product
from fusion.operators.quantisation import CODES, int8_product, quantised, result_dtype


def _grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    scale: Sequence[Tensor] | None,
    per_token_scale: Sequence[Tensor] | None,
    group_list: Tensor,
    group_list_type: int,
    output_dtype: int | None,
) -> list[Tensor]:
    rows, matrices = x[0], weight[0]
    counts = group_list if group_list_type else group_list.diff(prepend=group_list.new_zeros(1))
    if scale is not None and per_token_scale is not None:
        wide = _dequantised(rows, matrices, scale[0], per_token_scale[0], counts)
        return [wide.to(result_dtype(scale[0], output_dtype))]
    if _has_kernel(rows, matrices):
        ends = counts.cumsum(0).to(torch.int32)
        return [torch.ops.aten._grouped_mm.default(rows, matrices, ends)]
    return [_by_blocks(rows, matrices, counts)]


def _dequantised(rows: Tensor, matrices: Tensor, scale: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:
    """Whole numbers, times a scale of each channel of a group and one of each row."""
    wide = compute_dtype(scale)
    total = _by_blocks(rows, matrices, counts).to(wide)
    return total * scale.to(wide)[_groups(counts, rows.shape[0])] * tokens.to(wide).unsqueeze(-1)


def _groups(counts: Tensor, rows: int) -> Tensor:
    """The group of each row [rows]."""
    return torch.searchsorted(counts.cumsum(0), torch.arange(rows, device=counts.device), right=True)


def _has_kernel(rows: Tensor, matrices: Tensor) -> bool:
    """Whether torch multiplies groups itself: bfloat16, in lines of 16 bytes."""
    lines = all(size % 8 == 0 for size in matrices.shape[1:])
    plain = matrices.is_contiguous() or matrices.mT.is_contiguous()
    return rows.dtype == matrices.dtype == torch.bfloat16 and lines and plain and rows.is_contiguous()


def _by_blocks(rows: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """Each group in blocks of as many rows, the last of them filled up; a block has one matrix. Sums of int8 in int32.

    Blocks are as long as groups are on average, so that there are at most two matrices for each group, and one for
    each row at most: what is multiplied is no more than twice what must be.
    """
    count, groups = rows.shape[0], matrices.shape[0]
    size = (count + groups - 1) // groups
    blocks_of = (counts + (size - 1)) // size
    row_ends, block_ends = counts.cumsum(0), blocks_of.cumsum(0)
    row_starts, block_starts = row_ends - counts, block_ends - blocks_of
    block = torch.arange(torch.sym_min(count, count // size + groups), device=rows.device)
    group = torch.searchsorted(block_ends, block, right=True).clamp(max=groups - 1)
    places = (block - block_starts[group]) * size + row_starts[group]
    inside = places.unsqueeze(-1) + torch.arange(size, device=rows.device)
    multiply = int8_product if rows.dtype == torch.int8 else torch.bmm
    products = multiply(rows[inside.clamp(0, count - 1)], matrices[group])
    row, group = torch.arange(count, device=rows.device), _groups(counts, count)
    found = block_starts[group] * size + (row - row_starts[group])
    return products.flatten(0, 1)[found]


_INT8 = "dtype(x) == 'int8'"
_GROUPED = (
    "K < 65536 and N < 65536",
    "G <= 1024",
    "dtype(weight) == dtype(x)",
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
    outputs=lambda x, weight, scale, output_dtype: [
        x[0].new_empty(
            (x[0].shape[0], weight[0].shape[2]),
            dtype=x[0].dtype if scale is None else result_dtype(scale[0], output_dtype),
        )
    ],
    dims={"weight": "G K N", "x": "M K", "group_list": "G", "scale": "G N", "per_token_scale": "M"},
    dtypes={
        "x weight": FLOATS | INT8,
        "group_list": INT64,
        "scale": FLOAT32 | BFLOAT16,
        "per_token_scale": FLOAT32,
    },
    limits={
        HOST: (
            Limit("length(x) == 1 and length(weight) == 1", because="lists of tensors are not decomposed"),
            Limit("given(group_list)", because="groups are told by a tensor"),
            Limit("group_type == 0", because="groups of rows are decomposed"),
            Limit("split_item in (2, 3)", because="the result is one tensor"),
            "group_list_type in (0, 1)",
            Limit("act_type == 0", because="activations behind the products are not decomposed"),
            *only(("scale", "per_token_scale", "output_dtype"), _INT8, "products of floats have none"),
            Limit(f"output_dtype in {tuple(CODES)}", when=_INT8, because="results of whole numbers are not decomposed"),
            *unused(
                (
                    "bias", "offset", "antiquant_scale", "antiquant_offset", "activation_input",
                    "activation_quant_scale", "activation_quant_offset", "tuning_config", "x_dtype", "weight_dtype",
                    "scale_dtype", "per_token_scale_dtype",
                ),
                "only products without bias, of floats or of int8, are decomposed: op-plugin documents biases of one "
                "dim, CANN of one line for each group",
            ),
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
        "out[i] = round(x[i] · weight[g]), of int8 round(int32(x[i] · weight[g]) · scale[g] · per_token_scale[i]), for "
        "row i of group g; group_list: rows of each group, or where each ends"
    ),
)  # fmt: skip


def _swiglu_quant(
    x: Tensor, weight: Sequence[Tensor], weight_scale: Sequence[Tensor], x_scale: Tensor, group_list: Tensor,
    group_list_type: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    counts = group_list if group_list_type else group_list.diff(prepend=group_list.new_zeros(1))
    gate, up = _dequantised(x, weight[0], weight_scale[0], x_scale, counts).chunk(2, -1)
    return quantised(silu(gate) * up)


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
            *unused(
                (
                    "smooth_scale", "weight_assist_matrix", "bias", "tuning_config", "x_dtype", "weight_dtype",
                    "weight_scale_dtype", "x_scale_dtype",
                ),
                "other operands than int8 by token and channel are not decomposed",
            ),
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
