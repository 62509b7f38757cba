"""Experts whose rows are listed choice by choice, weighed before a product, or counted and gathered in rarer ways.

Every form takes tokens [T, H], logits [T, E], gate_up [E, 2 · I, H] and down [E, H, I], and gives the weighted sums of
`experts.routed`. Look-alikes differ from a form in one index.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.moe.experts import CHOICES, EXPERTS, WIDTH, Form, by_group, ends_of, halves, inverse, routed


def of_choices(tokens, logits, gate_up, down):
    """Megatron: the list is turned before it is flattened."""
    weights, experts = routed(logits)
    listed = experts.t().reshape(-1)
    order = listed.argsort(stable=True)
    given = by_group(tokens[order % tokens.shape[0]], ends_of(listed), gate_up, down)
    back = torch.empty_like(given)
    back[order] = given
    return (back.view(CHOICES, -1, WIDTH) * weights.t().unsqueeze(-1)).sum(0)


def repeated_for_choices(tokens, logits, gate_up, down):
    """All tokens behind each other, once for each choice."""
    weights, experts = routed(logits)
    listed, order = experts.permute(1, 0).contiguous().flatten().sort(stable=True)
    given = by_group(tokens.repeat(CHOICES, 1).index_select(0, order), ends_of(listed), gate_up, down)
    given = given * weights.permute(1, 0).reshape(-1)[order].unsqueeze(-1)
    return torch.zeros_like(tokens).index_add(0, order % tokens.shape[0], given)


def put_back_for_choices(tokens, logits, gate_up, down):
    weights, experts = routed(logits)
    listed = experts.T.flatten()
    order = listed.argsort()
    owner = torch.arange(tokens.shape[0]).repeat(CHOICES)[order]
    given = by_group(tokens[owner], ends_of(listed), gate_up, down)[inverse(order)]
    return torch.einsum("kth,tk->th", given.view(CHOICES, -1, WIDTH), weights)


def weighed_before_the_second_product(tokens, logits, gate_up, down):
    """Megatron core: the activation takes the weights in."""
    weights, experts = routed(logits)
    order = experts.flatten().argsort(stable=True)
    ends = ends_of(experts.flatten())
    hidden = halves(torch._grouped_mm(tokens[order // CHOICES], gate_up.mT, offs=ends)) * weights.flatten()[order, None]
    given = torch._grouped_mm(hidden, down.mT, offs=ends)
    return torch.zeros_like(tokens).scatter_add(0, (order // CHOICES)[:, None].expand(-1, WIDTH), given)


def weighed_before_and_put_back(tokens, logits, gate_up, down):
    weights, experts = routed(logits)
    order = experts.flatten().argsort(stable=True)
    ends = ends_of(experts.flatten())
    hidden = halves(torch._grouped_mm(tokens[order // CHOICES], gate_up.mT, offs=ends)) * weights.flatten()[order, None]
    given = torch._grouped_mm(hidden, down.mT, offs=ends)
    return torch.zeros_like(given).index_copy(0, order, given).view(-1, CHOICES, WIDTH).sum(1)


def sorted_matrices(tokens, logits, gate_up, down):
    """A matrix for each row, rows sorted all the same."""
    weights, experts = routed(logits)
    listed, order = experts.flatten().sort()
    hidden = halves(torch.bmm(gate_up[listed], tokens[order // CHOICES].unsqueeze(-1)).squeeze(-1))
    given = torch.bmm(down[listed], hidden.unsqueeze(-1)).squeeze(-1) * weights.flatten()[order, None]
    return torch.zeros_like(tokens).index_add(0, order // CHOICES, given)


def counted_by_scatter_reduce(tokens, logits, gate_up, down):
    weights, experts = routed(logits)
    order, ones = experts.flatten().argsort(), torch.ones(experts.numel(), dtype=torch.int32)
    counts = torch.zeros(EXPERTS, dtype=torch.int32).scatter_reduce(0, experts.flatten(), ones, "sum")
    given = by_group(tokens[order // CHOICES], counts.cumsum(0, dtype=torch.int32), gate_up, down)
    return (given[inverse(order)].view(-1, CHOICES, WIDTH) * weights.unsqueeze(-1)).sum(1)


def counted_one_by_one(tokens, logits, gate_up, down):
    weights, experts = routed(logits)
    listed, order = experts.flatten().sort()
    ends = torch.stack([(listed == e).sum() for e in range(EXPERTS)]).cumsum(0).int()
    given = by_group(tokens[order // CHOICES], ends, gate_up, down)
    return torch.zeros_like(tokens).index_add(0, order // CHOICES, given * weights.flatten()[order, None])


FORMS: tuple[Form, ...] = (
    of_choices,
    repeated_for_choices,
    put_back_for_choices,
    weighed_before_the_second_product,
    weighed_before_and_put_back,
    sorted_matrices,
    counted_by_scatter_reduce,
    counted_one_by_one,
)


def weighed_before_the_first_product(tokens, logits, gate_up, down):
    """Llama 4: the one expert of a token takes it times its weight."""
    scores, experts = logits.float().topk(1, dim=-1)
    scores, listed = scores.sigmoid().to(tokens.dtype), experts.reshape(-1)
    order = listed.argsort(stable=True)
    rows = (tokens[order].float() * scores.reshape(-1)[order].reshape(-1, 1)).to(tokens.dtype)
    owner = order.reshape(-1, 1).expand(-1, WIDTH)
    return torch.zeros_like(tokens).scatter_add(0, owner, by_group(rows, ends_of(listed), gate_up, down))


def weighed_first(tokens: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Float64 of the form above."""
    scores, experts = logits.float().topk(1, dim=-1)
    rows = tokens.double() * scores.sigmoid().to(tokens.dtype).double()
    hidden = halves(torch.einsum("th,tjh->tj", rows, gate_up[experts[:, 0]].double()))
    return torch.einsum("ti,thi->th", hidden, down[experts[:, 0]].double())


# look-alikes --------------------------------------------------------------------------------------------------------


def _choices(owner, listed, added=None) -> Form:
    """`of_choices` with another `owner` of the rows, list, or tokens that rows are added to."""

    def form(tokens, logits, gate_up, down):
        weights, experts = routed(logits)
        flat = listed(experts)
        order = flat.argsort(stable=True)
        given = by_group(tokens[owner(order, tokens.shape[0])], ends_of(flat), gate_up, down)
        given = given * weights.t().reshape(-1)[order].unsqueeze(-1)
        return torch.zeros_like(tokens).index_add(0, (added or owner)(order, tokens.shape[0]), given)

    return form


def _first(order: Tensor, count: int) -> Tensor:
    return order // CHOICES


def _last(order: Tensor, count: int) -> Tensor:
    return order % count


def _turned(experts: Tensor) -> Tensor:
    return experts.t().reshape(-1)


def weighed_before_in_half(tokens, logits, gate_up, down):
    """Products that float16 may not hold, were they not weighed before."""
    weights, experts = routed(logits)
    hidden = halves(torch.matmul(gate_up[experts], tokens[:, None, :, None]).squeeze(-1)) * weights.unsqueeze(-1)
    return torch.matmul(down[experts], hidden.unsqueeze(-1)).squeeze(-1).sum(1)


_ROWS, _SUM = "not proven to be those of the tokens", "not proven to be summed for each token"
OTHERS: dict[str, tuple[Form, str]] = {
    "a list by choice, owners by token": (_choices(_first, _turned), _ROWS),
    "a list by token, owners by choice": (_choices(_last, lambda experts: experts.reshape(-1)), _ROWS),
    "sums of other tokens": (_choices(_last, _turned, _first), _SUM),
    "counts of the next experts": (
        lambda tokens, logits, gate_up, down: _counted_of_next(tokens, logits, gate_up, down),
        "not proven to be the rows of each expert",
    ),
}


def _counted_of_next(tokens, logits, gate_up, down):
    weights, experts = routed(logits)
    listed, order = experts.flatten().sort()
    ends = torch.stack([(listed == e + 1).sum() for e in range(EXPERTS)]).cumsum(0).int()
    given = by_group(tokens[order // CHOICES], ends, gate_up, down)
    return torch.zeros_like(tokens).index_add(0, order // CHOICES, given * weights.flatten()[order, None])
