"""Experts of a mixture as people write them: rows sorted by expert and multiplied in groups, or gathered matrices.

Every form takes tokens [T, H], logits [T, E], gate_up [E, 2 · I, H] and down [E, H, I].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXPERTS, CHOICES, WIDTH, INNER = 6, 2, 64, 32
ROUTE, GROUPED = "npu::npu_moe_init_routing_v2", "npu::npu_grouped_matmul"
SWIGLU, FINISH = "npu::npu_swiglu", "npu::npu_moe_finalize_routing"
EMITTED = {ROUTE: 1, GROUPED: 2, SWIGLU: 1, FINISH: 1}
Form = Callable[..., Tensor]


def routed(logits: Tensor, count: int = CHOICES) -> tuple[Tensor, Tensor]:
    """Weights [T, K] in the dtype of the logits, and experts."""
    weights, experts = logits.softmax(-1, dtype=torch.float32).topk(count, dim=-1)
    return (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), experts


def halves(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


def ends_of(listed: Tensor, top: int = EXPERTS - 1) -> Tensor:
    """Where the rows of each expert end."""
    return torch.histc(listed.float(), bins=EXPERTS, min=0, max=top).cumsum(0, dtype=torch.int32)


def narrow_ends(listed: Tensor) -> Tensor:
    """The same of counts that 8 bits hold, up to so many rows."""
    return torch.histc(listed.float(), bins=EXPERTS, min=0, max=EXPERTS - 1).to(torch.int8).cumsum(0).int()


def by_group(rows: Tensor, ends: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    hidden = halves(torch._grouped_mm(rows, gate_up.transpose(-2, -1), offs=ends))
    return torch._grouped_mm(hidden, down.transpose(-2, -1), offs=ends)


def inverse(order: Tensor) -> Tensor:
    found = torch.empty_like(order)
    found[order] = torch.arange(order.shape[0])
    return found


# sorted rows --------------------------------------------------------------------------------------------------------


def sorted_rows(tokens, logits, gate_up, down):
    weights, experts = routed(logits)
    listed, order = experts.reshape(-1).sort()
    given = by_group(tokens[order // CHOICES], ends_of(listed), gate_up, down)
    given = (given * weights.reshape(-1)[order].unsqueeze(-1))[inverse(order)]
    return given.view(*experts.shape, -1).sum(dim=1).to(tokens.dtype)


def put_back_then_weighed(tokens, logits, gate_up, down):
    weights, experts = routed(logits)
    order = experts.view(-1).argsort(stable=True)
    rows = tokens.gather(0, (order // CHOICES).unsqueeze(-1).expand(-1, WIDTH))
    given = by_group(rows, ends_of(experts.view(-1), EXPERTS), gate_up, down)
    back = torch.zeros_like(given)
    back[order] = given
    return torch.bmm(weights.unsqueeze(1), back.view(-1, CHOICES, WIDTH)).squeeze(1)


def added_to_tokens(tokens, logits, gate_up, down):
    weights, experts = routed(logits)
    order = experts.flatten().argsort()
    owner = torch.arange(tokens.shape[0]).repeat_interleave(CHOICES)[order]
    counts = torch.zeros(EXPERTS, dtype=torch.int64).scatter_add(0, experts.flatten(), torch.ones_like(order))
    given = by_group(tokens.index_select(0, owner), counts.cumsum(0).int(), gate_up, down)
    given = given * weights.flatten()[order, None]
    return torch.zeros_like(tokens).index_add_(0, owner, given)


def scattered_to_tokens(tokens, logits, gate_up, down):
    weights, experts = routed(logits)
    listed, order = torch.sort(experts.flatten(), stable=True)
    owner = torch.div(order, CHOICES, rounding_mode="floor")
    given = by_group(tokens[owner], ends_of(listed.int(), EXPERTS), gate_up, down)
    given = given * torch.gather(weights.flatten(), 0, order)[:, None]
    return torch.zeros_like(tokens).scatter_add(0, owner[:, None].expand_as(given), given)


def repeated_before(tokens, logits, gate_up, down):
    weights, experts = routed(logits)
    listed, order = experts.flatten().sort()
    rows = tokens.repeat_interleave(CHOICES, dim=0)[order]
    given = by_group(rows, ends_of(listed), gate_up, down)[order.argsort()]
    return (given.view(-1, CHOICES, WIDTH) * weights[..., None]).sum(1)


def one_expert(tokens, logits, gate_up, down):
    weights, experts = routed(logits, 1)
    listed, order = experts.view(-1).sort()
    given = by_group(tokens[order], ends_of(listed), gate_up, down)
    return torch.zeros_like(given).index_copy(0, order, given) * weights


def sorted_as_floats(tokens, logits, gate_up, down):
    """An NPU sorts floats faster than integers: vllm-ascend casts experts, and the order to invert it."""
    weights, experts = routed(logits)
    order = torch.argsort(experts.view(-1).float()).to(torch.int32)
    given = by_group(tokens.index_select(0, order // CHOICES), ends_of(experts.view(-1)), gate_up, down)
    given = given * weights.view(-1).index_select(0, order).unsqueeze(-1)
    back = torch.argsort(order.float()).to(torch.int32)
    return given.index_select(0, back).reshape(tokens.shape[0], CHOICES, -1).sum(1)


def put_back_by_scatter(tokens, logits, gate_up, down):
    weights, experts = routed(logits)
    listed, order = experts.flatten().sort()
    given = by_group(tokens[order.div(CHOICES, rounding_mode="trunc")], ends_of(listed), gate_up, down)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0]))
    return torch.einsum("tkh,tk->th", given[back].view(-1, CHOICES, WIDTH), weights)


def added_to_others(tokens, logits, gate_up, down):
    """torchtitan: rows are added to what shared experts give, here to the tokens themselves."""
    weights, experts = routed(logits)
    order = torch.argsort(experts.view(-1), stable=True)
    owner = (order // CHOICES).reshape(-1, 1).expand(-1, WIDTH)
    given = by_group(tokens.gather(0, owner), ends_of(experts.view(-1)), gate_up, down)
    given = (given.float() * weights.view(-1)[order].reshape(-1, 1)).to(tokens.dtype)
    return (2 * tokens).scatter_add(0, owner, given)


# how many rows each expert has --------------------------------------------------------------------------------------


def _ended(ends: Callable[[Tensor, Tensor], Tensor]) -> Form:
    """Sorted rows whose ends are found so, of experts [T, K] and the same sorted."""

    def form(tokens, logits, gate_up, down):
        weights, experts = routed(logits)
        listed, order = experts.reshape(-1).sort(stable=True)
        given = by_group(tokens[order // CHOICES], ends(experts, listed), gate_up, down)
        given = (given * weights.reshape(-1)[order].unsqueeze(-1))[inverse(order)]
        return given.view(*experts.shape, -1).sum(dim=1)

    return form


COUNTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bincount": lambda experts, listed: torch.bincount(experts.flatten(), minlength=EXPERTS).cumsum(0).to(torch.int32),
    "bincount of sorted": lambda experts, listed: torch.cumsum(
        torch.bincount(listed, minlength=EXPERTS), dim=0, dtype=torch.int32
    ),
    "histc to whole numbers": lambda experts, listed: torch.histc(
        experts.view(-1).float(), bins=EXPERTS, min=0, max=EXPERTS
    ).int().cumsum(0, dtype=torch.int32),
    "one_hot": lambda experts, listed: F.one_hot(experts.flatten(), EXPERTS).sum(0).cumsum(0).int(),
    "one_hot over tokens and choices": lambda experts, listed: F.one_hot(experts, EXPERTS).sum(dim=(0, 1)).cumsum(
        0, dtype=torch.int32
    ),
    "one_hot turned": lambda experts, listed: F.one_hot(experts, EXPERTS).permute(2, 1, 0).sum(dim=(-1, -2)).cumsum(
        0, dtype=torch.int32
    ),
    "compared": lambda experts, listed: (listed[:, None] == torch.arange(EXPERTS)).sum(0).cumsum(0).int(),
    "compared with each": lambda experts, listed: (torch.arange(EXPERTS)[:, None] == experts.flatten()).sum(-1).cumsum(
        0
    ).to(torch.int32),
    "a map of tokens": lambda experts, listed: torch.zeros(experts.shape[0], EXPERTS, dtype=torch.int32).scatter(
        1, experts, 1
    ).bool().sum(dim=0).cumsum(0).int(),
    "ones that are added": lambda experts, listed: torch.zeros(EXPERTS, dtype=torch.int64).index_add(
        0, experts.flatten(), torch.ones_like(listed)
    ).cumsum(0).int(),
    "searched": lambda experts, listed: torch.searchsorted(listed, torch.arange(EXPERTS), right=True).int(),
    "searched from the left": lambda experts, listed: torch.searchsorted(
        listed, torch.arange(1, EXPERTS + 1), out_int32=True
    ),
}  # fmt: skip
COUNTED: dict[str, Form] = {name: _ended(ends) for name, ends in COUNTS.items()}

SORTED: tuple[Form, ...] = (
    sorted_rows,
    put_back_then_weighed,
    added_to_tokens,
    scattered_to_tokens,
    repeated_before,
    one_expert,
)


# gathered matrices --------------------------------------------------------------------------------------------------


def gathered(tokens, logits, gate_up, down):
    weights, experts = routed(logits)
    listed = experts.reshape(-1)
    rows = tokens.repeat_interleave(CHOICES, dim=0)
    hidden = halves(torch.bmm(gate_up[listed], rows.unsqueeze(-1)).squeeze(-1))
    given = torch.bmm(down[listed], hidden.unsqueeze(-1)).squeeze(-1) * weights.reshape(-1).unsqueeze(-1)
    return given.view(tokens.shape[0], CHOICES, -1).sum(dim=1).to(tokens.dtype)


def by_einsum(tokens, logits, gate_up, down):
    weights, experts = routed(logits)
    hidden = halves(torch.einsum("td,tkjd->tkj", tokens, gate_up[experts]))
    return torch.einsum("tkd,tk->td", torch.einsum("tki,tkdi->tkd", hidden, down[experts]), weights)


def rows_first(tokens, logits, gate_up, down):
    weights, experts = routed(logits)
    hidden = halves((tokens[:, None, None, :] @ gate_up[experts].mT).squeeze(2))
    given = (hidden.unsqueeze(2) @ down[experts].mT).squeeze(2)
    return (weights[:, None, :] @ given).squeeze(1)


def weights_in_float(tokens, logits, gate_up, down):
    weights, experts = logits.softmax(-1, dtype=torch.float32).topk(CHOICES, dim=-1)
    hidden = halves(torch.matmul(gate_up[experts], tokens[:, None, :, None]).squeeze(-1))
    given = torch.matmul(down[experts], hidden.unsqueeze(-1)).squeeze(-1)
    return (given * weights.unsqueeze(-1)).sum(1).to(tokens.dtype)


def halves_of_gathered(tokens, logits, gate_up, down):
    """SGLang: gate and up are parts of the matrices that were gathered."""
    weights, experts = routed(logits)
    gate, up = gate_up[experts].chunk(2, dim=2)
    hidden = F.silu(torch.einsum("ti,taoi->tao", tokens, gate)) * torch.einsum("ti,taoi->tao", tokens, up)
    return torch.einsum("tai,ta->ti", torch.einsum("tao,taio->tai", hidden, down[experts]), weights)


def in_batches(tokens, logits, gate_up, down):
    tokens, (weights, experts) = tokens.unsqueeze(0), (each.unsqueeze(0) for each in routed(logits))
    hidden = halves((gate_up[experts] @ tokens[:, :, None, :, None]).squeeze(-1))
    given = (down[experts] @ hidden.unsqueeze(-1)).squeeze(-1)
    return (given * weights.unsqueeze(-1)).sum(-2)[0]


FURTHER: tuple[Form, ...] = (sorted_as_floats, put_back_by_scatter, added_to_others, halves_of_gathered)
GATHERED: tuple[Form, ...] = (gathered, by_einsum, rows_first, weights_in_float, in_batches)


# what they mean -----------------------------------------------------------------------------------------------------


def expected(tokens: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, form: Form) -> Tensor:
    """Float64, token by token, of the weights that the form takes, as it rounds them."""
    shares = logits.softmax(-1, dtype=torch.float32)
    rows = []
    for token, share in zip(tokens.double(), shares, strict=True):
        weights, experts = share.topk(1 if form is one_expert else CHOICES)
        if form is not weights_in_float:
            weights = (weights / weights.sum()).to(logits.dtype)
        given = [down[e].double() @ halves(gate_up[e].double() @ token) for e in experts]
        total = sum(w * each for w, each in zip(weights.double(), given, strict=True))
        rows.append(total + 2 * token if form is added_to_others else total)
    return torch.stack(rows)


def inputs(dtype: torch.dtype, tokens: int = 5) -> tuple[Tensor, ...]:
    """Tokens, logits of which every dtype chooses the same experts, one of which is never chosen, and Parameters."""
    draw = torch.Generator().manual_seed(5)
    logits = torch.stack([torch.randperm(EXPERTS, generator=draw) for _ in range(tokens)]) / 2.0
    logits[:, 2] = -4

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    matrices = (numbers(EXPERTS, 2 * INNER, WIDTH) / 8, numbers(EXPERTS, WIDTH, INNER) / 4)
    return numbers(tokens, WIDTH), logits.to(dtype), *(nn.Parameter(each, requires_grad=False) for each in matrices)


# look-alikes --------------------------------------------------------------------------------------------------------


def _other(change: Callable[..., Any]) -> Form:
    """Sorted rows, one part of which is another one: `change` takes it by name and gives it."""

    def form(tokens, logits, gate_up, down):
        weights, experts = routed(logits)
        listed, order = experts.reshape(-1).sort()
        parts = {"ends": ends_of(listed), "owner": order // CHOICES, "back": inverse(order), "by": order}
        parts["weights"] = weights.reshape(-1)
        parts |= change(experts, order, **parts)
        given = by_group(tokens[parts["owner"]], parts["ends"], gate_up, down)
        given = (given * parts["weights"][parts["by"]].unsqueeze(-1))[parts["back"]]
        return given.view(*experts.shape, -1).sum(dim=1)

    return form


def beside_tokens(tokens, logits, gate_up, down):
    weights, experts = routed(logits)
    listed, order = experts.reshape(-1).sort()
    given = by_group(tokens[order // CHOICES], ends_of(listed), gate_up, down) + tokens[order // CHOICES]
    given = (given * weights.reshape(-1)[order].unsqueeze(-1))[inverse(order)]
    return given.view(*experts.shape, -1).sum(dim=1)


def kept_in_float(tokens, logits, gate_up, down):
    weights, experts = logits.softmax(-1, dtype=torch.float32).topk(CHOICES, dim=-1)
    hidden = halves(torch.matmul(gate_up[experts], tokens[:, None, :, None]).squeeze(-1))
    given = torch.matmul(down[experts], hidden.unsqueeze(-1)).squeeze(-1)
    return (given * weights.unsqueeze(-1)).sum(1)


def sorted_rows_by_matrices_of_pairs(tokens, logits, gate_up, down):
    """The same rows go through groups, which are not read, and meet the matrices of other pairs."""
    weights, experts = routed(logits)
    listed, order = experts.reshape(-1).sort()
    rows = tokens[order // CHOICES]
    beside = torch._grouped_mm(rows, gate_up.mT, offs=ends_of(listed))
    hidden = halves(torch.bmm(gate_up[experts.reshape(-1)], rows.unsqueeze(-1)).squeeze(-1))
    given = torch.bmm(down[experts.reshape(-1)], hidden.unsqueeze(-1)).squeeze(-1)
    given = (given * weights.reshape(-1)[order].unsqueeze(-1))[inverse(order)]
    return given.view(*experts.shape, -1).sum(dim=1), beside


def turned_choices(tokens, logits, gate_up, down):
    """Rows are added up over tokens: choices and tokens change places."""
    weights, experts = routed(logits)
    listed, order = experts.reshape(-1).sort()
    given = by_group(tokens[order // CHOICES], ends_of(listed), gate_up, down)
    given = (given * weights.reshape(-1)[order].unsqueeze(-1))[inverse(order)]
    return given.view(CHOICES, tokens.shape[0], -1).sum(dim=0)


_ROWS, _ENDS = "not proven to be those of the tokens", "not proven to be the rows of each expert"
_SUM = "not proven to be summed"
OTHERS: dict[str, tuple[Form, str]] = {
    "the ends of other experts": (
        _other(lambda experts, order, **parts: {"ends": ends_of((experts.flatten() + 1) % EXPERTS)}), _ROWS
    ),
    "experts that are counted from one": (
        _ended(lambda experts, listed: (listed[:, None] == torch.arange(1, EXPERTS + 1)).sum(0).cumsum(0).int()), _ENDS
    ),
    "more experts counted than there are": (
        _ended(lambda experts, listed: F.one_hot(experts, EXPERTS + 1).sum((0, 1))[1:].cumsum(0).int()), _ENDS
    ),
    "searched from the left of zero": (
        _ended(lambda experts, listed: torch.searchsorted(listed, torch.arange(EXPERTS)).int()), _ENDS
    ),
    "averages of a mask": (
        _ended(
            lambda experts, listed: torch.zeros(*experts.shape[:1], EXPERTS).scatter(1, experts, 1.0).mean(0).cumsum(0)
            .int()
        ), _ENDS
    ),
    "no more rows than an expert takes": (
        _other(lambda experts, order, ends, **parts: {"ends": torch.minimum(ends, 2 * torch.arange(1, 7)).int()}), _ENDS
    ),
    "counts in 8 bits": (_other(lambda experts, order, **parts: {"ends": narrow_ends(experts.flatten())}), _ENDS),
    "rows that are not put back": (_other(lambda experts, order, **parts: {"back": order}), _SUM),
    "put back by another order": (
        _other(lambda experts, order, **parts: {"back": inverse(experts.flatten().argsort(stable=True))}), _SUM
    ),
    "weights of rows that are not sorted": (
        _other(lambda experts, order, **parts: {"by": torch.arange(order.shape[0])}), _SUM
    ),
    "weights by another order": (_other(lambda experts, order, back, **parts: {"by": back}), _SUM),
    "tokens as often as there are tokens": (
        _other(lambda experts, order, **parts: {"owner": order % experts.shape[0]}), _ROWS
    ),
    "choices and tokens change places": (turned_choices, _SUM),
    "tokens added to what experts give": (beside_tokens, "what experts add is not proven to be the"),
    "a sum in float32": (kept_in_float, "it stays float32"),
    "sorted rows by matrices of pairs": (sorted_rows_by_matrices_of_pairs, "not proven to be summed for each token"),
}  # fmt: skip
