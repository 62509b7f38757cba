"""A router's list of experts is read as one; what only looks like it is refused with its reason, or is no router."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.graphs import fused, names, numbers, read_graph, replay, traced
from tests.moe.expert_gating import GATING, biased_softmax, inputs, unbiased, undivided

TOKENS, EXPERTS, GROUPS, SIZE, KEPT, COUNT = 6, 32, 8, 4, 3, 5
ENDS = -torch.inf
WORDS = {"expert_choice", "chosen_scores"}


def two(choice: Tensor, groups: int = GROUPS) -> Tensor:
    return choice.unflatten(-1, (groups, -1)).topk(2, dim=-1)[0].sum(-1)


def out(best: Tensor, columns: int = 0) -> Tensor:
    """True for groups that are not chosen."""
    flags = torch.ones(*best.shape[:-1], columns or best.shape[-1], dtype=torch.bool)
    return flags.scatter(-1, best.topk(KEPT, dim=-1)[1], False)


def spread(flags: Tensor, size: int = SIZE) -> Tensor:
    return flags.unsqueeze(-1).expand(*flags.shape, size).flatten(-2)


def routed(hide: Callable[..., Any], fill: float = ENDS, scores: Callable[..., Any] = torch.sigmoid):
    """A router whose scores are filled where `hide` says."""

    def router(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        share = scores(logits)
        choice = share + bias
        experts = choice.masked_fill(hide(choice), fill).topk(COUNT, dim=-1)[1]
        return share.gather(-1, experts), experts

    return router


def pairs_of_tokens(choice: Tensor) -> Tensor:
    return spread(out(two(choice.view(TOKENS // 2, 2 * EXPERTS))), 2 * SIZE).view(TOKENS, EXPERTS)


def columns_of_two_tokens(choice: Tensor) -> Tensor:
    best = two(choice.view(TOKENS // 2, 2 * EXPERTS))
    return spread(out(best, 2 * GROUPS)).view(TOKENS, EXPERTS)


def of_two_lists(choice: Tensor) -> Tensor:
    first = out(two(choice))
    second = two(choice).topk(KEPT + 1, dim=-1)[1]
    return spread(first.scatter(-1, second, False))


def groups_beside_groups(choice: Tensor) -> Tensor:
    flags = out(two(choice)).float()
    return (flags[:, :, None] == flags[:, None, :])[:, :, :SIZE].flatten(1)


def weighed(factor: float, shift: float):
    def router(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits.softmax(-1)
        kept = spread(~out(scores.unflatten(-1, (GROUPS, -1)).amax(-1))).to(scores.dtype) * factor + shift
        return (scores * kept).topk(COUNT, dim=-1)

    return router


def lowered(fill: float, kept: float):
    """A router that adds numbers to the scores of groups."""

    def router(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits.sigmoid()
        choice = (scores + bias).unflatten(-1, (GROUPS, -1))
        best = choice.topk(2, dim=-1)[0].sum(-1).topk(KEPT, dim=-1)[1]
        mask = torch.full((TOKENS, GROUPS), fill).scatter(-1, best, kept)
        experts = (choice + mask.unsqueeze(-1)).flatten(1).topk(COUNT, dim=-1)[1]
        return scores.gather(-1, experts), experts

    return router


def shared_scores_lowered(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits[:1].softmax(-1)
    mask = torch.where(out(two(logits)), ENDS, 0.0)
    return (scores.unflatten(-1, (GROUPS, -1)) + mask.unsqueeze(-1)).flatten(1).topk(COUNT, dim=-1)


def before(best: Tensor) -> Tensor:
    """True for groups that stand before one that is listed."""
    return (best.topk(KEPT, dim=-1)[1][:, None, :] < torch.arange(GROUPS)[:, None]).any(-1)


def weights_of_biased_logits(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    experts = (logits + bias).topk(COUNT, dim=-1)[1]
    return logits.gather(-1, experts).sigmoid(), experts


def weights_of_moved_logits(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    experts = (logits + logits[:, :1] * bias).topk(COUNT, dim=-1)[1]
    return logits.gather(-1, experts).sigmoid(), experts


def weights_of_other_numbers(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    experts = (logits + bias).topk(COUNT, dim=-1)[1]
    return logits.exp().gather(-1, experts), experts


def chosen_by_counts(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    counts = (8 * logits).int()
    experts = (counts + (8 * bias).int()).topk(COUNT, dim=-1)[1]
    return counts.gather(-1, experts), experts


def weights_of_logits(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    experts = (logits.sigmoid() + bias).topk(COUNT, dim=-1)[1]
    return logits.gather(-1, experts).softmax(-1), experts


def weights_elsewhere(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    experts = (scores + bias).topk(COUNT, dim=-1)[1]
    return scores.gather(-1, experts.flip(0)), experts


def weights_of_logits_alone(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    experts = logits.sigmoid().topk(COUNT, dim=-1)[1]
    return logits.gather(-1, experts).softmax(-1), experts


def weights_without_fractions(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    experts = (scores + bias).topk(COUNT, dim=-1)[1]
    return scores.int().float().gather(-1, experts), experts


def scores_without_fractions(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid().int().float()
    experts = (scores + bias).topk(COUNT, dim=-1)[1]
    return scores.gather(-1, experts), experts


def shared_scores(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The scores of one token, of which each token hides groups of its own."""
    scores = logits[:1].sigmoid()
    choice = torch.where(spread(out(two(logits))), ENDS, scores)
    return choice.topk(COUNT, dim=-1)


def shared_scores_times_groups(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits[:1].softmax(-1)
    return (scores * spread(~out(two(logits))).to(scores.dtype)).topk(COUNT, dim=-1)


def one_score_of_each_token(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return (logits[:, :1].sigmoid() + bias).topk(COUNT, dim=-1)


def columns_of_as_many(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Four groups of four experts, each scored by the best of a column of experts."""
    router = routed(lambda choice: spread(out(choice.unflatten(-1, (SIZE, -1)).amax(1))))
    return router(logits[:, : SIZE * SIZE], bias[: SIZE * SIZE])


def filled_with_others(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    choice = logits.sigmoid() + bias
    return torch.where(spread(out(two(choice))), logits, choice).topk(COUNT, dim=-1)


def four(scores: Tensor) -> Tensor:
    """The first experts, in as many groups as a group has experts."""
    return scores[..., : SIZE * SIZE]


def columns_for_groups(expanded: bool):
    """As many columns as groups: of those the best are chosen, of these the others hidden."""

    def router(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        scores = four(logits).sigmoid()
        choice = scores + four(bias)
        flags = out(two(choice, SIZE)).unsqueeze(1)
        if expanded:
            experts = choice.masked_fill(flags.expand(-1, SIZE, -1).flatten(1), ENDS).topk(COUNT, dim=-1)[1]
        else:
            experts = choice.unflatten(-1, (SIZE, SIZE)).masked_fill(flags, ENDS).flatten(1).topk(COUNT, dim=-1)[1]
        return scores.gather(-1, experts), experts

    return router


def best_of_both(choice: Tensor) -> Tensor:
    """Two groups, of which the best experts are added, and the second best."""
    best = choice.unflatten(-1, (2, -1)).topk(2, dim=-1)[0].sum(1)
    flags = torch.ones(TOKENS, 2, dtype=torch.bool).scatter(-1, best.topk(1, dim=-1)[1], False)
    return spread(flags, EXPERTS // 2)


def chosen_by_whole_numbers(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    experts = (scores.int() + (8 * bias).int()).topk(COUNT, dim=-1)[1]
    return scores.gather(-1, experts), experts


def read(router: Callable[..., Any]) -> tuple[set[str], list[str]]:
    graph = read_graph(traced(router, numbers(TOKENS, EXPERTS), numbers(EXPERTS, seed=1)).graph)
    words = {each.op for _, each in graph.readings} & WORDS
    return words, [each.reason for _, each in graph.readings.missed("expert_routing")]


def gate(router: Callable[..., Any]) -> Any:
    graph = read_graph(traced(router, numbers(TOKENS, EXPERTS), numbers(EXPERTS, seed=1)).graph)
    ((_, found),) = graph.readings.all("expert_choice")
    return found.captures


OTHERS = {
    "groups of two tokens": (routed(pairs_of_tokens), "they are not runs of neighbouring experts"),
    "more flags than groups": (routed(columns_of_two_tokens), "they are not runs of neighbouring experts"),
    "two lists": (routed(of_two_lists), "filled are not proven"),
    "a list beside scores": (
        routed(lambda choice: spread(out(two(choice))).float() > choice), "filled are not proven",
    ),
    "groups of groups": (routed(lambda choice: spread(spread(out(two(choice, 4)), 2))), "filled are not proven"),
    "groups beside groups": (routed(groups_beside_groups), "filled are not proven"),
    "experts that are listed": (routed(lambda choice: out(choice)), "filled are not proven"),
    "groups by their best three": (
        routed(lambda choice: spread(out(choice.unflatten(-1, (GROUPS, -1)).topk(3, dim=-1)[0].sum(-1)))),
        "not chosen by the largest",
    ),
    "groups by less than their best": (routed(lambda choice: spread(out(-two(choice)))), "not chosen by the largest"),
    "groups by the second of their best": (
        routed(lambda choice: spread(out(choice.unflatten(-1, (GROUPS, -1)).topk(2, dim=-1)[0].amin(-1)))),
        "not chosen by the largest",
    ),
    "groups of two by their squares": (
        routed(lambda choice: spread(out(choice.unflatten(-1, (-1, 2)).square().sum(-1)), 2)),
        "not chosen by the largest",
    ),
    "groups by each of their best two": (
        routed(lambda choice: spread(out(choice.unflatten(-1, (GROUPS, -1)).topk(2, dim=-1)[0].flatten(1)), 2)),
        "not chosen by the largest",
    ),
    "groups by nothing": (
        routed(lambda choice: spread(out(torch.ones(TOKENS, GROUPS)))), "not chosen by the largest",
    ),
    "groups by columns of as many": (columns_of_as_many, "not chosen by the largest"),
    "groups by their columns": (
        routed(lambda choice: spread(out(choice.unflatten(-1, (SIZE, -1)).topk(2, dim=1)[0].sum(1)))),
        "not chosen by the largest",
    ),
    "groups that are passed in": (
        routed(
            lambda choice: spread(torch.ones(TOKENS, GROUPS, dtype=torch.bool).scatter(1, choice[:, :3].long(), False))
        ),
        "not the top-k of one score for each group",
    ),
    "the groups that are kept": (routed(lambda choice: ~spread(out(two(choice)))), "that are filled are not those"),
    "weighed groups": (weighed(1.0, 0.5), "multiplied by other numbers"),
    "doubled groups": (weighed(2.0, 0.0), "multiplied by other numbers"),
    "a softmax over tokens": (
        routed(lambda choice: spread(out(two(choice))), scores=lambda logits: logits.softmax(0)),
        "the top-k is of something else than sigmoid",
    ),
    "weights of logits": (weights_of_logits, "they are not the scores of the chosen"),
    "weights of logits, without a bias": (weights_of_logits_alone, "they are not the scores of the chosen"),
    "weights without fractions": (weights_without_fractions, "they are not the scores of the chosen"),
    "scores without fractions": (scores_without_fractions, "the top-k is of something else than sigmoid"),
    "logits plus a bias": (weights_of_biased_logits, "the top-k is of something else than sigmoid"),
    "logits of one token plus a bias": (
        lambda logits, bias: weights_of_biased_logits(logits[:1], bias), "the top-k is of something else than sigmoid",
    ),
    "logits plus a bias of each token": (weights_of_moved_logits, None),
    "logits plus a bias, weights of others": (weights_of_other_numbers, None),
    "groups that are compared otherwise": (
        routed(lambda choice: spread(before(two(choice)))), "filled are not proven",
    ),
    "groups lowered by a number": (lowered(-1e4, 0.0), "other numbers than 0 and -inf"),
    "groups raised by a number": (lowered(ENDS, 1.0), "other numbers than 0 and -inf"),
    "groups of one token lowered": (shared_scores_lowered, None),
    "weights of other places": (weights_elsewhere, "they are not the scores of the chosen"),
    "columns for groups": (columns_for_groups(expanded=False), "filled are not proven"),
    "columns for groups, expanded": (columns_for_groups(expanded=True), "filled are not proven"),
    "two groups by the best of both": (routed(best_of_both), "not chosen by the largest"),
    "hidden by a bound": (routed(lambda choice: choice < 0.2), None),
    "hidden by one that is listed": (
        routed(lambda choice: choice < choice.gather(-1, (-choice).topk(3, dim=-1)[1][:, -1:])), None,
    ),
    "scores in whole numbers": (chosen_by_whole_numbers, None),
    "counts plus a bias": (chosen_by_counts, None),
    "scores of one token": (shared_scores, None),
    "scores of one token, times groups": (shared_scores_times_groups, None),
    "one score of each token": (one_score_of_each_token, None),
    "filled with logits": (filled_with_others, None),
    "no router at all": (lambda logits, bias: (logits + bias).topk(COUNT), None),
    "a softmax alone": (lambda logits, bias: logits.softmax(-1).topk(COUNT), None),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.rotates(6)
def test_what_looks_like_a_router_is_none(name: str):
    router, reason = OTHERS[name]
    words, reasons = read(router)
    assert not words
    assert any(reason in each for each in reasons) if reason else not reasons


def test_groups_are_read_with_what_they_are_chosen_by():
    found = gate(routed(lambda choice: spread(out(two(choice)))))
    assert [found[each] for each in ("norm", "groups", "kept", "group_score", "count")] == ["sigmoid", 8, 3, "sum", 5]
    assert found["bias"].shape == (EXPERTS,)


def test_what_is_filled_does_not_matter_where_all_groups_are_chosen():
    def hide(choice: Tensor) -> Tensor:
        flags = torch.ones(TOKENS, 2, dtype=torch.bool).scatter(-1, two(choice, 2).topk(2, dim=-1)[1], False)
        return spread(flags, EXPERTS // 2)

    found = gate(routed(hide, 0.0))
    assert (found["groups"], found["kept"]) == (1, 1)


def test_groups_that_are_lowered_by_infinity_are_hidden():
    found = gate(lowered(ENDS, 0.0))
    assert [found[each] for each in ("norm", "groups", "kept", "group_score")] == ["sigmoid", 8, 3, "sum"]


def test_scores_may_be_arranged_in_batches_behind_the_sigmoid():
    def router(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits.sigmoid().view(2, 3, EXPERTS)
        experts = (scores + bias).topk(COUNT, dim=-1)[1]
        return scores.gather(-1, experts), experts

    assert gate(router)["logits"].shape == (2, 3, EXPERTS)


def test_rows_of_scores_of_other_experts_are_none():
    def router(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits.softmax(-1).view(TOKENS * 2, EXPERTS // 2)
        experts = (scores + bias[: EXPERTS // 2]).topk(COUNT, dim=-1)[1]
        return scores.gather(-1, experts), experts

    words, reasons = read(router)
    assert not words
    assert len(reasons) == 1


@pytest.mark.parametrize("form", [OTHERS["weights of logits"][0], lowered(-1e4, 0.0), routed(out)])
def test_a_router_is_told_of_as_a_router_alone(form: Callable[..., Any]):
    _, outcome = fused(form, numbers(TOKENS, EXPERTS), numbers(EXPERTS, seed=1))
    assert {each.rule for each in outcome.refusals} == {"expert_routing"}


def test_groups_times_0_are_those_filled_with_0():
    router = weighed(1.0, 0.0)
    assert gate(router)["group_score"] == "max"
    logits = numbers(TOKENS, EXPERTS)
    gm, _ = fused(lambda logits: router(logits, logits), logits)
    assert "npu.npu_moe_gating_top_k.default" in names(gm)
    wanted = router(logits.double(), logits)
    for got, exact in zip(replay(gm, logits), wanted, strict=True):
        torch.testing.assert_close(got.double(), exact.double())


def test_weights_and_lists_are_read_in_dtypes_of_their_own_kind():
    def router(logits: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        scores = logits.sigmoid()
        experts = (scores + bias).topk(COUNT, dim=-1)[1]
        weights = scores.gather(-1, experts)
        return weights.bfloat16(), weights.int() * 3, experts.int(), experts.float()

    graph = read_graph(traced(router, numbers(TOKENS, EXPERTS), numbers(EXPERTS, seed=1)).graph)
    read = {word: {found.captures["dtype"] for _, found in graph.readings.all(word)} for word in WORDS}
    assert read == {
        "expert_choice": {torch.int64, torch.int32},
        "chosen_scores": {torch.float32, torch.bfloat16},
    }


def test_a_cast_of_other_numbers_is_no_list():
    def router(logits: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        scores, experts = logits.sigmoid().topk(COUNT)
        return scores / scores.sum(-1, keepdim=True), experts.int(), bias.int(), bias.half()

    graph = read_graph(traced(router, numbers(TOKENS, EXPERTS), numbers(EXPERTS, seed=1)).graph)
    for word, op in (("expert_choice", "largest_index"), ("chosen_scores", "largest")):
        assert {each.below("cast").op for each, _ in graph.readings.all(word)} == {op}


@pytest.mark.parametrize(("router", "gathers"), [(unbiased, 0), (biased_softmax, 0), (undivided, 1)])
def test_weights_are_those_of_the_model_in_as_few_calls_as_the_operator_allows(
    router: Callable[..., Tensor], gathers: int
):
    logits, bias = (each.float() for each in inputs(2, 3))
    gm, _ = fused(router, logits, bias)
    called = names(gm)
    assert called.count(f"{GATING.replace('::', '.')}.default") == 1
    assert called.count("aten.gather.default") == gathers
    used = (logits, bias)[: len(gm.graph.find_nodes(op="placeholder"))]
    torch.testing.assert_close(replay(gm, *used)[0], router(logits, bias), rtol=1e-5, atol=1e-6)
