"""Experts that a stable sort or argmax chooses: of equal scores the first expert stands first, fused or not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusion.options import Options
from fusion.testing import Trial, capture, trial_of
from tests.engine.graphs import names

NPU = Options(target="ascend910_93", lower="eager")
GATING = "npu.npu_moe_gating_top_k.default"
TOKENS, EXPERTS, K = 24, 32, 6
Router = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def by_their_sum(scores: Tensor) -> Tensor:
    return scores / (scores.sum(-1, keepdim=True) + 1e-20) * 2.5


def biased(order: Callable[[Tensor], Tensor], scored: Callable[[Tensor], Tensor] = torch.sigmoid) -> Router:
    """Return a router that weighs by scores and chooses the first of the order of scores plus a bias."""

    def route(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        scores = scored(logits)
        experts = order(scores + bias)[:, :K]
        return by_their_sum(scores.gather(1, experts)), experts

    return route


def without_bias(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    values, experts = torch.sort(logits.sigmoid(), dim=-1, descending=True, stable=True)
    return by_their_sum(values[:, :K]), experts[:, :K]


def shares(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.softmax(-1)
    experts = torch.argsort(scores + bias, dim=-1, descending=True, stable=True)[:, :K]
    return scores.gather(1, experts), experts


def in_groups(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    runs = (scores + bias).unflatten(-1, (8, -1))
    groups = runs.topk(2, -1)[0].sum(-1).topk(4, -1)[1]
    out = torch.ones_like(runs[..., 0], dtype=torch.bool).scatter(1, groups, False)
    experts = stable(runs.masked_fill(out.unsqueeze(-1), -torch.inf).flatten(1))[:, :K]
    return by_their_sum(scores.gather(1, experts)), experts


def of_logits(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    values, experts = torch.sort(logits, dim=-1, descending=True, stable=True)
    return values[:, :K].softmax(-1), experts[:, :K]


def stable(x: Tensor) -> Tensor:
    return torch.sort(x, dim=1, descending=True, stable=True)[1]


def routed(router: Router) -> Trial:
    """The fused `router`, after its lists have been compared with the plain ones, of scores of which many are equal."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(TOKENS, EXPERTS, generator=generator) * 2).round() / 2
    bias = torch.randint(0, 2, (EXPERTS,), generator=generator) / 8.0
    trial = trial_of(capture(router, (logits, bias)), NPU)
    weights, experts = trial.fused(*trial.inputs())
    wanted, listed = router(logits, bias)
    assert torch.equal(experts, listed)
    assert torch.allclose(weights, wanted, rtol=1e-6)
    return trial


def by_argmax(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.softmax(-1)
    return scores.amax(-1), scores.argmax(-1)


def by_biased_argmax(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    experts = (scores + bias).argmax(-1)
    return scores.gather(1, experts[:, None]).squeeze(1), experts


def by_max(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    weights, experts = logits.softmax(-1).max(-1, keepdim=True)
    return weights * 2.5, experts


def by_one_hot(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.softmax(-1)
    experts = scores.argmax(-1)
    return (scores * F.one_hot(experts, EXPERTS)).sum(-1), experts


def over_tokens(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Shares of each token among the tokens, not of its expert alone."""
    weights, experts = logits.sigmoid().max(-1)
    return weights / weights.sum(), experts


def argmax_of_logits(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return logits.softmax(-1).amax(-1), logits.argmax(-1)


def rounded_argmax(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.softmax(-1).bfloat16().float()
    return scores.amax(-1), scores.argmax(-1)


STABLE: dict[str, Router] = {
    "argmax": by_argmax,
    "argmax with a bias": by_biased_argmax,
    "max": by_max,
    "one-hot": by_one_hot,
    "sort": biased(stable),
    "argsort": biased(lambda x: torch.argsort(x, dim=-1, descending=True, stable=True)),
    "ascending": biased(lambda x: torch.argsort(-x, dim=-1, stable=True)),
    "narrowed": biased(lambda x: torch.sort(x, descending=True, stable=True).indices.narrow(-1, 0, K)),
    "widened logits": biased(stable, lambda logits: logits.bfloat16().float().sigmoid()),
    "no bias": without_bias,
    "shares": shares,
}


@pytest.mark.parametrize("router", STABLE.values(), ids=STABLE)
def test_a_stable_sort_chooses_as_the_operator(router: Router):
    assert names(routed(router).fused).count(GATING) == 1


LEFT: dict[str, tuple[Router, str]] = {
    "in groups": (in_groups, "keeps equal scores in order without groups"),
    "rounded": (biased(stable, lambda x: x.sigmoid().bfloat16().float()), "a stable sort of scores in bfloat16"),
    "in float64": (biased(stable, lambda x: x.double().sigmoid()), "a stable sort of scores in float64"),
    "of logits": (of_logits, "a stable sort of logits"),
    "argmax of logits": (argmax_of_logits, "chosen by argmax of logits"),
    "argmax of rounded scores": (rounded_argmax, "by argmax of scores in bfloat16"),
}


def test_weights_that_are_divided_among_tokens_keep_the_division():
    assert "aten.div.Tensor" in names(routed(over_tokens).fused)


@pytest.mark.parametrize(("router", "reason"), LEFT.values(), ids=LEFT)
def test_an_order_that_the_operator_may_not_keep_is_left(router: Router, reason: str):
    trial = routed(router)
    assert not any(name.startswith("npu.") for name in names(trial.fused))
    assert any(reason in each.reason for each in trial.outcome.refusals)


@pytest.mark.parametrize(
    "order",
    [lambda x: x.argsort(-1, descending=True), lambda x: (-x).argsort(-1), lambda x: x.topk(K, sorted=False)[1]],
    ids=["argsort", "ascending", "topk"],
)
def test_a_sort_that_is_not_stable_leaves_equals_open(order: Callable[[Tensor], Tensor]):
    inputs = torch.randn(TOKENS, EXPERTS), torch.randn(EXPERTS)
    assert names(trial_of(capture(biased(order), inputs), NPU).fused).count(GATING) == 1
