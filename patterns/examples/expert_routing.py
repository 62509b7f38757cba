"""Routers of mixture-of-experts models, over logits of which no two of a token are equal."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import Example
from patterns.examples.inputs import Inputs, tensors

Routed = tuple[Tensor, Tensor]
Finish = Callable[[Tensor], Tensor]
TOKENS, EXPERTS = 6, 16


def _logits(*lead: int) -> Inputs:
    generator = torch.Generator().manual_seed(5)
    rows = torch.stack([torch.randperm(EXPERTS, generator=generator) for _ in range(TOKENS)])
    return tensors((rows.double() / 4 - 2).reshape(*lead, EXPERTS))


FLAT = _logits(TOKENS)


def _chosen_first(x: Tensor) -> Routed:
    values, experts = torch.topk(x, 4, dim=-1)
    return F.softmax(values, dim=1, dtype=values.dtype), experts


def _chosen_first_in_float(x: Tensor) -> Routed:
    values, experts = x.float().topk(4, dim=-1)
    return torch.softmax(values, dim=-1).type_as(x), experts


def largest(x: Tensor, finish: Finish = lambda shares: shares) -> Routed:
    """The largest of a softmax in float32, and what is made of them."""
    shares, experts = torch.topk(F.softmax(x.float(), dim=-1), 4, dim=-1)
    return finish(shares).to(x.dtype), experts


def scattered(x: Tensor, finish: Finish = lambda shares: shares) -> Tensor:
    """The same, unsorted, among zeros for all others."""
    shares, experts = F.softmax(x, dim=-1, dtype=torch.float32).topk(4, sorted=False)
    return torch.zeros_like(x).float().scatter(-1, experts, finish(shares))


def divided(shares: Tensor) -> Tensor:
    """By their sum, in place."""
    shares /= shares.sum(dim=-1, keepdim=True)
    return shares


def _along_tokens(x: Tensor) -> Routed:
    values, experts = x.topk(4, dim=-1)
    return values.softmax(0), experts


TWICE = partial(largest, finish=lambda shares: shares / (2 * shares.sum(dim=-1, keepdim=True)))
IN_BATCHES = partial(scattered, finish=lambda shares: shares / shares.sum(dim=-1, keepdim=True))
EXAMPLES = (
    Example("softmax over the chosen", _chosen_first, FLAT),
    Example("the same in float32", _chosen_first_in_float, FLAT),
    Example("divided by their sum", partial(largest, finish=divided), FLAT),
    Example("in batches, unsorted", IN_BATCHES, _logits(2, 3)),
    Example("softmax over tokens", _along_tokens, FLAT, "runs along another dim"),
    Example("divided by twice their sum", TWICE, FLAT, "something else than their sum", instead="chosen[Shares]"),
    Example("largest of a softmax", largest, FLAT),
    Example("in float32, unsorted", scattered, FLAT),
    Example(
        "largest of a softmax over tokens",
        lambda x: x.softmax(0).topk(4, dim=-1),
        FLAT,
        "along another dim than the choice",
    ),
    Example("four dims", lambda x: x.softmax(-1).topk(4, dim=-1), _logits(1, 2, 3), "rank(x) in (2, 3)"),
)

TRIED = {"expert_routing": EXAMPLES}
