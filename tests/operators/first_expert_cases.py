"""Calls of the first operators of experts, which only hand-written code makes, and of SwiGLU between int8 products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.operators.expert_cases import chosen
from tests.operators.limit_cases import starts, t
from tests.operators.quant_cases import grid
from tests.operators.quant_references import rows as quantised
from tests.operators.undocumented import Undocumented

Make = Callable[[torch.dtype], dict[str, Any]]
GATE, ROUTE, ENDS = "npu_moe_gating_top_k_softmax", "npu_moe_init_routing", "npu_moe_compute_expert_tokens"
RANKS, ACTIVATE = "npu_moe_re_routing", "npu_dequant_swiglu_quant"
PERMUTE, UNPERMUTE, FAST = "npu_moe_token_permute", "npu_moe_token_unpermute", "npu_fast_gelu"
I32 = torch.int32


def gate(*lead: int, k: int = 2, finished: bool = False) -> Make:
    def make(dtype: torch.dtype) -> dict[str, Any]:
        x = (torch.rand(*lead, 8).argsort(-1) / 4).to(dtype)
        done = {"finished": torch.rand(lead) < 0.5} if finished else {}
        return {"x": x, "k": k} | done

    return make


def route(tokens: int, choices: int, active: int) -> Make:
    def make(dtype: torch.dtype) -> dict[str, Any]:
        row = torch.arange(tokens * choices, dtype=I32).view(choices, tokens).t().contiguous()
        x = torch.randn(tokens, 6, dtype=torch.float64).to(dtype)
        return {"x": x, "row_idx": row, "expert_idx": chosen(tokens, choices, 5), "active_num": active}

    return make


def ends(*experts: int, count: int) -> Make:
    return lambda dtype: {"sorted_expert_for_source_row": torch.tensor(experts, dtype=I32), "num_expert": count}


def ranks(*counts: tuple[int, ...], scaled: bool = False, int8: bool = False, wide: bool = True) -> Make:
    def make(dtype: torch.dtype) -> dict[str, Any]:
        rows = sum(map(sum, counts))
        tokens = torch.randn(rows, 6, dtype=torch.float64).to(dtype)
        tokens = torch.randint(-128, 128, (rows, 6), dtype=torch.int8) if int8 else tokens
        scales = torch.rand(rows, dtype=torch.float64).to(torch.promote_types(dtype, torch.float32))
        listed = torch.tensor(counts, dtype=torch.int64 if wide else I32)
        given = {"tokens": tokens, "expert_token_num_per_rank": listed}
        return given | ({"per_token_scales": scales} if scaled else {})

    return make


def activate(
    rows: int = 3, counts: tuple[int, ...] = (), factors: bool = False, floats: bool = False, lead: bool = False,
    bias: bool = False, tokens: bool = True, flat: bool = False, **more: Any,
) -> Make:  # fmt: skip
    """Of sums of int8 products, in steps whose quotients are never halfway between two numbers, or of floats."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        wide, shape = torch.promote_types(dtype, torch.float32), ((1, rows) if lead else (rows,))
        groups = len(counts) or 1
        call: dict[str, Any] = {
            "x": (grid(*shape, 16) if floats else grid(*shape, 16) * 32).to(dtype if floats else I32)
        }
        if not floats:
            channels = 2.0 ** torch.randint(-6, -3, (groups, 16)).to(wide)
            call["weight_scale"] = channels if counts else channels[0]
            each = shape if flat else (*shape, 1)
            call |= {"activation_scale": 2.0 ** torch.randint(-1, 2, each).to(wide)} if tokens else {}
            call |= {"bias": torch.randint(-9, 9, (16,), dtype=I32)} if bias else {}
        if factors:
            call["quant_scale"] = 2.0 ** torch.randint(-1, 2, (groups, 8)).to(dtype)
        call |= {"group_index": torch.tensor(counts)} if counts else {}
        return call | {"quant_mode": 1} | more

    return make


def permute(tokens: int, *choices: int, wide: bool = False, **more: Any) -> Make:
    def make(dtype: torch.dtype) -> dict[str, Any]:
        experts = torch.randint(0, 4, (tokens, *choices), dtype=torch.int64 if wide else I32)
        return {"tokens": torch.randn(tokens, 6, dtype=torch.float64).to(dtype), "indices": experts} | more

    return make


def unpermute(tokens: int, choices: int, scaled: bool = True) -> Make:
    def make(dtype: torch.dtype) -> dict[str, Any]:
        rows = torch.randn(tokens * choices, 6, dtype=torch.float64).to(dtype)
        shares = {"probs": torch.rand(tokens, choices, dtype=torch.float64).to(dtype)} if scaled else {}
        order = torch.randperm(tokens * choices).to(I32)
        return {"permuted_tokens": rows, "sorted_indices": order} | shares

    return make


CALLS: list[tuple[str, str, Make]] = [
    (GATE, "two of eight", gate(3)),
    (GATE, "in three dims, finished rows", gate(2, 3, k=3, finished=True)),
    (GATE, "one", gate(4, k=1)),
    (ROUTE, "all tokens", route(4, 2, 4)),
    (ROUTE, "the first rows alone", route(5, 2, 3)),
    (ROUTE, "more than there are", route(3, 3, 7)),
    (ENDS, "experts without rows", ends(0, 0, 2, 2, 2, 4, count=6)),
    (ENDS, "one expert", ends(0, 0, count=1)),
    (RANKS, "two ranks", ranks((1, 0, 2), (2, 3, 0))),
    (RANKS, "in int8 with scales", ranks((1, 2), (0, 3), (2, 0), scaled=True, int8=True, wide=False)),
    (RANKS, "one rank", ranks((2, 3), scaled=True)),
    (PERMUTE, "two experts each", permute(4, 2)),
    (PERMUTE, "one expert each", permute(5, wide=True)),
    (PERMUTE, "the first rows alone", permute(4, 2, num_out_tokens=5)),
    (UNPERMUTE, "two rows of each", unpermute(4, 2)),
    (UNPERMUTE, "as they were", unpermute(5, 1, scaled=False)),
    (FAST, "numbers", lambda dtype: {"input": (torch.randn(3, 8, dtype=torch.float64) * 3).to(dtype)}),
    (ACTIVATE, "sums of products", activate()),
    (ACTIVATE, "groups of rows", activate(6, (2, 0, 3), factors=True)),
    (ACTIVATE, "the first half activated, bias", activate(bias=True, activate_left=True, factors=True)),
    (ACTIVATE, "in three dims, without scales of tokens", activate(lead=True, tokens=False)),
    (ACTIVATE, "scales of tokens in one dim", activate(flat=True)),
    (ACTIVATE, "of floats", activate(floats=True, factors=True)),
    (ACTIVATE, "lanes in turn, clamped", activate(swiglu_mode=1, clamp_limit=3.0, glu_alpha=1.5, glu_bias=0.5)),
    (ACTIVATE, "halves, clamped", activate(5, (3, 1), swiglu_mode=2, clamp_limit=2.0, glu_alpha=2.0, glu_bias=0.0)),
    (ACTIVATE, "halves, clamped, the first activated", activate(swiglu_mode=2, activate_left=True)),
]


# references ---------------------------------------------------------------------------------------------------------


def gated(x: Tensor, finished: Tensor | None = None, k: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Row by row, in lists: the largest first, of equal ones the first."""
    rows = x.reshape(-1, x.shape[-1])
    picked = [sorted(range(len(row)), key=lambda e, row=row: -float(row[e]))[:k] for row in rows]
    shares = [[float(row[e].exp() / row.exp().sum()) for e in best] for row, best in zip(rows, picked, strict=True)]
    index = torch.tensor(picked)
    if finished is not None:
        index[finished.flatten()] = x.shape[-1]
    row = torch.tensor([[place * len(rows) + number for place in range(k)] for number in range(len(rows))])
    shape = (*x.shape[:-1], k)
    return torch.tensor(shares, dtype=torch.float64).view(shape), index.view(shape), row.view(shape)


def routed(x: Tensor, row_idx: Tensor, expert_idx: Tensor, active_num: int) -> tuple[Tensor, Tensor, Tensor]:
    pairs = sorted(
        zip(expert_idx.flatten().tolist(), row_idx.flatten().tolist(), strict=True), key=lambda pair: pair[0]
    )
    if sorted(row for _, row in pairs) != list(range(len(pairs))):
        raise Undocumented("rows that are no permutation")
    places = [0] * len(pairs)
    for place, (_, row) in enumerate(pairs):
        places[row] = place
    kept = pairs[: min(active_num, x.shape[0]) * expert_idx.shape[1]]
    rows = torch.stack([x[row % x.shape[0]] for _, row in kept])
    return rows, torch.tensor(places), torch.tensor([expert for expert, _ in pairs])


def ended(sorted_expert_for_source_row: Tensor, num_expert: int) -> Tensor:
    listed = sorted_expert_for_source_row.tolist()
    if listed != sorted(listed):
        raise Undocumented("experts that are not sorted")
    return torch.tensor([sum(each <= expert for each in listed) for expert in range(num_expert)])


def regrouped(
    tokens: Tensor, expert_token_num_per_rank: Tensor, per_token_scales: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    counts = expert_token_num_per_rank.tolist()
    if sum(map(sum, counts)) != tokens.shape[0] or min(map(min, counts)) < 0:
        raise Undocumented("counts of other rows")
    starts_of, row = {}, 0
    for rank, of_rank in enumerate(counts):
        for expert, count in enumerate(of_rank):
            starts_of[rank, expert], row = row, row + count
    order = [
        starts_of[rank, expert] + number
        for expert in range(len(counts[0]))
        for rank in range(len(counts))
        for number in range(counts[rank][expert])
    ]
    scales = torch.zeros(len(order)) if per_token_scales is None else per_token_scales[order]
    totals = [sum(of_rank[expert] for of_rank in counts) for expert in range(len(counts[0]))]
    return tokens[order], scales, torch.tensor(order), torch.tensor(totals)


def activated(
    x: Tensor, weight_scale: Tensor | None = None, activation_scale: Tensor | None = None, bias: Tensor | None = None,
    quant_scale: Tensor | None = None, group_index: Tensor | None = None, activate_left: bool = False,
    quant_mode: int = 0, swiglu_mode: int = 0, clamp_limit: float = 7.0, glu_alpha: float = 1.702,
    glu_bias: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Row by row, each with the factors of its group; rows behind the groups are 0."""
    rows, lanes = x.reshape(-1, x.shape[-1]), x.shape[-1] // 2
    counts = [len(rows)] if group_index is None else group_index.tolist()
    if min(counts) < 0:
        raise Undocumented("groups of fewer rows than none")
    groups = [number for number, count in enumerate(counts) for _ in range(count)]
    made: list[tuple[Tensor, Tensor]] = []
    for number, row in enumerate(rows):
        if number >= len(groups):
            made.append((torch.zeros(lanes).double(), torch.zeros(()).double()))
            continue
        v = row.double()
        if weight_scale is not None:
            v = v if bias is None else v + bias.flatten()
            v = v * weight_scale.reshape(-1, 2 * lanes)[groups[number]]
            v = v if activation_scale is None else v * activation_scale.flatten()[number]
        halves = (v[::2], v[1::2]) if swiglu_mode == 1 else (v[:lanes], v[lanes:])
        gate, value = halves if swiglu_mode == 1 or activate_left else halves[::-1]
        if swiglu_mode:
            gate, value = gate.clamp(max=clamp_limit), value.clamp(-clamp_limit, clamp_limit)
            y = gate / (1 + (-glu_alpha * gate).exp()) * (value + glu_bias)
        else:
            y = F.silu(gate) * value
        made.append(quantised(y if quant_scale is None else y * quant_scale.reshape(-1, lanes)[groups[number]]))
    shape = x.shape[:-1]
    return torch.stack([y for y, _ in made]).view(*shape, lanes), torch.stack([s for _, s in made]).view(shape)


def permuted(tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None) -> tuple[Tensor, Tensor]:
    choices = indices.numel() // len(tokens)
    listed = indices.flatten().tolist()
    order = sorted(range(len(listed)), key=lambda place: listed[place])
    rows = torch.stack([tokens[place // choices] for place in order])
    return rows[:num_out_tokens], torch.tensor([order.index(place) for place in range(len(order))])


def unpermuted(permuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor | None = None) -> Tensor:
    rows = [permuted_tokens[place] for place in sorted_indices.tolist()]
    if probs is None:
        return torch.stack(rows)
    shares = probs.flatten().tolist()
    products = [row * share for row, share in zip(rows, shares, strict=True)]
    return torch.stack([sum(products[at : at + probs.shape[1]]) for at in range(0, len(rows), probs.shape[1])])


REFERENCES = {
    GATE: gated, ROUTE: routed, ENDS: ended, RANKS: regrouped, ACTIVATE: activated, PERMUTE: permuted,
    UNPERMUTE: unpermuted, FAST: lambda input: input / (1 + (-1.702 * input).exp()),
}  # fmt: skip


# limits -------------------------------------------------------------------------------------------------------------


def _scale(*shape: int) -> Tensor:
    return t(*shape, dtype=torch.float32)


def _activate(**more: Any) -> dict[str, Any]:
    return {"x": t(3, 128, dtype=I32), "weight_scale": _scale(128), "quant_mode": 1} | more


_GROUPED = {"weight_scale": _scale(2, 128), "group_index": t(2, dtype=torch.int64)}
EDGES: list[Any] = [
    *starts({"x": t(7, 16), "k": 2}, {"x": t(7, 2000), "k": 1000}, name=GATE),
    *starts(
        {"x": t(3, 16), "row_idx": t(3, 2, dtype=I32), "expert_idx": t(3, 2, dtype=I32), "active_num": 3}, name=ROUTE
    ),
    *starts({"sorted_expert_for_source_row": t(6, dtype=I32), "num_expert": 4}, name=ENDS),
    *starts({"tokens": t(6, 16), "expert_token_num_per_rank": t(2, 4, dtype=torch.int64)}, name=RANKS),
    *starts({"tokens": t(3, 16), "indices": t(3, 2, dtype=I32), "num_out_tokens": 4}, name=PERMUTE),
    *starts({"permuted_tokens": t(6, 16), "sorted_indices": t(6, dtype=I32), "probs": t(3, 2)}, name=UNPERMUTE),
    *starts({"input": t(1, 1, 1, 1, 1, 1, 2, 8)}, name=FAST),
    *starts(
        _activate(),
        _activate(**_GROUPED),
        _activate(**_GROUPED, quant_scale=_scale(2, 64)),
        _activate(weight_scale=_scale(1, 128), quant_scale=_scale(1, 64), bias=t(128, dtype=I32)),
        _activate(swiglu_mode=1, activation_scale=_scale(3, 1)),
        {"x": t(3, 128), "quant_mode": 1},
        name=ACTIVATE,
    ),
]
