"""Experts of a mixture: rows of tokens sorted by expert, perhaps quantised on the way, and sums of what experts give.

A token has K rows, one for each expert that it chose. Row i of the sorted ones is of expert e where
counts[0] + .. + counts[e - 1] <= i < counts[0] + .. + counts[e].
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusion.operators.contract import A2_A3, HOST, Limit, Operator, unused
from fusion.operators.dtypes import FLOAT32, FLOATS, INT8, INT32, compute_dtype
from fusion.operators.quantisation import quantised


def _init_routing(
    x: Tensor, expert_idx: Tensor, scale: Tensor | None, expert_num: int, quant_mode: int, row_idx_type: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    experts = expert_idx.flatten()
    found, order = experts.sort(stable=True)
    edges = torch.arange(expert_num + 1, dtype=found.dtype, device=found.device)
    ends = torch.searchsorted(found, edges)
    places = order if row_idx_type else torch.empty_like(order).scatter(0, order, _numbers(order))
    tokens = order // expert_idx.shape[1]
    rows, scales = x[tokens], None if scale is None else scale[tokens]
    if quant_mode == 1:
        rows, scales = quantised(rows.to(compute_dtype(x)))
    told = x.new_zeros(rows.shape[:1], dtype=torch.float32) if scales is None else scales
    return rows, places.to(torch.int32), ends[1:] - ends[:-1], told


def _numbers(like: Tensor) -> Tensor:
    """0, 1, … as many as `like` has."""
    return torch.arange(like.shape[0], dtype=like.dtype, device=like.device)


def _routed(
    x: Tensor, expert_idx: Tensor, scale: Tensor | None, expert_num: int, quant_mode: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = expert_idx.shape[0] * expert_idx.shape[1]
    dtype = compute_dtype(x) if quant_mode == 1 else torch.float32 if scale is None else scale.dtype
    return (
        x.new_empty((rows, x.shape[1]), dtype=torch.int8 if quant_mode == 1 else x.dtype),
        x.new_empty((rows,), dtype=torch.int32),
        x.new_empty((expert_num,), dtype=torch.int64),
        x.new_empty((rows,), dtype=dtype),
    )


_SMOOTH = "factors of lanes, before rows are quantised on the way, are not decomposed"

MOE_INIT_ROUTING_V2 = Operator(
    schema=(
        "npu::npu_moe_init_routing_v2(Tensor x, Tensor expert_idx, *, Tensor? scale=None, Tensor? offset=None, "
        "int active_num=-1, int expert_capacity=-1, int expert_num=-1, int drop_pad_mode=0, "
        "int expert_tokens_num_type=0, bool expert_tokens_num_flag=False, int quant_mode=-1, "
        "int[2] active_expert_range=[], int row_idx_type=0, int? x_dtype=None) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    compute=_init_routing,
    outputs=_routed,
    dims={"x": "T H", "expert_idx": "T K", "scale": "T"},
    dtypes={"x": FLOATS | INT8, "expert_idx": INT32, "scale": FLOAT32},
    limits={
        HOST: (
            "expert_num > 0 and K <= expert_num",
            "row_idx_type in (0, 1)",
            Limit("quant_mode in (-1, 1)", because="rows are quantised by token, or not at all"),
            Limit("not given(scale)", when="quant_mode == 1", because=_SMOOTH),
            Limit("dtype(x) != 'int8'", when="quant_mode == 1", because="they are whole numbers already"),
            *unused(("offset",), "offsets are not decomposed"),
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
        "or order[i] where row_idx_type is 1; counts[e] = rows of expert e; expanded_scale[i] = scale[order[i] / K]; "
        "quant_mode 1: expanded_x, expanded_scale = dynamic quantisation of these rows"
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
