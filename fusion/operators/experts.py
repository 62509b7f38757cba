"""Experts of a mixture: rows of tokens sorted by expert, products of each group with its own matrix, and their sums.

A token has K rows, one for each expert that it chose. Row i of the sorted ones is of expert e where
counts[0] + .. + counts[e - 1] <= i < counts[0] + .. + counts[e].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusion.operators.contract import A2_A3, HOST, Limit, Operator, unused
from fusion.operators.dtypes import FLOATS, INT32, INT64, compute_dtype
from fusion.operators.flops import product


def _init_routing(
    x: Tensor, expert_idx: Tensor, expert_num: int, row_idx_type: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    experts = expert_idx.flatten()
    found, order = experts.sort(stable=True)
    edges = torch.arange(expert_num + 1, dtype=found.dtype, device=found.device)
    ends = torch.searchsorted(found, edges)
    places = order if row_idx_type else torch.empty_like(order).scatter(0, order, _numbers(order))
    rows = x[order // expert_idx.shape[1]]
    return rows, places.to(torch.int32), ends[1:] - ends[:-1], x.new_zeros(rows.shape[:1], dtype=torch.float32)


def _numbers(like: Tensor) -> Tensor:
    """0, 1, … as many as `like` has."""
    return torch.arange(like.shape[0], dtype=like.dtype, device=like.device)


def _routed(x: Tensor, expert_idx: Tensor, expert_num: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = expert_idx.shape[0] * expert_idx.shape[1]
    return (
        x.new_empty((rows, x.shape[1])),
        x.new_empty((rows,), dtype=torch.int32),
        x.new_empty((expert_num,), dtype=torch.int64),
        x.new_empty((rows,), dtype=torch.float32),
    )


_QUANTISED = "rows that are quantised on the way are not decomposed"

MOE_INIT_ROUTING_V2 = Operator(
    schema=(
        "npu::npu_moe_init_routing_v2(Tensor x, Tensor expert_idx, *, Tensor? scale=None, Tensor? offset=None, "
        "int active_num=-1, int expert_capacity=-1, int expert_num=-1, int drop_pad_mode=0, "
        "int expert_tokens_num_type=0, bool expert_tokens_num_flag=False, int quant_mode=-1, "
        "int[2] active_expert_range=[], int row_idx_type=0, int? x_dtype=None) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    compute=_init_routing,
    outputs=_routed,
    dims={"x": "T H", "expert_idx": "T K"},
    dtypes={"x": FLOATS, "expert_idx": INT32},
    limits={
        HOST: (
            "expert_num > 0 and K <= expert_num",
            "row_idx_type in (0, 1)",
            Limit("quant_mode == -1", because=_QUANTISED),
            *unused(("scale", "offset"), _QUANTISED),
            *unused(("x_dtype",), "formats of 8 and 4 bits are not decomposed"),
            Limit("active_num == 0", because="torch_npu takes -1 for all rows as well, CANN does not"),
            Limit("drop_pad_mode == 0", because="rows beyond a capacity are not dropped"),
            Limit("expert_tokens_num_type == 1 and expert_tokens_num_flag", because="each expert's rows are counted"),
            Limit("active_expert_range == (0, expert_num)", because="rows of experts elsewhere are not left out"),
        ),
        **dict.fromkeys(A2_A3, ("expert_num <= 10240",)),
    },
    source="op-plugin: torch_npu.npu_moe_init_routing_v2 (A2 and A3); CANN: aclnnMoeInitRoutingV3",
    summary=(
        "order = stable sort of expert_idx [T · K]; expanded_x[i] = x[order[i] / K]; expanded_row_idx[order[i]] = i, "
        "or order[i] where row_idx_type is 1; counts[e] = rows of expert e"
    ),
)


def _finalize_routing(
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
) -> Tensor:
    wide = compute_dtype(expanded_permuted_rows)
    rows = expanded_permuted_rows[expanded_src_to_dst_row.long()].unflatten(0, tuple(scales.shape)).to(wide)
    if bias is not None and export_for_source_row is not None:
        rows = rows + bias[export_for_source_row.long()].to(wide)
    out = (rows * scales.to(wide).unsqueeze(-1)).sum(1)
    for more in (skip1, skip2):
        out = out if more is None else out + more.to(wide)
    return out.to(expanded_permuted_rows.dtype)


MOE_FINALIZE_ROUTING = Operator(
    schema=(
        "npu::npu_moe_finalize_routing(Tensor expanded_permuted_rows, Tensor? skip1, Tensor? skip2, Tensor? bias, "
        "Tensor? scales, Tensor expanded_src_to_dst_row, Tensor? export_for_source_row, int? drop_pad_mode=0, "
        "int? k=1) -> Tensor"
    ),
    compute=_finalize_routing,
    outputs=lambda expanded_permuted_rows, scales: expanded_permuted_rows.new_empty(
        (scales.shape[0], expanded_permuted_rows.shape[1])
    ),
    dims={
        "scales": "T K",
        "expanded_permuted_rows": "R H",
        "expanded_src_to_dst_row": "R",
        "skip1": "T H",
        "skip2": "T H",
        "bias": "E H",
        "export_for_source_row": "T K",
    },
    dtypes={
        "expanded_permuted_rows scales skip1 skip2 bias": FLOATS,
        "expanded_src_to_dst_row export_for_source_row": INT32,
    },
    limits={
        HOST: (
            Limit("given(scales)", because="sums without weights are not decomposed"),
            "R == T * K",
            Limit("drop_pad_mode == 2", because="this is the order in which npu_moe_init_routing_v2 lists rows"),
            Limit("given(skip1)", when="given(skip2)"),
            Limit(
                "given(export_for_source_row)",
                when="given(bias)",
                because="it lists of which expert each row is",
            ),
            Limit("given(bias)", when="given(export_for_source_row)", because="it is read for biases alone"),
        ),
        **dict.fromkeys(
            A2_A3,
            (
                Limit(
                    "dtype(scales) == dtype(expanded_permuted_rows)",
                    because="torch_npu documents this alone, CANN float32 beside bfloat16 as well",
                ),
                Limit("dtype(skip1) == dtype(expanded_permuted_rows)", when="given(skip1)"),
                Limit("dtype(skip2) == dtype(expanded_permuted_rows)", when="given(skip2)"),
                Limit("dtype(bias) == dtype(expanded_permuted_rows)", when="given(bias)"),
            ),
        ),
    },
    source=(
        "op-plugin: torch_npu.npu_moe_finalize_routing, whose table names A2 alone; CANN: aclnnMoeFinalizeRoutingV2, "
        "which names A3 too, and ops-transformer has its kernel for ascend910_93"
    ),
    summary=(
        "out[t] = round(skip1[t] + skip2[t] + Σ_k scales[t, k] · (rows[expanded_src_to_dst_row[t · K + k]] + "
        "bias[export_for_source_row[t, k]]))"
    ),
)


def _grouped_matmul(
    x: Sequence[Tensor], weight: Sequence[Tensor], group_list: Tensor, group_list_type: int
) -> list[Tensor]:
    rows, matrices = x[0], weight[0]
    counts = group_list if group_list_type else group_list.diff(prepend=group_list.new_zeros(1))
    if _has_kernel(rows, matrices):
        ends = counts.cumsum(0).to(torch.int32)
        return [torch.ops.aten._grouped_mm.default(rows, matrices, ends)]
    return [_by_blocks(rows, matrices, counts)]


def _has_kernel(rows: Tensor, matrices: Tensor) -> bool:
    """Whether torch multiplies groups itself: bfloat16, in lines of 16 bytes."""
    lines = all(size % 8 == 0 for size in matrices.shape[1:])
    plain = matrices.is_contiguous() or matrices.mT.is_contiguous()
    return rows.dtype == matrices.dtype == torch.bfloat16 and lines and plain and rows.is_contiguous()


def _by_blocks(rows: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """Each group in blocks of as many rows, the last of them filled up; a block has one matrix.

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
    products = torch.bmm(rows[inside.clamp(0, count - 1)], matrices[group])
    row = torch.arange(count, device=rows.device)
    group = torch.searchsorted(row_ends, row, right=True)
    found = block_starts[group] * size + (row - row_starts[group])
    return products.flatten(0, 1)[found]


_GROUPED = (
    "K < 65536 and N < 65536",
    "G <= 1024",
    "dtype(weight) == dtype(x)",
    Limit("G > 1", when="group_list_type == 1", because="a list of counts has more than one"),
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
    outputs=lambda x, weight: [x[0].new_empty((x[0].shape[0], weight[0].shape[2]))],
    dims={"weight": "G K N", "x": "M K", "group_list": "G"},
    dtypes={"x weight": FLOATS, "group_list": INT64},
    limits={
        HOST: (
            Limit("length(x) == 1 and length(weight) == 1", because="lists of tensors are not decomposed"),
            Limit("given(group_list)", because="groups are told by a tensor"),
            Limit("group_type == 0", because="groups of rows are decomposed"),
            Limit("split_item in (2, 3)", because="the result is one tensor"),
            "group_list_type in (0, 1)",
            Limit("act_type == 0", because="an activation is for quantised rows alone"),
            *unused(
                (
                    "bias", "scale", "offset", "antiquant_scale", "antiquant_offset", "per_token_scale",
                    "activation_input", "activation_quant_scale", "activation_quant_offset", "tuning_config",
                    "output_dtype", "x_dtype", "weight_dtype", "scale_dtype", "per_token_scale_dtype",
                ),
                "only products of floats without bias are decomposed: op-plugin documents biases of one dim, CANN of "
                "one line for each group",
            ),
        ),
        **dict.fromkeys(A2_A3, _GROUPED),
    },
    flops=lambda x, weight: product(x[0], weight[0].shape[2]),
    source="op-plugin: torch_npu.npu_grouped_matmul (A2 and A3; x, weight and result one tensor each)",
    summary="out[i] = round(x[i] · weight[g]) for row i of group g; group_list: rows of each group, or where each ends",
)  # fmt: skip
