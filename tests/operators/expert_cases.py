"""Calls of the operators that sort rows of tokens by expert, multiply them in groups, and add them up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusion.operators import CHIPS, HOST
from tests.operators.quant_cases import grid
from tests.operators.quant_references import rows as quantised

A2_A3 = CHIPS[:2]
ROUTE, GROUPED, FINISH = "npu_moe_init_routing_v2", "npu_grouped_matmul", "npu_moe_finalize_routing"
GATED = "npu_grouped_matmul_swiglu_quant_v2"
Make = Callable[[torch.dtype], dict[str, Any]]


def chosen(tokens: int, choices: int, experts: int) -> Tensor:
    """Different experts of each token; not all experts are chosen where there are many."""
    return torch.rand(tokens, experts).argsort(-1)[:, :choices].to(torch.int32)


def routing(
    tokens: int, choices: int, experts: int, row_idx_type: int = 0, width: int = 12, quantised: bool = False
) -> Make:
    """Of rows that become int8 on the way where they are `quantised`."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        x = (grid(tokens, width) if quantised else torch.randn(tokens, width, dtype=torch.float64)).to(dtype)
        how = {"active_num": 0, "expert_num": experts, "expert_tokens_num_type": 1, "expert_tokens_num_flag": True}
        return {
            "x": x, "expert_idx": chosen(tokens, choices, experts), **how, "active_expert_range": [0, experts],
            "row_idx_type": row_idx_type, "quant_mode": 1 if quantised else -1,
        }  # fmt: skip

    return make


def _whole(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def _scales(dtype: torch.dtype, *shape: int) -> Tensor:
    """Near those of int8, in float32 or wider."""
    scales = torch.rand(shape, dtype=torch.float64) / 64 + 1 / 128
    return scales.to(torch.promote_types(dtype, torch.float32))


def routing_int8(tokens: int, choices: int, experts: int) -> Make:
    """Of rows in int8, and of their scales."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        call = routing(tokens, choices, experts)(dtype)
        return call | {"x": _whole(tokens, 12), "scale": _scales(dtype, tokens)}

    return make


def groups_int8(*counts: int, inputs: int = 24, outputs: int = 16, narrow: bool = False, gated: bool = False) -> Make:
    """In int8, with scales of channels in bfloat16 where they are `narrow`; both products of a gated layer."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        x, weight = _whole(sum(counts), inputs), _whole(len(counts), inputs, outputs)
        channels, tokens = _scales(dtype, len(counts), outputs), _scales(dtype, sum(counts))
        channels = channels.to(torch.bfloat16) if narrow else channels
        told = {"group_list": torch.tensor(counts), "group_list_type": 1}
        if gated:
            return {"x": x, "weight": [weight], "weight_scale": [channels / 64], "x_scale": tokens} | told
        how = {"split_item": 2, "group_type": 0, "output_dtype": 5 if dtype == torch.float16 else 15}
        return {"x": [x], "weight": [weight], "scale": [channels], "per_token_scale": [tokens]} | told | how

    return make


def groups(*counts: int, inputs: int = 24, outputs: int = 16, turned: bool = False, ends: bool = False) -> Make:
    def make(dtype: torch.dtype) -> dict[str, Any]:
        x = torch.randn(sum(counts), inputs, dtype=torch.float64).to(dtype)
        shape = (len(counts), outputs, inputs) if turned else (len(counts), inputs, outputs)
        weight = torch.randn(shape, dtype=torch.float64).to(dtype)
        told = torch.tensor(counts).cumsum(0) if ends else torch.tensor(counts)
        how = {"group_list": told, "split_item": 2 + ends, "group_type": 0, "group_list_type": int(not ends)}
        return {"x": [x], "weight": [weight.mT if turned else weight], **how}

    return make


def finishing(tokens: int, choices: int, skips: int = 0, width: int = 12, experts: int = 0) -> Make:
    """With biases where there are `experts`."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        def numbers(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=torch.float64).to(dtype)

        skipped = [numbers(tokens, width) if number < skips else None for number in range(2)]
        return {
            "expanded_permuted_rows": numbers(tokens * choices, width), "skip1": skipped[0], "skip2": skipped[1],
            "bias": numbers(experts, width) if experts else None, "scales": numbers(tokens, choices),
            "expanded_src_to_dst_row": torch.randperm(tokens * choices).to(torch.int32),
            "export_for_source_row": chosen(tokens, choices, experts) if experts else None, "drop_pad_mode": 2,
        }  # fmt: skip

    return make


CALLS: list[tuple[str, str, Make]] = [
    (ROUTE, "rows of three tokens", routing(3, 2, 4)),
    (ROUTE, "more experts than rows", routing(1, 2, 16)),
    (ROUTE, "in order of the rows", routing(5, 3, 6, row_idx_type=1)),
    (ROUTE, "one expert each", routing(4, 1, 3)),
    (ROUTE, "rows that are quantised", routing(4, 2, 5, quantised=True)),
    (ROUTE, "rows in int8 with scales", routing_int8(4, 2, 5)),
    (GROUPED, "groups of several lengths", groups(2, 5, 1)),
    (GROUPED, "empty groups", groups(0, 3, 0, 0, 4, 0)),
    (GROUPED, "turned matrices", groups(3, 4, turned=True)),
    (GROUPED, "matrices of odd sizes", groups(2, 1, 4, inputs=7, outputs=5)),
    (GROUPED, "where each group ends", groups(1, 4, 2, ends=True)),
    (GROUPED, "one row", groups(0, 1, 0, 0)),
    (GROUPED, "all in one group", groups(0, 9)),
    (GROUPED, "in int8", groups_int8(2, 0, 5, 1)),
    (GROUPED, "in int8, of more inputs than sums in float32 hold", groups_int8(1, 3, inputs=1500)),
    (GATED, "groups of several lengths", groups_int8(2, 5, 1, gated=True)),
    (GATED, "empty groups", groups_int8(0, 3, 0, 4, 0, gated=True)),
    (FINISH, "two rows of each token", finishing(3, 2)),
    (FINISH, "one row of each", finishing(4, 1, skips=1)),
    (FINISH, "beside two others", finishing(2, 3, skips=2)),
    (FINISH, "with biases", finishing(4, 2, experts=5)),
    (FINISH, "with biases, beside two others", finishing(3, 3, skips=2, experts=4)),
]


# references ---------------------------------------------------------------------------------------------------------


def route(
    x: Tensor, expert_idx: Tensor, expert_num: int, row_idx_type: int, quant_mode: int, scale: Tensor | None = None,
    **how: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Expert by expert, the pairs that chose it."""
    listed = expert_idx.flatten().tolist()
    order = [pair for expert in range(expert_num) for pair, chose in enumerate(listed) if chose == expert]
    rows = torch.stack([x[pair // expert_idx.shape[1]] for pair in order])
    places = order if row_idx_type else [order.index(pair) for pair in range(len(order))]
    counts = [listed.count(expert) for expert in range(expert_num)]
    told = torch.zeros(len(order)) if scale is None else scale[[pair // expert_idx.shape[1] for pair in order]]
    rows, told = quantised(rows) if quant_mode == 1 else (rows, told)
    return rows, torch.tensor(places), torch.tensor(counts), told


def by_group(
    x: list[Tensor], weight: list[Tensor], group_list: Tensor, group_list_type: int, scale: list[Tensor] | None = None,
    per_token_scale: list[Tensor] | None = None, **how: Any,
) -> list[Tensor]:  # fmt: skip
    """Row by row."""
    ends = (group_list.cumsum(0) if group_list_type else group_list).tolist()
    group = [next(g for g, end in enumerate(ends) if row < end) for row in range(x[0].shape[0])]
    out = torch.stack([x[0][row].double() @ weight[0][g].double() for row, g in enumerate(group)])
    if scale is None or per_token_scale is None:
        return [out]
    return [torch.stack([out[row] * scale[0][g] * per_token_scale[0][row] for row, g in enumerate(group)])]


def gated(
    x: Tensor, weight: list[Tensor], weight_scale: list[Tensor], x_scale: Tensor, group_list: Tensor,
    group_list_type: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The products, then lane by lane."""
    (both,) = by_group([x], weight, group_list, group_list_type, weight_scale, [x_scale])
    half = both.shape[1] // 2
    return quantised(both[:, :half] / (1 + (-both[:, :half]).exp()) * both[:, half:])


def finish(
    expanded_permuted_rows: Tensor, skip1: Tensor | None, skip2: Tensor | None, bias: Tensor | None, scales: Tensor,
    expanded_src_to_dst_row: Tensor, export_for_source_row: Tensor | None, **how: Any,
) -> Tensor:  # fmt: skip
    """Token by token."""
    tokens, choices = scales.shape
    out = torch.zeros(tokens, expanded_permuted_rows.shape[1], dtype=expanded_permuted_rows.dtype)
    for token in range(tokens):
        for choice in range(choices):
            row = expanded_permuted_rows[expanded_src_to_dst_row[token * choices + choice]]
            if bias is not None and export_for_source_row is not None:
                row = row + bias[export_for_source_row[token, choice]]
            out[token] += scales[token, choice] * row
    return sum((each for each in (skip1, skip2) if each is not None), out)


REFERENCES = {ROUTE: route, GROUPED: by_group, GATED: gated, FINISH: finish}


# limits -------------------------------------------------------------------------------------------------------------


def t(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _route(experts: int = 8, choices: int = 2, **more: Any) -> dict[str, Any]:
    call = routing(3, 1, 8)(torch.bfloat16) | {"x": t(3, 16), "expert_idx": t(3, choices, dtype=torch.int32)}
    return call | {"expert_num": experts, "active_expert_range": [0, experts]} | more


def _group(count: int = 4, inputs: int = 16, outputs: int = 8, **more: Any) -> dict[str, Any]:
    call = groups(1, 2)(torch.bfloat16) | {"x": [t(3, inputs)], "weight": [t(count, inputs, outputs)]}
    return call | {"group_list": t(count, dtype=torch.int64)} | more


def _finish(**more: Any) -> dict[str, Any]:
    call = finishing(3, 2)(torch.bfloat16) | {"expanded_permuted_rows": t(6, 16), "scales": t(3, 2)}
    return call | {"expanded_src_to_dst_row": t(6, dtype=torch.int32)} | more


_ALL = (HOST, *A2_A3)
_SKIP = t(3, 16)
_BIASED = {"bias": t(8, 16), "export_for_source_row": t(3, 2, dtype=torch.int32)}
_LISTS = (
    "bias", "offset", "antiquant_scale", "antiquant_offset", "activation_input", "activation_quant_scale",
    "activation_quant_offset",
)  # fmt: skip
_CODES = ("output_dtype", "x_dtype", "weight_dtype", "scale_dtype", "per_token_scale_dtype")
F32, I8 = torch.float32, torch.int8
_CHANNELS, _ROWS = [t(4, 8, dtype=F32)], [t(3, dtype=F32)]


def _whole_group(**more: Any) -> dict[str, Any]:
    call = _group(x=[t(3, 16, dtype=I8)], weight=[t(4, 16, 8, dtype=I8)])
    return call | {"scale": _CHANNELS, "per_token_scale": _ROWS, "output_dtype": 15} | more


def _gated(count: int = 4, inputs: int = 16, outputs: int = 8, **more: Any) -> dict[str, Any]:
    call = {"x": t(3, inputs, dtype=I8), "weight": [t(count, inputs, outputs, dtype=I8)], "x_scale": t(3, dtype=F32)}
    told = {"weight_scale": [t(count, outputs, dtype=F32)], "group_list": t(count, dtype=torch.int64)}
    return call | told | {"group_list_type": 1} | more


_OPERANDS = ("weight_assist_matrix", "tuning_config", "x_dtype", "weight_dtype", "weight_scale_dtype", "x_scale_dtype")
EDGES: list[Any] = [
    (ROUTE, _ALL, _route(2), _route(1), "K <= expert_num"),
    (ROUTE, _ALL, _route(row_idx_type=1), _route(row_idx_type=2), "row_idx_type in (0, 1)"),
    (ROUTE, _ALL, _route(quant_mode=1), _route(quant_mode=0), "quant_mode in (-1, 1)"),
    (ROUTE, _ALL, _route(scale=t(3, dtype=F32)), _route(scale=t(3, dtype=F32), quant_mode=1), "not given(scale)"),
    (ROUTE, _ALL, _route(x=t(3, 16, dtype=I8)), _route(x=t(3, 16, dtype=I8), quant_mode=1), "dtype(x) != 'int8'"),
    (ROUTE, _ALL, _route(), _route(offset=t(1, dtype=F32)), "not given(offset)"),
    (ROUTE, _ALL, _route(), _route(x_dtype=1), "not given(x_dtype)"),
    (ROUTE, _ALL, _route(), _route(active_num=-1), "active_num == 0"),
    (ROUTE, _ALL, _route(), _route(drop_pad_mode=1), "drop_pad_mode == 0"),
    (ROUTE, _ALL, _route(), _route(expert_tokens_num_type=0), "expert_tokens_num_type == 1"),
    (ROUTE, _ALL, _route(), _route(expert_tokens_num_flag=False), "expert_tokens_num_flag"),
    (ROUTE, _ALL, _route(), _route(active_expert_range=[0, 4]), "active_expert_range == (0, expert_num)"),
    (ROUTE, A2_A3, _route(10240), _route(10241), "expert_num <= 10240"),
    (GROUPED, _ALL, _group(), _group(x=[t(3, 16)] * 2), "length(x) == 1 and length(weight) == 1"),
    (GROUPED, _ALL, _group(), _group(weight=[t(4, 16, 8)] * 2), "length(x) == 1 and length(weight) == 1"),
    (GROUPED, _ALL, _group(), _group(group_list=None), "given(group_list)"),
    (GROUPED, _ALL, _group(), _group(group_type=-1), "group_type == 0"),
    (GROUPED, _ALL, _group(split_item=3), _group(split_item=1), "split_item in (2, 3)"),
    (GROUPED, _ALL, _group(group_list_type=0), _group(group_list_type=2), "group_list_type in (0, 1)"),
    (GROUPED, _ALL, _group(), _group(act_type=5), "act_type == 0"),
    *((GROUPED, _ALL, _group(), _group(**{name: [t(8)]}), f"not given({name})") for name in _LISTS),
    *((GROUPED, _ALL, _group(), _group(**{name: 1}), f"not given({name})") for name in _CODES),
    (GROUPED, _ALL, _group(), _group(tuning_config=[1]), "not given(tuning_config)"),
    (GROUPED, _ALL, _group(), _group(scale=_CHANNELS), "not given(scale)"),
    (GROUPED, _ALL, _group(), _group(per_token_scale=_ROWS), "not given(per_token_scale)"),
    (GROUPED, _ALL, _whole_group(), _whole_group(scale=None), "given(scale)"),
    (GROUPED, _ALL, _whole_group(), _whole_group(per_token_scale=None), "given(per_token_scale)"),
    (GROUPED, _ALL, _whole_group(), _whole_group(output_dtype=None), "given(output_dtype)"),
    (GROUPED, _ALL, _whole_group(output_dtype=5), _whole_group(output_dtype=1), "output_dtype in (5, 15)"),
    (
        GROUPED,
        A2_A3,
        _whole_group(scale=[t(4, 8)]),
        _whole_group(scale=[t(4, 8)], output_dtype=5),
        "dtype(scale) == 'float32'",
    ),
    (GATED, _ALL, _gated(), _gated(weight=_gated()["weight"] * 2), "length(weight) == 1 and length(weight_scale) == 1"),
    (GATED, _ALL, _gated(outputs=8), _gated(outputs=7), "N % 2 == 0"),
    (GATED, _ALL, _gated(group_list_type=0), _gated(group_list_type=2), "group_list_type in (0, 1)"),
    *(
        (GATED, _ALL, _gated(), _gated(**{name: other}), f"{name} == {kept}")
        for name, kept, other in (
            ("dequant_mode", 0, 1),
            ("dequant_dtype", 6, 15),
            ("quant_mode", 0, 1),
            ("quant_dtype", 1, 23),
        )
    ),
    (GATED, _ALL, _gated(), _gated(smooth_scale=t(4, 4, dtype=F32)), "not given(smooth_scale)"),
    (GATED, _ALL, _gated(), _gated(bias=t(4, 8, dtype=torch.int32)), "not given(bias)"),
    *((GATED, _ALL, _gated(), _gated(**{name: 1}), f"not given({name})") for name in _OPERANDS),
    (GATED, A2_A3, _gated(inputs=65535), _gated(inputs=65536), "K < 65536"),
    (GATED, A2_A3, _gated(outputs=10240), _gated(outputs=10242), "N <= 10240"),
    (GATED, A2_A3, _gated(1024), _gated(1025), "G <= 1024"),
    (GROUPED, A2_A3, _group(inputs=65535), _group(inputs=65536), "K < 65536"),
    (GROUPED, A2_A3, _group(outputs=65535), _group(outputs=65536), "N < 65536"),
    (GROUPED, A2_A3, _group(1024), _group(1025), "G <= 1024"),
    (GROUPED, A2_A3, _group(), _group(weight=[t(4, 16, 8, dtype=F32)]), "dtype(weight) == dtype(x)"),
    (GROUPED, A2_A3, _group(1, group_list_type=0), _group(1), "G > 1"),
    (FINISH, _ALL, _finish(), _finish(scales=None), "given(scales)"),
    (FINISH, _ALL, _finish(), _finish(scales=t(3, 1)), "R == T * K"),
    (FINISH, _ALL, _finish(), _finish(drop_pad_mode=0), "drop_pad_mode == 2"),
    (FINISH, _ALL, _finish(skip1=_SKIP, skip2=_SKIP), _finish(skip2=_SKIP), "given(skip1)"),
    (FINISH, _ALL, _finish(**_BIASED), _finish(bias=t(8, 16)), "given(export_for_source_row)"),
    (FINISH, _ALL, _finish(**_BIASED), _finish(export_for_source_row=_BIASED["export_for_source_row"]), "given(bias)"),
    (FINISH, A2_A3, _finish(**_BIASED), _finish(**_BIASED | {"bias": t(8, 16, dtype=F32)}), "dtype(bias)"),
    (FINISH, A2_A3, _finish(), _finish(scales=t(3, 2, dtype=F32)), "dtype(scales) == dtype(expanded_permuted_rows)"),
    *(
        (
            FINISH,
            A2_A3,
            _finish(skip1=_SKIP, skip2=_SKIP),
            _finish(skip1=_SKIP, skip2=_SKIP) | {name: t(3, 16, dtype=F32)},
            f"dtype({name}) == dtype(expanded_permuted_rows)",
        )
        for name in ("skip1", "skip2")
    ),
]
