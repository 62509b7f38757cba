"""Calls of the operators that sort rows of tokens by expert, multiply them in groups, and add them up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusion.operators import CHIPS, HOST
from tests.operators.limit_cases import starts, t
from tests.operators.quant_cases import grid
from tests.operators.quant_references import rows as quantised
from tests.operators.undocumented import Undocumented

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


def routed(
    tokens: int, choices: int, experts: int, scales: str = "", within: tuple[int, int] | None = None, **more: Any
) -> Make:
    """With a scale of each token, of all ("static", with an offset), or of lanes of each expert or of all experts."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        call = routing(tokens, choices, experts, quantised=bool(scales and scales != "tokens"))(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        count = experts if within is None else within[1] - within[0]
        shapes = {"tokens": (tokens,), "static": (1,), "experts": (count, 12), "lanes": (1, 12)}
        given = {"scale": 2.0 ** torch.randint(3, 6, shapes[scales]).to(wide)} if scales else {}
        if scales == "static":
            given |= {"offset": torch.randint(-9, 10, (1,)).to(wide), "quant_mode": 0}
        return call | given | {"active_expert_range": list(within or ())} | more

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


def groups_int8(
    *counts: int, inputs: int = 24, outputs: int = 16, narrow: bool = False, gated: bool = False, ends: bool = False,
    pairs: bool = False, tokens_scaled: bool = True, biased: bool = False, **more: Any,
) -> Make:  # fmt: skip
    """In int8, with scales of channels in bfloat16 where they are `narrow`; both products of a gated layer.

    Groups are given by their lengths, or where they end, or by `pairs` of expert and length, out of order.
    """

    def make(dtype: torch.dtype) -> dict[str, Any]:
        x, weight = _whole(sum(counts), inputs), _whole(len(counts), inputs, outputs)
        channels, tokens = _scales(dtype, len(counts), outputs), _scales(dtype, sum(counts))
        channels = channels.to(torch.bfloat16) if narrow else channels
        told = {"group_list": torch.tensor(counts), "group_list_type": 1}
        if ends:
            told = {"group_list": torch.tensor(counts).cumsum(0), "group_list_type": 0}
        if pairs:
            order = torch.randperm(len(counts))
            lengths = torch.tensor(counts)[torch.randperm(len(counts))]
            told = {"group_list": torch.stack((order, lengths), 1), "group_list_type": 2}
        if gated:
            return {"x": x, "weight": [weight], "weight_scale": [channels / 64], "x_scale": tokens} | told
        how = {"split_item": 2, "group_type": 0, "output_dtype": 5 if dtype == torch.float16 else 15}
        given = {"per_token_scale": [tokens]} if tokens_scaled else {}
        if biased:
            given["bias"] = [torch.randint(-1000, 1000, (len(counts), outputs)).to(torch.int32)]
        return {"x": [x], "weight": [weight], "scale": [channels]} | given | told | how | more

    return make


def groups(
    *counts: int, inputs: int = 24, outputs: int = 16, turned: bool = False, ends: bool = False, biased: bool = False,
    restored: str = "", **more: Any,
) -> Make:  # fmt: skip
    """`restored` are weights in int8: "scaled", or "shifted" as well."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        x = torch.randn(sum(counts), inputs, dtype=torch.float64).to(dtype)
        shape = (len(counts), outputs, inputs) if turned else (len(counts), inputs, outputs)
        weight = torch.randn(shape, dtype=torch.float64).to(dtype)
        told = torch.tensor(counts).cumsum(0) if ends else torch.tensor(counts)
        how = {"group_list": told, "split_item": 2 + ends, "group_type": 0, "group_list_type": int(not ends)}
        call = {"x": [x], "weight": [weight.mT if turned else weight], **how, **more}
        if biased:
            call["bias"] = [torch.randn(len(counts), outputs, dtype=torch.float64).to(dtype)]
        if restored:
            call["weight"] = [_whole(len(counts), inputs, outputs)]
            call["antiquant_scale"] = [(2.0 ** torch.randint(-8, -5, (len(counts), outputs))).to(dtype)]
        if restored == "shifted":
            call["antiquant_offset"] = [torch.randint(-9, 10, (len(counts), outputs)).to(dtype)]
        return call

    return make


def finishing(
    tokens: int,
    choices: int,
    skips: int = 0,
    width: int = 12,
    experts: int = 0,
    mode: int | None = 2,
    dropped: float = 0.0,
    scaled: bool = True,
    k: int | None = 1,
) -> Make:
    """With biases where there are `experts`; rows that are dropped have the index -1."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        def numbers(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=torch.float64).to(dtype)

        skipped = [numbers(tokens, width) if number < skips else None for number in range(2)]
        rows = numbers(3, tokens * choices, width) if mode in (1, 3) else numbers(tokens * choices, width)
        index = torch.randperm(rows[..., 0].numel())[: tokens * choices].to(torch.int32)
        return {
            "expanded_permuted_rows": rows, "skip1": skipped[0], "skip2": skipped[1],
            "bias": numbers(experts, width) if experts else None,
            "scales": numbers(tokens, choices) if scaled else None,
            "expanded_src_to_dst_row": torch.where(torch.rand(tokens * choices) < dropped, -1, index),
            "export_for_source_row": chosen(tokens, choices, experts) if experts else None, "drop_pad_mode": mode,
            "k": k,
        }  # fmt: skip

    return make


CALLS: list[tuple[str, str, Make]] = [
    (ROUTE, "rows of three tokens", routing(3, 2, 4)),
    (ROUTE, "more experts than rows", routing(1, 2, 16)),
    (ROUTE, "in order of the rows", routing(5, 3, 6, row_idx_type=1)),
    (ROUTE, "one expert each", routing(4, 1, 3)),
    (ROUTE, "rows that are quantised", routing(4, 2, 5, quantised=True)),
    (ROUTE, "rows in int8 with scales", routing_int8(4, 2, 5)),
    (ROUTE, "all by default", routed(3, 2, 4, expert_tokens_num_flag=False)),
    (ROUTE, "a part of the experts", routed(4, 2, 6, within=(1, 4))),
    (ROUTE, "a part of the experts, in order of the rows", routed(4, 2, 6, within=(2, 5), row_idx_type=1)),
    (ROUTE, "sums of rows", routed(4, 2, 5, expert_tokens_num_type=0)),
    (ROUTE, "sums of rows of a part", routed(4, 2, 6, within=(1, 4), expert_tokens_num_type=0)),
    (ROUTE, "pairs of experts and rows", routed(3, 2, 6, expert_tokens_num_type=2)),
    (ROUTE, "pairs of a part", routed(4, 2, 6, within=(1, 5), expert_tokens_num_type=2)),
    (ROUTE, "the first rows alone", routed(4, 2, 5, active_num=5)),
    (ROUTE, "more rows than there are", routed(2, 2, 5, active_num=9)),
    (ROUTE, "room for two rows each", routed(5, 2, 4, drop_pad_mode=1, expert_capacity=2)),
    (ROUTE, "room for more, quantised", routed(3, 2, 4, "experts", drop_pad_mode=1, expert_capacity=4)),
    (ROUTE, "scales of tokens", routed(4, 2, 5, "tokens")),
    (ROUTE, "a static scale", routed(4, 2, 5, "static")),
    (ROUTE, "factors of experts", routed(4, 2, 5, "experts")),
    (ROUTE, "factors of a part of the experts", routed(4, 2, 6, "experts", within=(1, 5))),
    (ROUTE, "factors of all experts", routed(4, 2, 5, "lanes")),
    (GROUPED, "groups of several lengths", groups(2, 5, 1)),
    (GROUPED, "biases", groups(2, 5, 1, biased=True)),
    (GROUPED, "no activation", groups(2, 5, act_type=None)),
    *((GROUPED, f"activation {number}", groups(2, 5, act_type=number)) for number in (1, 2, 4, 5)),
    (GROUPED, "biases before the activation", groups(2, 0, 5, biased=True, act_type=1)),
    (GROUPED, "weights in int8", groups(2, 5, restored="scaled")),
    (GROUPED, "weights in int8 with offsets, biases", groups(2, 0, 5, restored="shifted", biased=True)),
    (GROUPED, "in int8, pairs of experts and lengths", groups_int8(2, 5, 1, pairs=True)),
    (GROUPED, "in int8, biases, without scales of tokens", groups_int8(2, 5, biased=True, tokens_scaled=False)),
    (GROUPED, "in int8, where each group ends", groups_int8(2, 5, ends=True, act_type=5)),
    (GROUPED, "empty groups", groups(0, 3, 0, 0, 4, 0)),
    (GROUPED, "turned matrices", groups(3, 4, turned=True)),
    (GROUPED, "matrices of odd sizes", groups(2, 1, 4, inputs=7, outputs=5)),
    (GROUPED, "where each group ends", groups(1, 4, 2, ends=True)),
    (GROUPED, "one row", groups(0, 1, 0, 0)),
    (GROUPED, "all in one group", groups(0, 9)),
    (GROUPED, "in int8", groups_int8(2, 0, 5, 1)),
    (GROUPED, "in int8, results in float16", groups_int8(2, 3, output_dtype=5)),
    (GROUPED, "in int8, of more inputs than sums in float32 hold", groups_int8(1, 3, inputs=1500)),
    (GATED, "groups of several lengths", groups_int8(2, 5, 1, gated=True)),
    (GATED, "empty groups", groups_int8(0, 3, 0, 4, 0, gated=True)),
    (GATED, "where each group ends", groups_int8(2, 5, 1, gated=True, ends=True)),
    (FINISH, "two rows of each token", finishing(3, 2)),
    (FINISH, "one row of each", finishing(4, 1, skips=1)),
    (FINISH, "beside two others", finishing(2, 3, skips=2)),
    (FINISH, "with biases", finishing(4, 2, experts=5)),
    (FINISH, "with biases, beside two others", finishing(3, 3, skips=2, experts=4)),
    *((FINISH, f"mode {mode}", finishing(4, 2, skips=1, mode=mode)) for mode in (None, 0, 1, 3)),
    (FINISH, "columns, biases", finishing(4, 2, mode=0, experts=5)),
    (FINISH, "columns, dropped rows", finishing(4, 2, mode=1, dropped=0.4)),
    (FINISH, "dropped rows", finishing(4, 2, mode=3, dropped=0.4)),
    (FINISH, "rows that are not scaled", finishing(4, 3, scaled=False, k=3)),
    (FINISH, "columns that are not scaled, biases", finishing(4, 2, mode=0, scaled=False, k=2, experts=5, skips=2)),
    (FINISH, "one row of each, not scaled", finishing(4, 1, mode=0, scaled=False, k=None)),
]


# references ---------------------------------------------------------------------------------------------------------


def route(
    x: Tensor, expert_idx: Tensor, expert_num: int, scale: Tensor | None = None, offset: Tensor | None = None,
    active_num: int = -1, expert_capacity: int = -1, drop_pad_mode: int = 0, expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False, quant_mode: int = -1, active_expert_range: Any = (), row_idx_type: int = 0,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Expert by expert, the pairs that chose it; rows of other experts are 0, their index is -1."""
    listed, (first, behind) = expert_idx.flatten().tolist(), active_expert_range or (0, expert_num)
    if max(listed) >= expert_num:
        raise Undocumented("experts that there are not")
    order = [pair for expert in range(first, behind) for pair, chose in enumerate(listed) if chose == expert]
    counts = [listed.count(expert) for expert in range(first, behind)]
    slots: list[int | None] = [*order, *[None] * (len(listed) - len(order))]
    if drop_pad_mode:
        slots = []
        for expert in range(expert_num):
            own = [pair for pair in order if listed[pair] == expert][:expert_capacity]
            slots += [*own, *[None] * (expert_capacity - len(own))]
    places = [slots.index(pair) if pair in slots else -1 for pair in range(len(listed))]
    if row_idx_type:
        places = order + [pair for pair in range(len(listed)) if pair not in order]
    slots = slots[:active_num] if active_num > 0 and not drop_pad_mode else slots
    made = [_routed(x, scale, offset, quant_mode, pair, expert_idx, first) for pair in slots]
    rows = torch.stack([row for row, _ in made])
    rows = rows.reshape(expert_num, expert_capacity, -1) if drop_pad_mode else rows
    scales = torch.zeros(()) if quant_mode == 0 else torch.stack([each for _, each in made])
    return rows, torch.tensor(places), _counts(counts, first, expert_num, expert_tokens_num_flag,
                                               expert_tokens_num_type), scales  # fmt: skip


def _routed(
    x: Tensor, scale: Tensor | None, offset: Tensor | None, mode: int, pair: int | None, experts: Tensor, first: int
) -> tuple[Tensor, Tensor]:
    """The row of a pair as it is stored, and its scale; zeros where there is none."""
    none = torch.zeros(()).double()
    if pair is None:
        return torch.zeros_like(x[0]), none
    row = x[pair // experts.shape[1]]
    if mode == 0:
        return (row * scale + offset).round().clamp(-128, 127), none
    if mode == 1:
        factor = 1.0 if scale is None else scale[min(int(experts.flatten()[pair]) - first, len(scale) - 1)]
        return quantised(row * factor)
    return row, none if scale is None else scale[pair // experts.shape[1]]


def _counts(counts: list[int], first: int, experts: int, flag: bool, kind: int) -> Tensor:
    if not flag:
        return torch.zeros(())
    if kind == 2:
        pairs = [[first + number, count] for number, count in enumerate(counts) if count]
        return torch.tensor(pairs + [[0, 0]] * (experts - len(pairs)))
    return torch.tensor(counts if kind else [sum(counts[: i + 1]) for i in range(len(counts))])


ACTIVATIONS = {
    0: lambda x: x,
    1: lambda x: x.clamp(min=0),
    2: lambda x: x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
    4: lambda x: x / (1 + (-1.702 * x).exp()),
    5: lambda x: x / (1 + (-x).exp()),
}


def by_group(
    x: list[Tensor], weight: list[Tensor], group_list: Tensor, group_list_type: int = 0,
    scale: list[Tensor] | None = None, per_token_scale: list[Tensor] | None = None, bias: list[Tensor] | None = None,
    antiquant_scale: list[Tensor] | None = None, antiquant_offset: list[Tensor] | None = None, act_type: int = 0,
    **how: Any,
) -> list[Tensor]:  # fmt: skip
    """Row by row."""
    listed = group_list.tolist()
    matrix = [each[0] for each in listed] if group_list_type == 2 else list(range(len(listed)))
    counts = [each[1] for each in listed] if group_list_type == 2 else listed
    ends = counts if group_list_type == 0 else [sum(counts[: i + 1]) for i in range(len(counts))]
    if ends != sorted(ends) or ends[-1] < len(x[0]):
        raise Undocumented("ends of groups that go back, or lie before the last row")
    out = []
    for row, line in enumerate(x[0]):
        g = matrix[next(number for number, end in enumerate(ends) if row < end)]
        w = weight[0][g].double()
        if antiquant_scale is not None:
            w = (w + (0 if antiquant_offset is None else antiquant_offset[0][g])) * antiquant_scale[0][g]
        y, of_bias = line.double() @ w, 0 if bias is None else bias[0][g].double()
        before = bias is None or not bias[0].is_floating_point()
        y = y + of_bias if before else y
        y = y if scale is None else y * scale[0][g].double()
        y = y if per_token_scale is None else y * per_token_scale[0][row].double()
        out.append(ACTIVATIONS[act_type or 0](y if before else y + of_bias))
    return [torch.stack(out)]


def gated(
    x: Tensor, weight: list[Tensor], weight_scale: list[Tensor], x_scale: Tensor, group_list: Tensor,
    group_list_type: int = 0, **same: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The products, then lane by lane."""
    (both,) = by_group([x], weight, group_list, group_list_type, weight_scale, [x_scale])
    half = both.shape[1] // 2
    return quantised(both[:, :half] / (1 + (-both[:, :half]).exp()) * both[:, half:])


def finish(
    expanded_permuted_rows: Tensor, skip1: Tensor | None, skip2: Tensor | None, bias: Tensor | None,
    scales: Tensor | None, expanded_src_to_dst_row: Tensor, export_for_source_row: Tensor | None,
    drop_pad_mode: int | None = 0, k: int | None = 1,
) -> Tensor:  # fmt: skip
    """Token by token; lists by columns in modes 0 and 1, an index of -1 for a dropped row."""
    listed, rows = expanded_src_to_dst_row.tolist(), expanded_permuted_rows.flatten(0, -2)
    choices = scales.shape[1] if scales is not None else k or 1
    tokens = len(listed) // choices
    out = torch.zeros(tokens, rows.shape[1], dtype=rows.dtype)
    for token in range(tokens):
        for choice in range(choices):
            place = choice * tokens + token if drop_pad_mode in (None, 0, 1) else token * choices + choice
            row = torch.zeros_like(rows[0]) if listed[place] == -1 else rows[listed[place]]
            if bias is not None and export_for_source_row is not None:
                row = row + bias[export_for_source_row[token, choice]]
            out[token] += row if scales is None else scales[token, choice] * row
    return sum((each for each in (skip1, skip2) if each is not None), out)


REFERENCES = {ROUTE: route, GROUPED: by_group, GATED: gated, FINISH: finish}


# limits -------------------------------------------------------------------------------------------------------------


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
_PLACES = {"expanded_permuted_rows": t(8, 2, 16), "drop_pad_mode": 3}
_LISTS = ("offset", "activation_input", "activation_quant_scale", "activation_quant_offset")
_CODES = ("output_dtype", "x_dtype", "weight_dtype", "scale_dtype", "per_token_scale_dtype")
F32, I8 = torch.float32, torch.int8
_CHANNELS, _ROWS = [t(4, 8, dtype=F32)], [t(3, dtype=F32)]


def _whole_group(**more: Any) -> dict[str, Any]:
    call = _group(x=[t(3, 16, dtype=I8)], weight=[t(4, 16, 8, dtype=I8)])
    return call | {"scale": _CHANNELS, "per_token_scale": _ROWS, "output_dtype": 15} | more


def _restored(**more: Any) -> dict[str, Any]:
    """Rows in floats by weights in int8, with scales and offsets."""
    call = _group(weight=[t(4, 16, 8, dtype=I8)])
    return call | {"antiquant_scale": [t(4, 8)], "antiquant_offset": [t(4, 8)]} | more


_BIAS = {"bias": [t(4, 8)]}
_PAIRS = {"group_list_type": 2, "group_list": t(4, 2, dtype=torch.int64)}


def _gated(count: int = 4, inputs: int = 16, outputs: int = 8, **more: Any) -> dict[str, Any]:
    call = {"x": t(3, inputs, dtype=I8), "weight": [t(count, inputs, outputs, dtype=I8)], "x_scale": t(3, dtype=F32)}
    told = {"weight_scale": [t(count, outputs, dtype=F32)], "group_list": t(count, dtype=torch.int64)}
    return call | told | {"group_list_type": 1} | more


_OPERANDS = ("weight_assist_matrix", "x_dtype", "weight_dtype", "weight_scale_dtype", "x_scale_dtype")


def _scale(*shape: int) -> Tensor:
    return t(*shape, dtype=F32)


_FIXED: dict[str, Any] = {"quant_mode": 0, "scale": _scale(1), "offset": _scale(1)}
_DROPPING: dict[str, Any] = {"drop_pad_mode": 1, "expert_capacity": 2}
EDGES: list[Any] = [
    *starts(
        _route(2),
        _route(quant_mode=1),
        _route(scale=_scale(3)),
        _route(**_FIXED),
        _route(scale=_scale(8, 16), quant_mode=1),
        _route(scale=_scale(8, 16), quant_mode=1, active_expert_range=[]),
        _route(**_DROPPING),
        name=ROUTE,
    ),
    *starts(_whole_group(**_PAIRS), _group(**_BIAS), _whole_group(output_dtype=5), name=GROUPED),
    *starts(_gated(), name=GATED),
    *starts(
        _finish(),
        _finish(scales=None, k=2, skip1=_SKIP),
        _finish(scales=None, k=2, **_BIASED),
        _finish(skip1=_SKIP, skip2=_SKIP),
        name=FINISH,
    ),
    (ROUTE, A2_A3, _route(), _route(**_FIXED), "quant_mode in (-1, 1)"),
    (ROUTE, A2_A3, _route(), _route(**_DROPPING), "drop_pad_mode == 0"),
    (GROUPED, _ALL, _group(), _group(group_list=t(4, 2, dtype=torch.int64)), "rank(group_list) == 1"),
    (GROUPED, _ALL, _whole_group(), _whole_group(antiquant_scale=[t(4, 8)]), "not (dtype(x) == 'int8')"),
    (GROUPED, _ALL, _restored(), _group(antiquant_offset=[t(4, 8)]), "given(antiquant_scale)"),
    (FINISH, _ALL, _finish(**_PLACES), _finish(**_PLACES, **_BIASED), "not given(bias)"),
]
