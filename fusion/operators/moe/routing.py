"""Mixture of experts: rows of tokens sorted by expert, optionally quantised, and weighted sums of the experts' results.

A token has K choices of one expert each. Choice t · K + k is the k-th of token t; sorted by expert, the choice at place
i is of expert e where counts[0] + .. + counts[e - 1] <= i < counts[0] + .. + counts[e].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion.operators import encodings
from fusion.operators.cache.pages import negatives_out_of_bounds
from fusion.operators.calling import Given
from fusion.operators.dtype_sets import FLOAT32, FLOATS, INT8, INT32, compute_dtype
from fusion.operators.limits import A2_A3, HOST, Limit
from fusion.operators.operator import Operator

_STATIC, _DYNAMIC = 0, 1
"""Values of `quant_mode`: one scale and one offset for all rows, or a scale computed per row."""
_PAIRS = 2
"""Value of `expert_tokens_num_type`: pairs of an expert and its count, without experts whose count is 0."""


@dataclass(frozen=True)
class _Sorted:
    """Choices [T · K] sorted by active expert, those of inactive experts last.

    `order` are their numbers in token order, `experts` their experts, counted from the first active one; `starts` and
    `counts` [E] are the first place and the number of choices of each active expert.
    """

    order: Tensor
    experts: Tensor
    starts: Tensor
    counts: Tensor

    @property
    def active(self) -> Tensor:
        """Mask [T · K] of sorted choices whose expert is active."""
        return self.experts < self.counts.shape[0]


def _range(given: Given) -> tuple[int, int]:
    """Return the first active expert, and the last one plus 1."""
    first, behind = given["active_expert_range"] or (0, given["expert_num"])
    return first, behind


def _sorted(given: Given) -> _Sorted:
    """Sort the choices of a call by expert, in token order within one expert, those of inactive experts last.

    Experts outside `active_expert_range` are inactive; without a range, all experts are active.
    """
    first, behind = _range(given)
    experts = given["expert_idx"].flatten() - first
    experts = experts.masked_fill((experts < 0) | (experts >= behind - first), behind - first)
    ascending, order = experts.sort(stable=True)
    edges = torch.arange(behind - first + 1, dtype=ascending.dtype, device=ascending.device)
    ends = torch.searchsorted(ascending, edges)
    return _Sorted(order, ascending, ends[:-1], ends[1:] - ends[:-1])


def _init_routing(given: Given) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    routed, x = _sorted(given), given["x"]
    tokens = routed.order // given["expert_idx"].shape[1]
    if not given["drop_pad_mode"] and given["active_num"] > 0:
        tokens = tokens[: given["active_num"]]
    rows, scales = _quantised(x[tokens], _scale_of_rows(given, routed, tokens), given)
    if given["drop_pad_mode"]:
        slots, places = _slots(given, routed)
        room = given["expert_num"] * given["expert_capacity"]
        rows = _placed(rows, slots, room).unflatten(0, (given["expert_num"], -1))
        scales = scales if scales is None else _placed(scales, slots, room)
    else:
        places = routed.order if given["row_idx_type"] else _inverse(routed.order, _numbers(routed))
        if given["active_expert_range"] and tuple(given["active_expert_range"]) != (0, given["expert_num"]):
            unused = ~routed.active[: rows.shape[0]]
            rows = rows.masked_fill(unused[:, None], 0)  # no page documents these rows
            scales = scales if scales is None else scales.masked_fill(unused, 0)
    if scales is None:
        scales = x.new_zeros(_shapes(given)[1], dtype=torch.float32)
    return rows, places.to(torch.int32), _counted(given, routed), scales


def _scale_of_rows(given: Given, routed: _Sorted, tokens: Tensor) -> Tensor | None:
    """Return the argument `scale` for each row of `tokens` as sorted in `routed`.

    It is the scale [R] of the row's token without quantisation, or the factors [R or 1, H] of the row's expert in
    dynamic quantisation. With static quantisation it is returned as it is, or None if it is not given.
    """
    scale = given["scale"]
    if scale is None or given["quant_mode"] == _STATIC:
        return scale
    if given["quant_mode"] == _DYNAMIC:
        last = scale.shape[0] - 1
        return scale if last == 0 else scale[routed.experts[: tokens.shape[0]].clamp(max=last)]
    return scale[tokens]


def _quantised(rows: Tensor, scale: Tensor | None, given: Given) -> tuple[Tensor, Tensor | None]:
    """Quantise `rows` by `quant_mode`, and return them with the scale of each row: computed in the dynamic mode, None
    in the static one. Without a quantisation return `rows` and `scale`."""
    if given["quant_mode"] == _DYNAMIC:
        wide = rows.to(compute_dtype(rows))
        return encodings.INT8.quantised(wide if scale is None else wide * scale.to(wide.dtype))
    if given["quant_mode"] == _STATIC and scale is not None:
        stored = torch.float16 if rows.dtype in FLOATS else rows.dtype  # the kernel computes in float16
        return encodings.INT8.stored(rows.to(stored) * scale.to(stored) + given["offset"].to(stored)), None
    return rows, scale


def _slots(given: Given, routed: _Sorted) -> tuple[Tensor, Tensor]:
    """Return the slots of the choices in the result, where expert e has the slots e · capacity + n for n < capacity.

    Returns:
        The slot of each sorted choice, experts · capacity if it is dropped; and that of each choice in the order of the
        tokens, -1 if it is dropped.
    """
    capacity, experts = given["expert_capacity"], given["expert_num"]
    place = torch.arange(routed.order.shape[0], device=routed.order.device)
    rank = place - routed.starts[routed.experts.clamp(max=experts - 1)]
    fits = routed.active & (rank < capacity)
    slots = torch.where(fits, routed.experts * capacity + rank, experts * capacity)
    return slots, _inverse(routed.order, torch.where(fits, slots, -1))


def _placed(x: Tensor, slots: Tensor, room: int) -> Tensor:
    """Scatter the rows `x` to the rows `slots` of zeros [`room`, ..]; a row with the slot `room` is dropped."""
    zeros = x.new_zeros((room + 1, *x.shape[1:]))
    return torch.ops.aten.index_put.default(zeros, [slots], x)[:-1]


def _inverse(order: Tensor, values: Tensor) -> Tensor:
    """Return `values`, of which the i-th belongs to choice `order[i]`, in the order of the choices."""
    return torch.empty_like(values).scatter(0, order, values)


def _numbers(routed: _Sorted) -> Tensor:
    """Return the index of each sorted choice, -1 where its expert is inactive."""
    places = torch.arange(routed.order.shape[0], dtype=routed.order.dtype, device=routed.order.device)
    return places.masked_fill(~routed.active, -1)


def _counted(given: Given, routed: _Sorted) -> Tensor:
    """Return the counts of choices per active expert as `expert_tokens_num_type` selects: prefix sums (0), counts (1),
    or pairs (2), padded by zeros; a scalar 0 without `expert_tokens_num_flag`."""
    counts = routed.counts
    if not given["expert_tokens_num_flag"]:
        return counts.new_zeros(())
    if given["expert_tokens_num_type"] != _PAIRS:
        return counts if given["expert_tokens_num_type"] else counts.cumsum(0)
    first, _ = _range(given)
    experts = torch.arange(counts.shape[0], device=counts.device) + first
    front = (counts == 0).to(torch.int8).argsort(stable=True)
    pairs = torch.stack((experts, counts), dim=-1)[front]
    pairs = pairs.masked_fill((counts[front] == 0)[:, None], 0)
    return torch.cat((pairs, pairs.new_zeros((given["expert_num"] - pairs.shape[0], 2))))


def _shapes(given: Given) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the leading dims of the result expanded_x, and the shape of the result expanded_scale."""
    choices, experts = given["expert_idx"].shape[0] * given["expert_idx"].shape[1], given["expert_num"]
    lead: tuple[Any, ...] = (choices,)
    if given["drop_pad_mode"]:
        lead = (experts, given["expert_capacity"])
    elif given["active_num"] > 0:
        lead = (torch.sym_min(given["active_num"], choices),)
    return lead, () if given["quant_mode"] == _STATIC else (math.prod(lead),)


def _routed(given: Given) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, scale, mode = given["x"], given["scale"], given["quant_mode"]
    (first, behind), (lead, scales) = _range(given), _shapes(given)
    pairs = given["expert_tokens_num_type"] == _PAIRS
    counted = ((given["expert_num"], 2) if pairs else (behind - first,)) if given["expert_tokens_num_flag"] else ()
    scale_dtype = torch.float32 if mode == _STATIC or scale is None else scale.dtype
    return (
        x.new_empty((*lead, x.shape[1]), dtype=torch.int8 if mode in (_STATIC, _DYNAMIC) else x.dtype),
        x.new_empty((given["expert_idx"].numel(),), dtype=torch.int32),
        x.new_empty(counted, dtype=torch.int64),
        x.new_empty(scales, dtype=compute_dtype(x) if mode == _DYNAMIC else scale_dtype),
    )


_PADDED = "drop_pad_mode == 1"
_SOME = "length(active_expert_range) == 2"
_DOCUMENTED = "the docstring of torch_npu 2.13.0 has no other"

MOE_INIT_ROUTING_V2 = Operator(
    schema=(
        "npu::npu_moe_init_routing_v2(Tensor x, Tensor expert_idx, *, Tensor? scale=None, Tensor? offset=None, "
        "int active_num=-1, int expert_capacity=-1, int expert_num=-1, int drop_pad_mode=0, "
        "int expert_tokens_num_type=0, bool expert_tokens_num_flag=False, int quant_mode=-1, "
        "int[2] active_expert_range=[], int row_idx_type=0, int? x_dtype=None) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    compute=_init_routing,
    uncomputed={"x_dtype": "formats of 8 and 4 bits are not decomposed"},
    outputs=_routed,
    dims={"x": "T H", "expert_idx": "T K", "scale": "Ns / Ns Hs", "offset": "1"},
    dtypes={"x": FLOATS | INT8, "expert_idx": INT32, "scale offset": FLOAT32},
    limits={
        HOST: (
            "expert_num > 0 and K <= expert_num",
            "row_idx_type in (0, 1)",
            Limit("quant_mode in (-1, 0, 1)", because="the other modes give formats of 8 and 4 bits"),
            Limit("dtype(x) != 'int8'", when="quant_mode != -1", because="the rows are int8 already"),
            Limit("rank(scale) == 1 and Ns == T", when="quant_mode == -1 and given(scale)"),
            Limit("given(scale)", when="quant_mode == 0"),
            Limit("rank(scale) == 1 and Ns == 1", when="quant_mode == 0"),
            Limit("given(offset)", when="quant_mode == 0", because="the page asks for both"),
            Limit("not given(offset)", when="quant_mode != 0", because="only the static quantisation has one"),
            Limit("rank(scale) == 2 and Hs == H", when="quant_mode == 1 and given(scale)"),
            Limit("Ns == 1 or Ns == expert_num", when=f"quant_mode == 1 and given(scale) and not {_SOME}"),
            Limit(
                "Ns == 1 or Ns == item(active_expert_range, 1) - item(active_expert_range, 0)",
                when=f"quant_mode == 1 and given(scale) and {_SOME}",
                because="each active expert has its factors, or all have the same",
            ),
            Limit("expert_tokens_num_type in (0, 1, 2)"),
            "active_num >= -1",
            "drop_pad_mode in (0, 1)",
            Limit("expert_capacity > 0", when=_PADDED),
            Limit("expert_tokens_num_type == 1", when=_PADDED, because="the page counts dropped rows in no other way"),
            Limit("row_idx_type == 0", when=_PADDED, because="the page has slots of choices alone"),
            Limit("length(active_expert_range) in (0, 2)"),
            Limit(
                "0 <= item(active_expert_range, 0) and item(active_expert_range, 0) < item(active_expert_range, 1) and "
                "item(active_expert_range, 1) <= expert_num",
                when=_SOME,
            ),
            Limit("length(active_expert_range) == 0 or active_expert_range == (0, expert_num)", when=_PADDED),
        ),
        **dict.fromkeys(
            A2_A3,
            (
                "expert_num <= 10240",
                Limit("active_num == 0", because="torch_npu takes -1 for all rows as well, CANN does not"),
                Limit("quant_mode in (-1, 1)", because=_DOCUMENTED),
                Limit("drop_pad_mode == 0", because=_DOCUMENTED),
                Limit("expert_tokens_num_type in (1, 2) and expert_tokens_num_flag", because=_DOCUMENTED),
            ),
        ),
    },
    moves=True,
    source=(
        "op-plugin: torch_npu.npu_moe_init_routing_v2 (A2 and A3; its equivalent code in numpy), "
        "test_npu_moe_init_routing_v2.py; CANN: aclnnMoeInitRoutingV3"
    ),
    summary=(
        "order = stable sort of expert_idx [T · K]; expanded_x[i] = x[order[i] / K]; expanded_row_idx[order[i]] = i, "
        "or order[i] where row_idx_type is 1; counts[e] = rows of expert e; expanded_scale[i] = scale[order[i] / K]; "
        "quant_mode 0: rint(x · scale + offset) in half; 1: dynamic quantisation of x · scale[expert]; "
        "active_num: the first rows alone; active_expert_range: rows of other experts are left out, their index is -1; "
        "drop_pad_mode 1: expert_capacity rows for each expert, filled up by zeros, rows beyond are dropped"
    ),
)


def _finalize_routing(given: Given) -> Tensor:
    """Compute Σ_k scales[t, k] · (rows[index] + bias[expert]) + skip1 + skip2 for each token t: [T, H]."""
    experts = given["expanded_permuted_rows"]
    rows, shape = experts.flatten(0, -2), _tokens_and_choices(given)
    index = given["expanded_src_to_dst_row"].long()
    index = index.unflatten(0, shape) if given["drop_pad_mode"] in (2, 3) else index.unflatten(0, shape[::-1]).t()
    wide = compute_dtype(rows)
    if given["drop_pad_mode"] in (1, 3):
        summed = rows[index.clamp(min=0)].to(wide).masked_fill((index < 0).unsqueeze(-1), 0)
    else:
        summed = rows[negatives_out_of_bounds(index)].to(wide)
    if given["bias"] is not None:
        summed = summed + given["bias"][given["export_for_source_row"].long()].to(wide)
    if given["scales"] is not None:
        summed = summed * given["scales"].to(wide).unsqueeze(-1)
    out = summed.sum(1)
    for more in (given["skip1"], given["skip2"]):
        out = out if more is None else out + more.to(wide)
    return out.to(rows.dtype)


def _tokens_and_choices(given: Given) -> tuple[int, int]:
    if given["scales"] is not None:
        tokens, choices = given["scales"].shape
        return tokens, choices
    choices = given["k"] or 1
    return given["expanded_src_to_dst_row"].shape[0] // choices, choices


_DROPPED = "drop_pad_mode in (1, 3)"
_TOKENS = "(given(skip1) or given(export_for_source_row))"

MOE_FINALIZE_ROUTING = Operator(
    schema=(
        "npu::npu_moe_finalize_routing(Tensor expanded_permuted_rows, Tensor? skip1, Tensor? skip2, Tensor? bias, "
        "Tensor? scales, Tensor expanded_src_to_dst_row, Tensor? export_for_source_row, int? drop_pad_mode=0, "
        "int? k=1) -> Tensor"
    ),
    compute=_finalize_routing,
    outputs=lambda given: given["expanded_permuted_rows"].new_empty(
        (_tokens_and_choices(given)[0], given["expanded_permuted_rows"].shape[-1])
    ),
    dims={
        "scales": "T K",
        "expanded_src_to_dst_row": "I",
        "expanded_permuted_rows": "R H / E C H",
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
            "drop_pad_mode in (None, 0, 1, 2, 3)",
            Limit("rank(expanded_permuted_rows) == 3", when=_DROPPED, because="each expert has as many rows"),
            Limit("rank(expanded_permuted_rows) == 2 and R == I", when=f"not ({_DROPPED})"),
            Limit("I == T * K", when="given(scales)"),
            Limit("k in (None, 1, K)", when="given(scales)", because="the scales have as many columns"),
            Limit("not given(k) or k > 0 and I % k == 0", when="not given(scales)"),
            Limit("given(k) and T * k == I or not given(k) and T == I", when=f"not given(scales) and {_TOKENS}"),
            Limit("k == K or not given(k) and K == 1", when="not given(scales) and given(export_for_source_row)"),
            Limit("given(skip1)", when="given(skip2)"),
            Limit("given(export_for_source_row)", when="given(bias)", because="it lists of which expert each row is"),
            Limit(
                "not given(bias)",
                when=_DROPPED,
                because="its page adds the biases of rows that are dropped as well, and its kernels do not",
            ),
        ),
        **dict.fromkeys(
            A2_A3,
            (
                Limit(
                    "dtype(scales) == dtype(expanded_permuted_rows)",
                    when="given(scales)",
                    because="torch_npu documents this alone, CANN float32 beside bfloat16 as well",
                ),
                Limit("dtype(skip1) == dtype(expanded_permuted_rows)", when="given(skip1)"),
                Limit("dtype(skip2) == dtype(expanded_permuted_rows)", when="given(skip2)"),
                Limit("dtype(bias) == dtype(expanded_permuted_rows)", when="given(bias)"),
            ),
        ),
    },
    source=(
        "op-plugin: torch_npu.npu_moe_finalize_routing, whose table names A2 alone, its equivalent code in numpy and "
        "MoeFinalizeRoutingKernelNpuOpApi (k without scales); CANN: aclnnMoeFinalizeRoutingV2, which names A3 too, and "
        "ops-transformer has its kernel for ascend910_93"
    ),
    summary=(
        "out[t] = round(skip1[t] + skip2[t] + Σ_k scales[t, k] · (rows[expanded_src_to_dst_row[i]] + "
        "bias[export_for_source_row[t, k]])), i = k · T + t where drop_pad_mode is 0 or 1, t · K + k where it is 2 or "
        "3; modes 1 and 3: rows of E experts with C slots each, of which index -1 is a row of zeros"
    ),
)
