"""Experts of one device of several, which has the matrices of experts `FIRST` … `LAST` - 1 alone.

Every form takes tokens [T, H], logits [T, E], gate_up [N, 2 · I, H] and down [N, H, I], N = LAST - FIRST.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.moe.experts import CHOICES, EXPERTS, WIDTH, Form, by_group, halves, inverse, routed

FIRST, LAST = 2, 4
COUNT = LAST - FIRST


def ends_of(numbers: Tensor) -> Tensor:
    return torch.histc(numbers.float(), bins=COUNT, min=0, max=COUNT - 1).cumsum(0, dtype=torch.int32)


def looped(tokens, logits, gate_up, down):
    weights, experts = routed(logits)
    total = torch.zeros_like(tokens)
    for e in range(FIRST, LAST):
        share = (weights * (experts == e)).sum(-1, keepdim=True)
        total = total + share * F.linear(halves(F.linear(tokens, gate_up[e - FIRST])), down[e - FIRST])
    return total


def looped_by_a_map(tokens, logits, gate_up, down):
    """vLLM: a map from experts to the matrices of a device, -1 for experts of others."""
    weights, experts = routed(logits)
    local = torch.full((EXPERTS,), -1)
    local[FIRST:LAST] = torch.arange(COUNT)
    given = (F.linear(halves(F.linear(tokens, gate_up[e])), down[e]) for e in range(COUNT))
    return sum((weights * (local[experts] == e)).sum(-1, keepdim=True) * each for e, each in enumerate(given))


def at_once(tokens, logits, gate_up, down):
    weights, experts = routed(logits)
    own = torch.zeros_like(logits).scatter(-1, experts, weights)[:, FIRST:LAST]
    hidden = halves(torch.einsum("th,ejh->tej", tokens, gate_up))
    return torch.einsum("tei,ehi,te->th", hidden, down, own)


def numbered(experts: Tensor) -> Tensor:
    """The matrix of each expert, COUNT for those of other devices."""
    return torch.where((experts >= FIRST) & (experts < LAST), experts - FIRST, COUNT)


def sentinels(tokens, logits, gate_up, down, number=numbered, others=lambda numbers: numbers == COUNT):
    """transformers: masks keep what no product computes from spreading."""
    weights, experts = routed(logits)
    numbers = number(experts)
    weights = weights.masked_fill(others(numbers), 0.0)
    order = numbers.reshape(-1).argsort()
    listed = numbers.reshape(-1)[order]
    ends, rest = ends_of(listed), (listed >= COUNT).unsqueeze(-1)
    both = torch._grouped_mm(tokens[order // CHOICES].masked_fill(rest, 0.0), gate_up.mT, offs=ends)
    given = torch._grouped_mm(halves(both.masked_fill(rest, 0.0)), down.mT, offs=ends).masked_fill(rest, 0.0)
    given = (given * weights.reshape(-1)[order].unsqueeze(-1))[inverse(order)]
    return given.view(-1, CHOICES, WIDTH).sum(1)


def rows_that_count(tokens, logits, gate_up, down, more=0, masked=True):
    """vLLM-Ascend: rows behind the last group are left out by their number."""
    weights, experts = routed(logits)
    own = (experts >= FIRST) & (experts < LAST)
    numbers = torch.where(own, experts - FIRST, torch.full_like(experts, COUNT)).view(-1)
    order = numbers.argsort()
    counts = torch.zeros(COUNT + 1, dtype=torch.int64).scatter_add(0, numbers, torch.ones_like(numbers))[:COUNT]
    owner = torch.arange(tokens.shape[0]).unsqueeze(1).expand(-1, CHOICES).reshape(-1)[order]
    given = by_group(tokens[owner], counts.cumsum(0).int(), gate_up, down) * weights.view(-1)[order].unsqueeze(1)
    count = own.sum() + more if masked else order.shape[0]
    given = torch.where(torch.arange(order.shape[0]).unsqueeze(1) < count, given, torch.zeros_like(given))
    return torch.zeros_like(tokens).index_add(0, owner, given)


def by_rank(tokens, logits, gate_up, down):
    """Experts divided evenly: the rank is a quotient, the matrix a remainder."""
    weights, experts = routed(logits)
    own = experts // COUNT == FIRST // COUNT
    numbers = torch.where(own, experts % COUNT, COUNT).flatten()
    listed, order = numbers.sort()
    given = by_group(tokens[order // CHOICES], ends_of(numbers), gate_up, down)
    given = (given * (weights * own).flatten()[order, None]).masked_fill((listed == COUNT)[:, None], 0)
    return torch.zeros_like(tokens).index_add(0, order // CHOICES, given)


FORMS: tuple[Form, ...] = (looped, looped_by_a_map, at_once, sentinels, rows_that_count, by_rank)


def expected(tokens: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Float64, token by token."""
    rows = []
    for token, row in zip(tokens.double(), logits, strict=True):
        weights, experts = routed(row.unsqueeze(0))
        total = torch.zeros_like(token)
        for weight, e in zip(weights[0].double(), (experts[0] - FIRST).tolist(), strict=True):
            if 0 <= e < COUNT:
                total += weight * (down[e].double() @ halves(gate_up[e].double() @ token))
        rows.append(total)
    return torch.stack(rows)


# look-alikes --------------------------------------------------------------------------------------------------------


def _numbered(number) -> Form:
    return lambda *args: sentinels(*args, number=number)


_NUMBERS, _LEFT = "numbers that are sorted are not 0, 1", "they are not proven to count as 0"
OTHERS: dict[str, tuple[Form, str]] = {
    "experts of other devices first": (
        _numbered(lambda experts: torch.where((experts >= FIRST) & (experts < LAST), experts - FIRST, -1)), _NUMBERS
    ),
    "matrices in another order": (
        _numbered(lambda experts: torch.where((experts >= FIRST) & (experts < LAST), LAST - 1 - experts, COUNT)),
        _NUMBERS,
    ),
    "every second expert": (
        _numbered(lambda experts: torch.where((experts % 2 == 0) & (experts < LAST), experts // 2, COUNT)), _NUMBERS
    ),
    "an expert that has no matrix here": (
        _numbered(lambda experts: torch.where(experts < LAST, experts // FIRST, COUNT)), _NUMBERS
    ),
    "one row too many": (lambda *args: rows_that_count(*args, more=1), _LEFT),
    "one row too few": (lambda *args: rows_that_count(*args, more=-1), _LEFT),
    "rows of others that count": (lambda *args: rows_that_count(*args, masked=False), _LEFT),
}  # fmt: skip
