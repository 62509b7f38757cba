"""Experts with biases on both projections, gate and up every second lane and bounded, as gpt-oss has them.

Every form takes tokens [T, H], logits [T, E], and of all experts gate_up [E, 2 · I, H] and down [E, H, I], each with
its biases behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.moe.experts import CHOICES, EXPERTS, INNER, WIDTH, Form, ends_of, inverse, routed
from tests.moe.experts import inputs as unbiased

LIMIT = 2.0


def gated(both: Tensor) -> Tensor:
    gate, up = both[..., ::2].clamp(max=LIMIT), both[..., 1::2].clamp(-LIMIT, LIMIT)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def by_einsum(tokens, logits, gate_up, bias, down, down_bias):
    weights, experts = routed(logits)
    hidden = gated(torch.einsum("beck,bk->bec", gate_up[experts], tokens) + bias[experts])
    given = torch.einsum("beck,bek->bec", down[experts], hidden) + down_bias[experts]
    return torch.einsum("bec,be->bc", given, weights)


def gathered(tokens, logits, gate_up, bias, down, down_bias):
    weights, experts = routed(logits)
    listed = experts.reshape(-1)
    rows = tokens.repeat_interleave(CHOICES, dim=0)
    hidden = gated(torch.bmm(gate_up[listed], rows.unsqueeze(-1)).squeeze(-1) + bias[listed])
    given = torch.bmm(down[listed], hidden.unsqueeze(-1)).squeeze(-1) + down_bias[listed]
    return (given * weights.reshape(-1, 1)).view(*experts.shape, -1).sum(dim=1)


def _sorted(lines: Callable[..., Tensor]) -> Form:
    """Rows that are sorted; `lines`: of a bias, by the experts, their order and the sorted ones."""

    def form(tokens, logits, gate_up, bias, down, down_bias):
        weights, experts = routed(logits)
        listed, order = experts.reshape(-1).sort()
        ends = ends_of(listed)
        how = (experts.reshape(-1), order, listed)
        both = torch._grouped_mm(tokens[order // CHOICES], gate_up.mT, offs=ends) + lines(bias, *how)
        given = torch._grouped_mm(gated(both), down.mT, offs=ends) + lines(down_bias, *how)
        given = (given * weights.reshape(-1)[order].unsqueeze(-1))[inverse(order)]
        return given.view(*experts.shape, -1).sum(dim=1)

    return form


sorted_lines = _sorted(lambda bias, experts, order, listed: bias[listed])
lines_in_order = _sorted(lambda bias, experts, order, listed: bias[experts[order]])
FORMS: dict[str, Form] = {
    "by einsum": by_einsum, "gathered": gathered, "sorted": sorted_lines, "in order": lines_in_order,
}  # fmt: skip


_ADD = "what experts add is not proven to be the"
OTHERS: dict[str, tuple[Form, str]] = {
    "lines of rows that are not sorted": (_sorted(lambda bias, experts, order, listed: bias[experts]), _ADD),
    "lines by the order": (_sorted(lambda bias, experts, order, listed: bias[order % EXPERTS]), _ADD),
    "a line of one expert": (_sorted(lambda bias, experts, order, listed: bias[0]), _ADD),
}


def inputs(dtype: torch.dtype, tokens: int = 5) -> tuple[Any, ...]:
    x, logits, gate_up, down = unbiased(dtype, tokens)
    draw = torch.Generator().manual_seed(7)
    shapes = ((EXPERTS, 2 * INNER), (EXPERTS, WIDTH))
    one, two = (nn.Parameter(torch.randn(each, generator=draw).to(dtype), requires_grad=False) for each in shapes)
    return x, logits, gate_up, one, down, two


def expected(tokens, logits, gate_up, bias, down, down_bias) -> Tensor:
    """Float64, token by token."""
    rows = []
    for token, share in zip(tokens.double(), logits.softmax(-1, dtype=torch.float32), strict=True):
        weights, experts = share.topk(CHOICES)
        weights = (weights / weights.sum()).to(logits.dtype).double()
        hidden = [gated(gate_up[e].double() @ token + bias[e].double()) for e in experts]
        given = [down[e].double() @ h + down_bias[e].double() for e, h in zip(experts, hidden, strict=True)]
        rows.append(sum(w * each for w, each in zip(weights, given, strict=True)))
    return torch.stack(rows)
