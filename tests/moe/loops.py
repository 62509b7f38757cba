"""Experts in a loop over all of them, as books write it: what an expert gives counts 0 where a token did not choose it.

Every form takes tokens [T, H], logits [T, E], and for each expert gate [I, H], up [I, H] and down [H, I].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXPERTS, CHOICES, WIDTH, INNER = 6, 2, 64, 32
Form = Callable[..., Tensor]
Expert = Callable[..., Tensor]


def put(logits: Tensor) -> Tensor:
    values, experts = logits.topk(CHOICES, dim=-1)
    return torch.full_like(logits, float("-inf")).scatter(-1, experts, values).softmax(-1)


def filled(logits: Tensor) -> Tensor:
    mask = torch.zeros_like(logits).scatter(-1, logits.topk(CHOICES, dim=-1)[1], 1.0)
    return logits.masked_fill(mask == 0, float("-inf")).softmax(-1, dtype=torch.float32).to(logits.dtype)


def listed(logits: Tensor) -> Tensor:
    shares, experts = logits.softmax(-1, dtype=torch.float32).topk(CHOICES, dim=-1)
    shares = (shares / shares.sum(-1, keepdim=True)).to(logits.dtype)
    return torch.zeros_like(logits).scatter(-1, experts, shares)


def by_columns(logits: Tensor) -> Tensor:
    values, experts = logits.topk(CHOICES, dim=-1)
    shares, weights = values.softmax(-1), torch.zeros_like(logits)
    for c in range(CHOICES):
        weights.scatter_(-1, experts[..., c : c + 1], shares[..., c : c + 1])
    return weights


def divided(logits: Tensor) -> Tensor:
    shares = logits.softmax(-1, dtype=torch.float32)
    kept = shares * torch.zeros_like(shares).scatter(-1, shares.topk(CHOICES, dim=-1)[1], 1.0)
    return (kept / kept.sum(-1, keepdim=True)).to(logits.dtype)


def bounded(logits: Tensor) -> Tensor:
    least = logits.topk(CHOICES, dim=-1)[0][..., -1:]
    return logits.masked_fill(logits < least, float("-inf")).softmax(-1)


def gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def each(x: Tensor, matrices: tuple[Tensor, ...], expert: Expert = gated) -> list[Tensor]:
    return [expert(x, *matrices[3 * e : 3 * e + 3]) for e in range(len(matrices) // 3)]


def added(tokens, logits, *matrices, weigh=put, expert=gated):
    weights, total = weigh(logits), torch.zeros_like(tokens)
    for e, given in enumerate(each(tokens, matrices, expert)):
        total = total + weights[:, e : e + 1] * given
    return total


def added_in_place(tokens, logits, *matrices):
    weights, total = filled(logits), torch.zeros_like(tokens)
    for e, given in enumerate(each(tokens, matrices)):
        total += given * weights[:, e].unsqueeze(-1)
    return total


def summed(tokens, logits, *matrices):
    weights = listed(logits)
    return sum(weights[..., e, None] * given for e, given in enumerate(each(tokens, matrices)))


def stacked(tokens, logits, *matrices):
    return (torch.stack(each(tokens, matrices), dim=1) * by_columns(logits).unsqueeze(-1)).sum(dim=1)


def joined_in_batches(tokens, logits, *matrices):
    tokens, weights = tokens.unsqueeze(0), by_columns(logits.unsqueeze(0))
    given = torch.cat([one.unsqueeze(-2) for one in each(tokens, matrices)], dim=-2)
    return (weights.unsqueeze(-1) * given).sum(dim=-2)[0]


def by_einsum(tokens, logits, *matrices):
    return torch.einsum("te,teh->th", divided(logits), torch.stack(each(tokens, matrices), dim=1))


def by_product(tokens, logits, *matrices):
    return torch.bmm(put(logits).unsqueeze(1), torch.stack(each(tokens, matrices), dim=1)).squeeze(1)


def one_projection(tokens, logits, *matrices):
    """Gate and up of an expert in one matrix."""

    def merged(x, gate, up, down):
        left, right = F.linear(x, torch.cat([gate, up])).chunk(2, dim=-1)
        return F.linear(F.silu(left) * right, down)

    return added(tokens, logits, *matrices, expert=merged)


def _biased(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Lines of the matrices for biases."""
    hidden = F.silu(F.linear(x, gate, down[0])) * F.linear(x, up, down[1])
    return F.linear(hidden, down, gate[0])


def compared(tokens, logits, *matrices):
    """What each expert counts for, by comparing the list with its number."""
    values, experts = logits.topk(CHOICES)
    weights, total = values.softmax(-1), torch.zeros_like(tokens)
    for e, given in enumerate(each(tokens, matrices)):
        total = total + given * (weights * (experts == e)).sum(-1, keepdim=True)
    return total


def chosen_where(tokens, logits, *matrices):
    """The same, with zeros elsewhere."""
    values, experts = torch.topk(logits, CHOICES, dim=-1)
    weights = F.softmax(values, dim=-1)
    parts = (torch.where(e == experts, weights, 0).sum(-1) for e in range(EXPERTS))
    return sum(part[:, None] * given for part, given in zip(parts, each(tokens, matrices), strict=True))


def with_biases(tokens, logits, *matrices):
    return added(tokens, logits, *matrices, expert=_biased)


FORMS: tuple[Form, ...] = (
    added, added_in_place, summed, stacked, joined_in_batches, by_einsum, by_product, one_projection,
    compared, chosen_where, with_biases,
)  # fmt: skip


def expected(tokens: Tensor, logits: Tensor, *matrices: Tensor, form: Form = added) -> Tensor:
    """Float64, token by token."""
    one = _biased if form is with_biases else gated
    rows = []
    for token, row in zip(tokens.double(), logits.double(), strict=True):
        values, experts = row.topk(CHOICES)
        parts = [one(token, *(m.double() for m in matrices[3 * e : 3 * e + 3])) for e in experts.tolist()]
        rows.append(sum(w * part for w, part in zip(values.softmax(-1), parts, strict=True)))
    return torch.stack(rows)


def inputs(dtype: torch.dtype, tokens: int = 5, parameters: bool = True) -> tuple[Tensor, ...]:
    """Tokens, logits no two of which are equal, and the matrices of each expert."""
    draw = torch.Generator().manual_seed(5)
    logits = torch.stack([torch.randperm(EXPERTS, generator=draw) for _ in range(tokens)]) / 2.0
    shapes = ((INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER)) * EXPERTS
    matrices = [(torch.randn(shape, generator=draw) / 8).to(dtype) for shape in shapes]
    held = [nn.Parameter(m, requires_grad=False) if parameters else m for m in matrices]
    return torch.randn(tokens, WIDTH, generator=draw).to(dtype), logits.to(dtype), *held


# look-alikes --------------------------------------------------------------------------------------------------------


def _loop(weights: Callable[[Tensor], Tensor] = put, expert: Expert = gated) -> Form:
    return lambda tokens, logits, *matrices: added(tokens, logits, *matrices, weigh=weights, expert=expert)


def last_alone(tokens, logits, *matrices):
    """One expert computes something else."""
    weights, given = put(logits), each(tokens, matrices)
    given[-1] = given[-1].tanh()
    return sum(weights[:, e : e + 1] * part for e, part in enumerate(given))


def left_out(tokens, logits, *matrices):
    """No part of an expert between others."""
    weights, given = put(logits), each(tokens, matrices)
    return sum(weights[:, e : e + 1] * part for e, part in enumerate(given) if e != 2)


def twice(tokens, logits, *matrices):
    """The weights of one expert for two of them."""
    weights, given = put(logits), each(tokens, matrices)
    return sum(weights[:, max(e, 1) : max(e, 1) + 1] * part for e, part in enumerate(given))


def over_tokens(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Each token's share of all, those that chose other experts too."""
    return F.linear(F.silu(F.linear(x, gate).softmax(0)) * F.linear(x, up), down)


def of_the_smallest(tokens, logits, *matrices):
    """The experts that are chosen least."""
    values, experts = logits.topk(CHOICES, largest=False)
    parts = ((values * (experts == e)).sum(-1, keepdim=True) for e in range(EXPERTS))
    return sum(part * given for part, given in zip(parts, each(tokens, matrices), strict=True))


def next_to_them(tokens, logits, *matrices):
    """Each expert counts for what stands before it in the list."""
    values, experts = logits.topk(CHOICES)
    parts = ((values * (experts == e + 1)).sum(-1, keepdim=True) for e in range(EXPERTS))
    return sum(part * given for part, given in zip(parts, each(tokens, matrices), strict=True))


_NOT_ONE = "not proven to be one computation"
OTHERS: dict[str, tuple[Form, str | None]] = {
    "kept by a bound": (_loop(bounded), "not proven to be 0"),
    "a part of every expert": (_loop(lambda logits: logits.softmax(-1)), None),
    "one is another computation": (last_alone, _NOT_ONE),
    "one is left out": (left_out, "computes 5 of the 6 experts"),
    "one weight for two": (twice, None),
    "the smallest": (of_the_smallest, None),
    "an expert that mixes tokens": (_loop(expert=over_tokens), _NOT_ONE),
    "a sigmoid alone": (
        _loop(expert=lambda x, gate, up, down: F.linear(torch.sigmoid(F.linear(x, gate)), down)), "something else"
    ),
}  # fmt: skip
