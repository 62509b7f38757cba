"""Routers with a correction bias, with groups, or with sigmoid scores."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fusion import Example
from tests.examples.inputs import Inputs

Routed = tuple[Tensor, Tensor]
Finish = Callable[[Tensor], Tensor]
EXPERTS, GROUPS, KEPT, COUNT = 32, 8, 4, 6


def _inputs(*lead: int) -> Inputs:
    """Logits [*lead, E] and a bias [E] in steps so large that every dtype chooses the same, in the same order."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(8)
        logits = torch.randn(*lead, EXPERTS, generator=generator, dtype=torch.float64)
        runs = torch.stack([torch.randperm(EXPERTS // GROUPS, generator=generator) for _ in range(GROUPS)])
        steps = runs + EXPERTS // GROUPS * torch.randperm(GROUPS, generator=generator)[:, None]
        return (8 * logits).round().div(8).to(dtype), (2.0 * steps.flatten() - 40).to(dtype)

    return make


FLAT = _inputs(5)


def by_their_sum(weights: Tensor, eps: float = 1e-20) -> Tensor:
    """Weights that add up to one."""
    return weights / (weights.sum(-1, keepdim=True) + eps)


def grouped(
    logits: Tensor, bias: Tensor | None = None, finish: Finish = by_their_sum, fill: float = -torch.inf
) -> Routed:
    """Sigmoids, groups by the sum of their two best, other groups filled."""
    scores = logits.sigmoid()
    choice = scores if bias is None else scores + bias
    runs = choice.unflatten(-1, (GROUPS, -1))
    best = runs.topk(2, dim=-1)[0].sum(-1).topk(KEPT, dim=-1)[1]
    hidden = torch.ones_like(runs[..., 0], dtype=torch.bool).scatter(-1, best, False)
    experts = runs.masked_fill(hidden.unsqueeze(-1), fill).flatten(-2).topk(COUNT, dim=-1)[1]
    return finish(scores.gather(-1, experts)), experts


def of_softmax(logits: Tensor, bias: Tensor) -> Routed:
    """Shares of a softmax, chosen with a bias, times a factor."""
    shares = logits.softmax(-1)
    experts = (shares + bias).topk(COUNT, dim=-1)[1]
    return shares.gather(-1, experts) * 6.0, experts


def _plainly(weights: Tensor) -> Tensor:
    return 2.5 * weights / weights.sum(-1, keepdim=True)


def _divided(logits: Tensor, bias: Tensor) -> Routed:
    shares, experts = of_softmax(logits, bias)
    return shares / shares.sum(-1, keepdim=True), experts


def _chosen_by_logits(logits: Tensor) -> Routed:
    best, experts = logits.topk(COUNT, dim=-1)
    return by_their_sum(best.sigmoid()), experts


def by_softplus(logits: Tensor, bias: Tensor, root: bool = True) -> Routed:
    """Roots of a softplus, chosen with a bias  (DeepSeek-V4)."""
    scores = torch.nn.functional.softplus(logits)
    scores = scores.sqrt() if root else scores
    experts = (scores + bias).topk(COUNT, dim=-1)[1]
    return by_their_sum(scores.gather(-1, experts)), experts


CLAMPED = partial(grouped, finish=lambda weights: weights / weights.sum(-1, keepdim=True).clamp(min=0.5))
TWICE = partial(grouped, finish=lambda weights: weights / (2 * weights.sum(-1, keepdim=True) + 1e-20))
LESS = partial(grouped, finish=partial(by_their_sum, eps=-1e-20))
EXAMPLES = (
    Example("divided by their sum and eps", grouped, FLAT),
    Example("divided by their sum, scaled", partial(grouped, finish=_plainly), FLAT),
    Example("as they are, in batches", partial(grouped, finish=lambda weights: weights), _inputs(2, 3)),
    Example("shares of a softmax with a bias", of_softmax, FLAT),
    Example("filled with 0", partial(grouped, fill=0.0), FLAT, "scores of those outside of the top-k are"),
    Example("scores divided by twice their sum", TWICE, FLAT, "something else than their sum", "undivided"),
    Example("divided by less than their sum", LESS, FLAT, "makes the sum smaller", "undivided"),
    Example("divided by no less than a half", CLAMPED, FLAT, "clamped between 0.5 and inf", "undivided"),
    Example("shares of a softmax, divided", _divided, FLAT, "the chosen scores of a softmax are divided", "undivided"),
    Example("chosen by logits", _chosen_by_logits, lambda dtype: FLAT(dtype)[:1], "they are chosen by logits"),
    Example("roots of a softplus", by_softplus, FLAT),
    Example(
        "scores by softplus", partial(by_softplus, root=False), FLAT, "the top-k is of something else than sigmoid"
    ),
)

TRIED = {"expert_routing": EXAMPLES}
