"""Routers of mixture-of-experts models, over logits of which no two of a token are equal."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import Example
from tests.examples.inputs import Inputs, tensors

Routed = tuple[Tensor, Tensor]
Finish = Callable[[Tensor], Tensor]
TOKENS, EXPERTS = 6, 16


def _logits(*lead: int) -> Inputs:
    generator = torch.Generator().manual_seed(5)
    rows = torch.stack([torch.randperm(EXPERTS, generator=generator) for _ in range(TOKENS)])
    return tensors((rows.double() / 4 - 2).reshape(*lead, EXPERTS))


FLAT = _logits(TOKENS)


def _scaled_behind(x: Tensor) -> Routed:
    values, experts = x.float().topk(4, dim=-1)
    return (values * 2).softmax(-1), experts


def _first_of_rounded(x: Tensor) -> Routed:
    """Shares that are equal more often than those of the operator."""
    return x.float().softmax(-1).bfloat16().float().max(dim=-1)


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
    shares, experts = F.softmax(x.float(), dim=-1).topk(4, sorted=False)
    return torch.zeros_like(x).float().scatter(-1, experts, finish(shares))


def divided(shares: Tensor) -> Tensor:
    """By their sum, in place."""
    shares /= shares.sum(dim=-1, keepdim=True)
    return shares


def _along_tokens(x: Tensor) -> Routed:
    values, experts = x.topk(4, dim=-1)
    return values.softmax(0), experts


def _chosen_then_widened(x: Tensor) -> Routed:
    values, experts = x.topk(4, dim=-1)
    return values.to(torch.promote_types(x.dtype, torch.float32)).softmax(-1), experts


def _gathered(x: Tensor, finish: Finish = lambda shares: shares) -> Routed:
    experts = x.topk(4, dim=-1)[1]
    return finish(x.float().softmax(-1).gather(-1, experts)), experts


def _in_logarithms(x: Tensor) -> Routed:
    shares, experts = F.log_softmax(x.float(), -1).topk(4, dim=-1)
    return shares.exp(), experts


def _less_all(x: Tensor) -> Routed:
    values, experts = x.float().topk(4, dim=-1)
    return (values - x.float().logsumexp(-1, keepdim=True)).exp(), experts


def _mask(x: Tensor) -> Tensor:
    return torch.zeros_like(x).scatter(-1, x.topk(4, dim=-1)[1], 1.0)


def _filled(x: Tensor, fill: float = -torch.inf) -> Tensor:
    return x.masked_fill(_mask(x) == 0, fill).softmax(-1)


def _put(x: Tensor) -> Tensor:
    values, experts = x.topk(4, dim=-1)
    return torch.full_like(x, -torch.inf).scatter(-1, experts, values).softmax(-1)


def _weighed(x: Tensor) -> Tensor:
    kept = x.softmax(-1) * _mask(x)
    return kept / kept.sum(-1, keepdim=True)


def _bounded(x: Tensor) -> Tensor:
    return x.masked_fill(x < x.topk(4, dim=-1)[0][..., -1:], -torch.inf).softmax(-1)


def _without_experts(x: Tensor) -> Tensor:
    return x.topk(4, dim=-1)[0].softmax(-1)


def _over(by: Finish) -> Callable[[Tensor], Routed]:
    """Shares divided by what is made of them."""
    return partial(largest, finish=lambda shares: shares / by(shares))


def _sum(shares: Tensor) -> Tensor:
    return shares.sum(dim=-1, keepdim=True)


PLAIN = "Logits, Shares, Listed]"
TWICE = partial(largest, finish=lambda shares: shares / (2 * shares.sum(dim=-1, keepdim=True)))
IN_BATCHES = partial(scattered, finish=lambda shares: shares / shares.sum(dim=-1, keepdim=True))
EXAMPLES = (
    Example("softmax over the chosen", _chosen_first, FLAT),
    Example("the same in float32", _chosen_first_in_float, FLAT),
    Example("divided by their sum", partial(largest, finish=divided), FLAT),
    Example("in batches, unsorted", IN_BATCHES, _logits(2, 3)),
    Example("chosen, then widened", _chosen_then_widened, FLAT),
    Example("nothing but shares", _without_experts, FLAT, "nothing reads which are chosen"),
    Example("divided by their sum and a tiny number", _over(lambda shares: _sum(shares) + 1e-20), FLAT),
    Example("divided by their sum, clamped", _over(lambda shares: _sum(shares).clamp(min=1e-8)), FLAT),
    Example("divided by their norm of order 1", partial(largest, finish=partial(F.normalize, p=1, dim=-1)), FLAT),
    Example("with a large eps", _over(lambda shares: _sum(shares) + 1e-3), FLAT, "0.001 is added to the sum", PLAIN),
    Example(
        "clamped at half", _over(lambda shares: _sum(shares).clamp(min=0.5)), FLAT, "clamped between 0.5 and inf", PLAIN
    ),
    Example(
        "divided by the largest", _over(lambda shares: shares.amax(-1, keepdim=True)), FLAT,
        "divided by something else than their sum", PLAIN,
    ),
    Example("softmax over tokens", _along_tokens, FLAT, "runs along another dim"),
    Example("divided by twice their sum", TWICE, FLAT, "something else than their sum", instead=PLAIN),
    Example("largest of a softmax", largest, FLAT),
    Example("the first of equal ones", lambda x: x.float().softmax(-1).max(dim=-1), FLAT),
    Example("scaled behind the choice", _scaled_behind, FLAT, "multiplied by 2.0 behind the top-k"),
    Example("the first of equal ones, rounded", _first_of_rounded, FLAT, "by argmax of scores in bfloat16"),
    Example("taken where the largest logits are", _gathered, FLAT),
    Example("taken so, and divided by their sum", lambda x: _gathered(x, divided), FLAT),
    Example("of a softmax in logarithms", _in_logarithms, FLAT),
    Example("the largest less the logarithm of all", _less_all, FLAT),
    Example("in float32, unsorted", scattered, FLAT),
    Example(
        "largest of a softmax over tokens",
        lambda x: x.softmax(0).topk(4, dim=-1),
        FLAT,
        "it runs along another dim than the top-k",
    ),
    Example("weights of all experts", _put, FLAT),
    Example("others filled, in batches", _filled, _logits(2, 3)),
    Example("shares times a mask, divided", _weighed, FLAT),
    Example("others filled with a number", partial(_filled, fill=-5.0), FLAT, "of which a softmax may give a share"),
    Example("kept by a bound", _bounded, FLAT, "scores that reach the k-th largest are"),
    Example("four dims", lambda x: x.softmax(-1).topk(4, dim=-1), _logits(1, 2, 3), "rank(x) in (2, 3)"),
)  # fmt: skip

TRIED = {"expert_routing": EXAMPLES}
