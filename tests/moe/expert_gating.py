"""Routers with a correction bias, groups, or sigmoid scores, as people write them: the weight of every expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.corpus.base import Form, LookAlike, Spelling, generator, look_alike, wide

GATING = "npu::npu_moe_gating_top_k"
EXPERTS, GROUPS, KEPT, CHOSEN, FACTOR = 32, 8, 4, 6, 2.5
SIZE = EXPERTS // GROUPS
LOWEST = float("-inf")


def dense(logits: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """The weight of every expert, 0 where it is not chosen."""
    return torch.zeros_like(logits, dtype=weights.dtype).scatter(-1, experts.long(), weights).to(logits.dtype)


# with groups --------------------------------------------------------------------------------------------------------


def scattered_mask(logits, bias, fill=LOWEST, groups=GROUPS, kept=KEPT):
    scores = logits.to(wide(logits.dtype)).sigmoid()
    choice = scores.view(-1, EXPERTS) + bias.unsqueeze(0)
    best = choice.view(-1, groups, EXPERTS // groups).topk(2, dim=-1)[0].sum(dim=-1)
    listed = torch.topk(best, k=kept, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(best)
    mask.scatter_(1, listed, 1)
    mask = mask.unsqueeze(-1).expand(-1, groups, EXPERTS // groups).reshape(-1, EXPERTS)
    choice = choice.masked_fill(~mask.bool(), fill)
    experts = torch.topk(choice, k=CHOSEN, dim=-1, sorted=False)[1]
    weights = scores.gather(1, experts)
    weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
    return dense(logits, experts, weights * FACTOR)


def one_group(logits, bias):
    return scattered_mask(logits, bias, groups=1, kept=1)


def all_groups(logits, bias):
    return scattered_mask(logits, bias, fill=0.0, kept=GROUPS)


def flags_of_others(logits, bias):
    scores = logits.sigmoid()
    original = scores
    scores = scores + bias
    scores = scores.view(logits.size(0), GROUPS, -1)
    listed = scores.topk(2, dim=-1)[0].sum(dim=-1).topk(KEPT, dim=-1)[1]
    mask = scores.new_ones(logits.size(0), GROUPS, dtype=torch.bool).scatter_(1, listed, False)
    scores = scores.masked_fill_(mask.unsqueeze(-1), LOWEST).flatten(1)
    experts = torch.topk(scores, CHOSEN, dim=-1)[1]
    weights = original.gather(1, experts)
    weights /= weights.sum(dim=-1, keepdim=True)
    weights *= FACTOR
    return dense(logits, experts, weights.type_as(logits))


def kept_by_where(logits, bias):
    scores = torch.sigmoid(logits.to(wide(logits.dtype)))
    choice = scores + bias[None]
    best = choice.unflatten(-1, (GROUPS, SIZE)).topk(2).values.sum(-1)
    mask = torch.zeros(best.shape, dtype=torch.int64).scatter(-1, best.topk(KEPT).indices, 1)
    mask = mask.repeat_interleave(SIZE, dim=-1)
    experts = torch.where(mask > 0, choice, LOWEST).topk(CHOSEN).indices.to(torch.int32)
    weights = torch.take_along_dim(scores, experts.long(), dim=-1)
    return dense(logits, experts, FACTOR * weights / weights.sum(-1, keepdim=True))


def less_than_a_mask(logits, bias):
    scores = logits.to(wide(logits.dtype)).sigmoid()
    choice = bias + scores
    best = choice.reshape(-1, GROUPS, SIZE).topk(2, dim=-1).values.sum(-1)
    mask = 1 - torch.zeros_like(best).scatter(-1, best.topk(KEPT, dim=-1).indices, 1.0)
    hidden = mask[:, :, None].expand(-1, -1, SIZE).flatten(1) == 1
    experts = choice.masked_fill(hidden, LOWEST).topk(CHOSEN, dim=-1).indices
    weights = scores.gather(-1, experts)
    return dense(logits, experts, weights * (weights.sum(-1, keepdim=True) + 1e-20).reciprocal() * FACTOR)


def best_of_groups(logits, bias):
    scores = logits.to(wide(logits.dtype)).sigmoid()
    choice = scores + bias
    listed = choice.view(-1, GROUPS, SIZE).amax(-1).topk(KEPT, dim=-1)[1]
    mask = torch.ones(listed.shape[0], GROUPS, dtype=torch.bool).scatter(1, listed, False)
    experts = choice.view(-1, GROUPS, SIZE).masked_fill(mask[..., None], LOWEST).flatten(-2).topk(CHOSEN)[1]
    weights = scores.gather(1, experts)
    return dense(logits, experts, weights / (weights.sum(-1, keepdim=True) + 1e-20) * FACTOR)


def _limited(logits, weigh: Callable[..., Any]):
    """Softmax, the best expert of each group, other groups weighed."""
    scores = logits.softmax(dim=-1, dtype=wide(logits.dtype))
    listed = torch.topk(scores.view(-1, GROUPS, SIZE).max(dim=-1).values, k=KEPT, dim=-1, sorted=False)[1]
    mask = torch.zeros(listed.shape[0], GROUPS, dtype=scores.dtype).scatter_(1, listed, 1)
    mask = mask.unsqueeze(-1).expand(-1, GROUPS, SIZE).reshape(-1, EXPERTS)
    weights, experts = torch.topk(weigh(scores, mask), k=CHOSEN, dim=-1, sorted=False)
    return dense(logits, experts, weights * FACTOR)


def one_hot_of_groups(logits, bias):
    def hide(best):
        kept = F.one_hot(best.topk(KEPT, dim=-1).indices, num_classes=GROUPS).sum(dim=1)
        return (kept == 0).repeat_interleave(SIZE, dim=1)

    return _grouped(logits, bias, lambda choice, best: choice.masked_fill(hide(best), LOWEST))


def compared_groups(logits, bias):
    def hide(best):
        listed = best.topk(KEPT, dim=-1)[1]
        kept = (torch.arange(GROUPS)[None, :, None] == listed[:, None, :]).any(-1)
        return (~kept)[..., None].expand(-1, -1, SIZE).flatten(1)

    return _grouped(logits, bias, lambda choice, best: choice.masked_fill(hide(best), LOWEST))


def groups_put(logits, bias):
    def keep(best):
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept[torch.arange(best.shape[0])[:, None], best.topk(KEPT, dim=-1)[1]] = True
        return kept.repeat_interleave(SIZE, dim=-1)

    return _grouped(logits, bias, lambda choice, best: torch.where(keep(best), choice, LOWEST))


def lowered_groups(logits, bias):
    def lower(choice, best):
        mask = torch.full_like(best, LOWEST).scatter(1, best.topk(KEPT, dim=-1)[1], 0.0)
        return (choice.view(-1, GROUPS, SIZE) + mask[..., None]).flatten(1)

    return _grouped(logits, bias, lower)


def _grouped(logits, bias, hide: Callable[..., Any]):
    """Sigmoids with a bias, groups by their two best; weights by an index of the own row."""
    scores = logits.to(wide(logits.dtype)).sigmoid()
    choice = scores + bias
    best = choice.view(-1, GROUPS, SIZE).topk(2, dim=-1)[0].sum(-1)
    experts = hide(choice, best).topk(CHOSEN, dim=-1)[1]
    weights = scores[torch.arange(scores.shape[0])[:, None], experts]
    return dense(logits, experts, weights / (weights.sum(-1, keepdim=True) + 1e-20) * FACTOR)


def softmax_times_one_hot(logits, bias):
    scores = logits.softmax(dim=-1, dtype=wide(logits.dtype))
    runs = scores.view(-1, GROUPS, SIZE)
    kept = F.one_hot(runs.amax(-1).topk(KEPT).indices, GROUPS).sum(1).to(scores.dtype)
    weights, experts = (runs * kept[..., None]).flatten(1).topk(CHOSEN)
    return dense(logits, experts, weights * FACTOR)


def softmax_filled_with_0(logits, bias):
    return _limited(logits, lambda scores, mask: scores.masked_fill(~mask.bool(), 0.0))


def softmax_times_a_mask(logits, bias):
    return _limited(logits, lambda scores, mask: scores * mask)


# without ------------------------------------------------------------------------------------------------------------


def biased(logits, bias):
    scores = torch.sigmoid(logits.to(wide(logits.dtype)))
    _, experts = torch.topk(scores + bias, CHOSEN, dim=-1, sorted=False)
    weights = scores.gather(1, experts)
    weights /= weights.sum(dim=-1, keepdim=True)
    return dense(logits, experts, weights)


def biased_in_its_dtype(logits, bias):
    scores = logits.sigmoid()
    experts = torch.topk(scores + bias, k=CHOSEN, dim=-1)[1]
    weights = torch.gather(scores, dim=1, index=experts).type_as(logits)
    weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-6)
    return dense(logits, experts, weights * FACTOR)


def unbiased(logits, bias):
    scores, experts = logits.to(wide(logits.dtype)).sigmoid().topk(CHOSEN, dim=-1)
    return dense(logits, experts, scores / scores.sum(-1, keepdim=True))


def undivided(logits, bias):
    scores = logits.to(wide(logits.dtype)).sigmoid()
    experts = (scores + bias).view(-1, GROUPS, SIZE)
    listed = experts.topk(2, dim=-1)[0].sum(-1).topk(KEPT, dim=-1)[1]
    mask = torch.ones(listed.shape[0], GROUPS, dtype=torch.bool).scatter(1, listed, False)
    experts = experts.masked_fill(mask[..., None], LOWEST).flatten(1).topk(CHOSEN)[1]
    return dense(logits, experts, scores.gather(1, experts) * FACTOR)


def biased_softmax(logits, bias):
    scores = logits.to(wide(logits.dtype)).softmax(dim=-1)
    experts = torch.topk(scores + bias.unsqueeze(0), k=CHOSEN, dim=-1, sorted=False)[1]
    return dense(logits, experts, scores.gather(1, experts) * FACTOR)


def biased_softmax_divided(logits, bias):
    scores = F.softmax(logits, dim=1, dtype=wide(logits.dtype))
    experts = torch.topk(scores + bias.reshape(1, -1).squeeze(0), CHOSEN, dim=-1)[1]
    weights = torch.gather(scores, dim=-1, index=experts)
    return dense(logits, experts, weights / torch.clamp(weights.sum(dim=-1, keepdim=True), min=1e-12))


# look-alikes --------------------------------------------------------------------------------------------------------


def filled_with_0(logits, bias):
    return scattered_mask(logits, bias, fill=0.0)


def filled_with_a_low_number(logits, bias):
    return scattered_mask(logits, bias, fill=-1.0)


def _chosen(logits, bias, best, hide=None, weigh=None):
    scores = logits.to(wide(logits.dtype)).sigmoid()
    choice = scores + bias
    listed = best(scores, choice).topk(KEPT, dim=-1)[1]
    flags = torch.ones(listed.shape[0], GROUPS, dtype=torch.bool).scatter(1, listed, False)
    hidden = hide(flags) if hide else flags[..., None].expand(-1, -1, SIZE).flatten(1)
    choice = choice.masked_fill(hidden, LOWEST)
    experts = choice.topk(CHOSEN, dim=-1)[1]
    weights = (weigh or (lambda choice: scores))(choice).gather(-1, experts)
    return dense(logits, experts, weights / weights.sum(dim=-1, keepdim=True))


def _two(scores, choice):
    return choice.view(-1, GROUPS, SIZE).topk(2, dim=-1)[0].sum(-1)


def best_three(logits, bias):
    return _chosen(logits, bias, lambda scores, choice: choice.view(-1, GROUPS, SIZE).topk(3, dim=-1)[0].sum(-1))


def groups_without_bias(logits, bias):
    return _chosen(logits, bias, _without)


def _without(scores, choice):
    return _two(choice, scores)


def alternate_groups(logits, bias):
    return _chosen(
        logits,
        bias,
        lambda scores, choice: choice.view(-1, SIZE, GROUPS).transpose(1, 2).topk(2, dim=-1)[0].sum(-1),
        lambda flags: flags[:, None].expand(-1, SIZE, -1).flatten(1),
    )


def other_groups(logits, bias):
    return _chosen(logits, bias, _two, lambda flags: ~flags[..., None].expand(-1, -1, SIZE).flatten(1))


def weights_with_bias(logits, bias):
    return _chosen(logits, bias, _two, weigh=lambda choice: choice)


def bias_of_tokens(logits, bias):
    scores = logits.to(wide(logits.dtype)).sigmoid()
    choice = (scores + bias * logits[:, :1]).view(-1, GROUPS, SIZE)
    listed = choice.topk(2, dim=-1)[0].sum(-1).topk(KEPT, dim=-1)[1]
    mask = torch.ones(listed.shape[0], GROUPS, dtype=torch.bool).scatter(1, listed, False)
    experts = choice.masked_fill(mask[..., None], LOWEST).flatten(1).topk(CHOSEN)[1]
    weights = scores.gather(1, experts)
    return dense(logits, experts, weights / weights.sum(-1, keepdim=True))


def raised_groups(logits, bias):
    def lower(choice, best):
        mask = torch.full_like(best, -0.25).scatter(1, best.topk(KEPT, dim=-1)[1], 0.0)
        return (choice.view(-1, GROUPS, SIZE) + mask[..., None]).flatten(1)

    return _grouped(logits, bias, lower)


def one_group_of_each_pair(logits, bias):
    """Groups that are listed once, of two lists in one."""

    def hide(choice, best):
        listed = torch.cat([best.topk(KEPT, dim=-1)[1], best.topk(KEPT // 2, dim=-1)[1]], dim=-1)
        return choice.masked_fill((F.one_hot(listed, GROUPS).sum(1) != 1).repeat_interleave(SIZE, 1), LOWEST)

    return _grouped(logits, bias, hide)


def groups_beside_those_chosen(logits, bias):
    def hide(choice, best):
        listed = best.topk(KEPT, dim=-1)[1]
        kept = (torch.arange(1, GROUPS + 1)[:, None] == listed[:, None, :]).any(-1)
        return choice.masked_fill((~kept).repeat_interleave(SIZE, 1), LOWEST)

    return _grouped(logits, bias, hide)


def sigmoids_of_chosen_logits(logits, bias):
    values, experts = logits.to(wide(logits.dtype)).topk(CHOSEN, dim=-1)
    weights = values.sigmoid()
    return dense(logits, experts, weights / weights.sum(-1, keepdim=True))


# what they mean -----------------------------------------------------------------------------------------------------


def routed(
    logits: Tensor,
    bias: Tensor | None = None,
    kept: int = KEPT,
    two: bool = True,
    softmax: bool = False,
    eps: float | None = 1e-20,
    factor: float = FACTOR,
) -> Tensor:
    """Float64, token by token: the weight of every expert; eps None for weights that are not divided by their sum."""
    rows = []
    for row in logits.reshape(-1, EXPERTS):
        scores = row.exp() / row.exp().sum() if softmax else 1 / (1 + (-row).exp())
        choice = scores if bias is None else scores + bias
        best = choice.reshape(GROUPS, SIZE).sort(-1, descending=True).values[:, : 1 + two].sum(-1)
        worst = best.sort(descending=True).values[kept - 1]
        allowed = torch.where((best >= worst).repeat_interleave(SIZE), choice, LOWEST)
        chosen = allowed >= allowed.sort(descending=True).values[CHOSEN - 1]
        weights = torch.where(chosen, scores, 0.0)
        rows.append(factor * (weights if eps is None else weights / (weights.sum() + eps)))
    return torch.stack(rows).reshape(logits.shape)


def _margin(choice: Tensor, two: bool, kept: int) -> float:
    """How far the last that is chosen lies from the first that is not, of groups and of experts."""
    best = choice.reshape(GROUPS, SIZE).sort(-1, descending=True).values[:, : 1 + two].sum(-1)
    order = best.sort(descending=True).values
    allowed = torch.where((best >= order[kept - 1]).repeat_interleave(SIZE), choice, LOWEST)
    experts = allowed.sort(descending=True).values
    gap = (order[kept - 1] - order[kept]).item() if kept < GROUPS else 1.0
    return min(gap, (experts[CHOSEN - 1] - experts[CHOSEN]).item())


def _is_clear(row: Tensor, bias: Tensor) -> bool:
    """Whether bfloat16 chooses the same of every kind of scores."""
    scores, shares = row.sigmoid(), row.softmax(-1)
    kinds = [(scores + bias, two, kept) for two in (True, False) for kept in (KEPT, GROUPS)]
    kinds += [(scores, True, GROUPS), (shares + bias, True, GROUPS)]
    return all(_margin(*each) > 0.006 for each in kinds) and _margin(shares, False, KEPT) > 1e-5


def inputs(B: int, S: int) -> tuple[Tensor, Tensor]:
    """Logits [B · S, E] of which it is clear what is chosen, and a bias [E] that makes some choices negative."""
    draw = generator(37)
    bias = (torch.rand(EXPERTS, generator=draw, dtype=torch.float64) * 16).round() / 16 - 0.75
    rows: list[Tensor] = []
    while len(rows) < B * S:
        row = torch.randperm(EXPERTS, generator=draw).to(torch.float64) / 4 - 4
        rows += [row] if _is_clear(row, bias) else []
    return torch.stack(rows), bias


def _spelling(form: Form, note: str, **meaning: Any) -> Spelling:
    with_bias = meaning.pop("biased", True)

    def make(dtype: torch.dtype, B: int, S: int):
        logits, bias = inputs(B, S)
        return form, (logits.to(dtype), bias.to(wide(dtype)))

    def expected(dtype: torch.dtype, B: int, S: int) -> tuple[Tensor, ...]:
        logits, bias = inputs(B, S)
        return (routed(logits, bias if with_bias else None, **meaning),)

    return Spelling(f"expert_gating/{form.__name__}", "expert_gating", make, {GATING: 1}, expected, note)


def _lower(B: int, S: int) -> tuple[Tensor, Tensor]:
    """The same with a bias that makes all scores negative."""
    logits, bias = inputs(B, S)
    return logits, bias - 2.5


def _other(form: Form, reason: str, given: Callable[[int, int], tuple[Tensor, ...]] = inputs) -> LookAlike:
    return look_alike("expert_gating", form, reason, (GATING,), given, lambda logits, bias: routed(logits, bias))


SPELLINGS = (
    _spelling(scattered_mask, "transformers: DeepSeek-V3, GLM-4.5, Kimi, dots; SGLang; vLLM"),
    _spelling(one_group, "the same with n_group = 1", kept=GROUPS),
    _spelling(all_groups, "all groups chosen: nothing is filled", kept=GROUPS),
    _spelling(flags_of_others, "DeepSeek-V3's inference code, sigmoid in the dtype of the logits"),
    _spelling(kept_by_where, "where with the kept groups, a list in int32"),
    _spelling(less_than_a_mask, "one minus a mask, compared; times the reciprocal"),
    _spelling(best_of_groups, "groups by their best expert", two=False),
    _spelling(one_hot_of_groups, "a sum of one_hot"),
    _spelling(compared_groups, "groups compared with those that are listed"),
    _spelling(groups_put, "a mask that is written at places"),
    _spelling(lowered_groups, "-inf added to other groups"),
    _spelling(softmax_times_one_hot, "a product with it", biased=False, two=False, softmax=True, eps=None),
    _spelling(softmax_filled_with_0, "transformers: DeepSeek-V2", biased=False, two=False, softmax=True, eps=None),
    _spelling(softmax_times_a_mask, "the same by a product", biased=False, two=False, softmax=True, eps=None),
    _spelling(biased, "transformers: MiniMax-M2, Step-3", kept=GROUPS, factor=1.0),
    _spelling(biased_in_its_dtype, "transformers: LFM2 MoE", kept=GROUPS, eps=1e-6),
    _spelling(unbiased, "sigmoid scores divided by their sum", biased=False, kept=GROUPS, factor=1.0),
    _spelling(undivided, "norm_topk_prob = False", eps=None),
    _spelling(biased_softmax, "transformers: LongCat", softmax=True, kept=GROUPS, eps=None),
    _spelling(biased_softmax_divided, "transformers: ERNIE 4.5", softmax=True, kept=GROUPS, factor=1.0),
)
LOOKALIKES = (
    _other(filled_with_0, "scores of those outside of the top-k are", _lower),
    _other(filled_with_a_low_number, "filled with -1.0; npu_moe_gating_top_k requires -inf", _lower),
    _other(best_three, "they are not chosen by the largest, or the"),
    _other(groups_without_bias, "they are not chosen by the largest, or the"),
    _other(alternate_groups, "not proven to be runs of neighbouring experts|of what experts are chosen by"),
    _other(other_groups, "the entries that are filled are not those"),
    _other(weights_with_bias, "they are the scores with the bias"),
    _other(bias_of_tokens, "plus a bias"),
    _other(raised_groups, "other numbers than 0 and -inf are added"),
    _other(one_group_of_each_pair, "neighbouring experts"),
    _other(groups_beside_those_chosen, "neighbouring experts"),
    look_alike(
        "expert_gating", sigmoids_of_chosen_logits, "chosen by logits", (GATING,), lambda B, S: inputs(B, S), None
    ),
)
