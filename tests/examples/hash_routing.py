"""Routers whose experts a table lists for each token of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import softplus

from fusion import Example
from tests.examples.inputs import Inputs

EXPERTS, COUNT, VOCABULARY = 16, 4, 20


def _inputs(*lead: int) -> Inputs:
    """Logits [*lead, E], tokens [*lead] that may count from the end of the vocabulary, and a table [V, K]."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(9)
        logits = torch.randn(*lead, EXPERTS, generator=generator, dtype=torch.float64)
        tokens = torch.randint(-VOCABULARY, VOCABULARY, lead, generator=generator)
        table = torch.stack([torch.randperm(EXPERTS, generator=generator)[:COUNT] for _ in range(VOCABULARY)])
        return logits.to(dtype), tokens, table

    return make


SEVERAL = _inputs(5)


def routed(
    logits: Tensor, tokens: Tensor, table: Tensor, score: Callable[[Tensor], Tensor] = torch.sigmoid, by: float = 1.0,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Scores at the experts of each token, divided by their sum times `by`, and `eps`."""
    experts = table[tokens]
    weights = score(logits).gather(-1, experts)
    return 1.5 * weights / (weights.sum(-1, keepdim=True) * by + eps), experts


def stable(logits: Tensor) -> Tensor:
    """Score by the root of a softplus that is written out."""
    wide = logits.float()
    return (torch.log1p(torch.exp(-wide.abs())) + torch.relu(wide)).sqrt()


def root(logits: Tensor) -> Tensor:
    """Score by the root of a softplus."""
    return softplus(logits).sqrt()


def plainly(logits: Tensor, tokens: Tensor, table: Tensor) -> Tensor:
    """Scores at the experts of each token, divided by their sum alone."""
    weights = root(logits).gather(-1, table[tokens])
    return weights / weights.sum(-1, keepdim=True)


EXAMPLES = (
    Example("sigmoids", routed, SEVERAL),
    Example("roots of a softplus", partial(routed, score=root), SEVERAL),
    Example("roots of a softplus of one token", partial(routed, score=root), _inputs(1)),
    Example("roots of a softplus that is written out", partial(routed, score=stable), SEVERAL),
    Example("roots of a softplus, divided by their sum alone", plainly, SEVERAL),
    Example("divided by twice their sum", partial(routed, by=2.0), SEVERAL, "something else than their sum"),
    Example("divided by less than their sum", partial(routed, eps=-1e-3), SEVERAL, "makes the sum smaller"),
)

TRIED = {"hash_routing": EXAMPLES}
