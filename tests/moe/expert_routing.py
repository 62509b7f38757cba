"""Routers of mixture-of-experts models, as people write them: the share of every expert, 0 where it is not chosen."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.corpus.base import Form, LookAlike, Spelling, generator, look_alike, wide

ROUTING = "npu::npu_moe_gating_top_k_softmax_v2"
EXPERTS, CHOSEN = 16, 4


def _dense(logits: Tensor, experts: Tensor, shares: Tensor) -> Tensor:
    return torch.zeros_like(logits, dtype=shares.dtype).scatter(-1, experts, shares).to(logits.dtype)


def chosen_first(logits):
    values, experts = torch.topk(logits, CHOSEN, dim=-1)
    return _dense(logits, experts, F.softmax(values, dim=1, dtype=values.dtype))


def chosen_first_in_float(logits):
    values, experts = logits.float().topk(CHOSEN, dim=1)
    return _dense(logits, experts, torch.softmax(values, dim=1).type_as(logits))


def softmax_of_float(logits):
    values, experts = logits.topk(CHOSEN, dim=-1)
    return _dense(logits, experts, values.softmax(-1, dtype=torch.float32).to(logits.dtype))


def divided_in_place(logits):
    shares = F.softmax(logits, dim=1, dtype=torch.float)
    shares, experts = torch.topk(shares, CHOSEN, dim=-1)
    shares /= shares.sum(dim=-1, keepdim=True)
    return _dense(logits, experts, shares.to(logits.dtype))


def divided_in_float(logits):
    shares, experts = torch.topk(F.softmax(logits.float(), dim=-1), CHOSEN, dim=-1)
    return _dense(logits, experts, shares / torch.sum(shares, dim=-1, keepdim=True))


def divided_unsorted(logits):
    shares, experts = torch.topk(logits.softmax(dim=-1, dtype=torch.float32), k=CHOSEN, dim=-1, sorted=False)
    return _dense(logits, experts, shares * shares.sum(-1, keepdim=True).reciprocal())


def plain_shares(logits):
    shares, experts = torch.topk(F.softmax(logits, dim=1, dtype=torch.float), CHOSEN, dim=-1)
    return _dense(logits, experts, shares.to(logits.dtype))


def plain_unsorted(logits):
    shares, experts = torch.topk(logits.softmax(dim=-1, dtype=torch.float32), k=CHOSEN, dim=-1, sorted=False)
    return _dense(logits, experts, shares)


def _divided(logits, by):
    shares, experts = F.softmax(logits, dim=-1, dtype=torch.float).topk(CHOSEN, dim=-1)
    return _dense(logits, experts, shares / by(shares))


def divided_with_a_tiny_eps(logits):
    return _divided(logits, lambda shares: shares.sum(dim=-1, keepdim=True) + 1e-20)


def divided_clamped(logits):
    return _divided(logits, lambda shares: torch.clamp(shares.sum(dim=1, keepdim=True), min=1e-8))


def divided_by_their_norm(logits):
    return _divided(logits, lambda shares: torch.norm(shares, p=1.0, dim=-1, keepdim=True))


def normalised(logits):
    shares, experts = logits.softmax(-1, dtype=torch.float32).topk(CHOSEN)
    return _dense(logits, experts, F.normalize(shares, p=1, dim=-1))


def divided_by_absolutes(logits):
    return _divided(logits, lambda shares: shares.abs().sum(-1, keepdim=True).clamp_min(1e-12))


def divided_by_the_larger(logits):
    return _divided(logits, lambda shares: torch.maximum(shares.sum(-1, keepdim=True), torch.tensor(1e-6)))


def widened_behind_the_choice(logits):
    values, experts = logits.topk(CHOSEN, dim=-1)
    return _dense(logits, experts, values.float().softmax(-1))


def less_their_log_sum(logits):
    values, experts = logits.topk(CHOSEN, dim=-1)
    values = values.float()
    return _dense(logits, experts, torch.exp(values - values.logsumexp(-1, keepdim=True)))


# weights of all experts ---------------------------------------------------------------------------------------------


def put_among_infinities(logits):
    values, experts = logits.topk(CHOSEN, dim=-1)
    return F.softmax(torch.full_like(logits, float("-inf")).scatter(-1, experts, values), dim=-1)


def put_and_listed(logits):
    values, experts = logits.topk(CHOSEN, dim=-1)
    routed = torch.full_like(logits, -torch.inf)
    routed.scatter_(-1, experts, values)
    return _dense(logits, experts, routed.softmax(-1).gather(-1, experts))


def put_by_index(logits):
    values, experts = torch.topk(logits, CHOSEN)
    kept = torch.full_like(logits, float("-inf"))
    kept[torch.arange(logits.shape[0]).unsqueeze(1), experts] = values
    return torch.softmax(kept, dim=-1)


def put_in_float(logits):
    values, experts = logits.float().topk(CHOSEN, dim=-1)
    kept = torch.full_like(logits, float("-inf"), dtype=torch.float32).scatter(-1, experts, values)
    return kept.softmax(-1).to(logits.dtype)


def masked_others(logits):
    mask = torch.zeros_like(logits).scatter(1, logits.topk(CHOSEN, dim=1).indices, 1)
    return F.softmax(logits.masked_fill(mask == 0, float("-inf")), dim=1)


def where_listed(logits):
    mask = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, logits.topk(CHOSEN, dim=-1)[1], True)
    return torch.where(mask, logits, -torch.inf).softmax(-1, dtype=wide(logits.dtype))


def lowered_others(logits):
    mask = torch.full_like(logits, float("-inf")).scatter(-1, logits.topk(CHOSEN, dim=-1)[1], 0.0)
    return F.softmax(logits + mask, dim=-1)


def one_hot_kept(logits):
    mask = F.one_hot(logits.topk(CHOSEN, dim=-1)[1], EXPERTS).sum(1)
    return logits.masked_fill(mask < 1, -torch.inf).softmax(-1)


def shares_times_a_mask(logits):
    shares = logits.softmax(-1, dtype=wide(logits.dtype))
    mask = torch.zeros_like(shares).scatter(-1, shares.topk(CHOSEN, dim=-1)[1], 1.0)
    return shares * mask


def divided_behind_a_mask(logits):
    shares = logits.softmax(-1, dtype=wide(logits.dtype))
    kept = shares * torch.zeros_like(shares).scatter(-1, shares.topk(CHOSEN, dim=-1)[1], 1.0)
    return kept / kept.sum(dim=-1, keepdim=True)


# what only looks like it --------------------------------------------------------------------------------------------


def above_a_bound(logits):
    values, _ = logits.topk(CHOSEN, dim=-1)
    return logits.masked_fill(logits < values[..., -1:], float("-inf")).softmax(-1)


def above_a_bound_in_place(logits):
    logits = logits - 1
    values, _ = torch.topk(logits, CHOSEN)
    logits[logits < values[:, [-1]]] = -float("inf")
    return F.softmax(logits, dim=-1)


def not_below_a_bound(logits):
    least = logits.topk(CHOSEN, dim=-1)[0][:, -1].unsqueeze(-1)
    return torch.where(logits >= least, logits, -torch.inf).softmax(-1)


def others_lowered_by_a_number(logits):
    mask = torch.zeros_like(logits).scatter(1, logits.topk(CHOSEN, dim=1).indices, 1)
    return F.softmax(logits.masked_fill(mask == 0, -4.0), dim=1)


def the_listed_hidden(logits):
    mask = torch.zeros_like(logits).scatter(1, logits.topk(CHOSEN, dim=1).indices, 1)
    return F.softmax(logits.masked_fill(mask == 1, float("-inf")), dim=1)


def divided_with_an_eps(logits):
    return _divided(logits, lambda shares: shares.sum(dim=-1, keepdim=True) + 1e-3)


def divided_clamped_high(logits):
    return _divided(logits, lambda shares: shares.sum(dim=-1, keepdim=True).clamp(min=0.9))


def divided_clamped_low(logits):
    return _divided(logits, lambda shares: shares.sum(dim=-1, keepdim=True).clamp(1e-8, 0.125))


def divided_by_the_largest(logits):
    return _divided(logits, lambda shares: shares.amax(dim=-1, keepdim=True))


def divided_by_their_length(logits):
    return _divided(logits, lambda shares: shares.norm(dim=-1, keepdim=True))


def softmax_over_tokens(logits):
    values, experts = logits.topk(CHOSEN, dim=-1)
    return _dense(logits, experts, values.softmax(0))


def softmax_over_tokens_first(logits):
    shares, experts = logits.softmax(0).topk(CHOSEN, dim=-1)
    return _dense(logits, experts, shares)


def _logits(B: int, S: int) -> tuple[Tensor, ...]:
    rows = [torch.randperm(EXPERTS, generator=generator(31 + row)) for row in range(B * S)]
    return (torch.stack(rows).to(torch.float64) / 4 - 2,)


def renormalised(logits: Tensor) -> Tensor:
    shares = plain(logits)
    return shares / shares.sum(-1, keepdim=True)


def plain(logits: Tensor) -> Tensor:
    shares = torch.exp(logits) / torch.exp(logits).sum(-1, keepdim=True)
    least = shares.sort(-1, descending=True).values[:, CHOSEN - 1 : CHOSEN]
    return torch.where(shares >= least, shares, 0.0)


def _spelling(form: Form, note: str, meaning=renormalised) -> Spelling:
    def make(dtype: torch.dtype, B: int, S: int):
        return form, tuple(t.to(dtype) for t in _logits(B, S))

    def expected(dtype: torch.dtype, B: int, S: int) -> tuple[Tensor, ...]:
        return (meaning(*_logits(B, S)),)

    return Spelling(f"expert_routing/{form.__name__}", "expert_routing", make, {ROUTING: 1}, expected, note)


def _other(
    form: Form, reason: str, meaning: Form | None = renormalised, forbid: tuple[str, ...] = (ROUTING,)
) -> LookAlike:
    return look_alike("expert_routing", form, reason, forbid, _logits, meaning)


def _divided_otherwise(form: Form, reason: str) -> LookAlike:
    """The shares themselves may be the operator's."""
    return _other(form, reason, renormalised, ())


SPELLINGS = (
    _spelling(chosen_first, "transformers: GPT-OSS"),
    _spelling(chosen_first_in_float, "transformers: Granite MoE"),
    _spelling(softmax_of_float, "softmax with a dtype, rounded back"),
    _spelling(divided_in_place, "transformers: Qwen3 MoE, OLMoE with norm_topk_prob"),
    _spelling(divided_in_float, "transformers: Mixtral"),
    _spelling(divided_unsorted, "unsorted, times the reciprocal"),
    _spelling(divided_with_a_tiny_eps, "transformers: DeepSeek-V2 with norm_topk_prob"),
    _spelling(divided_clamped, "transformers: Hunyuan"),
    _spelling(divided_by_their_norm, "transformers: DBRX"),
    _spelling(normalised, "F.normalize with p = 1"),
    _spelling(divided_by_absolutes, "the same written out"),
    _spelling(divided_by_the_larger, "the larger of their sum and a small number"),
    _spelling(widened_behind_the_choice, "gpt-oss in float32"),
    _spelling(less_their_log_sum, "exp(x - logsumexp(x))"),
    _spelling(plain_shares, "transformers: Qwen2 MoE, OLMoE", plain),
    _spelling(plain_unsorted, "transformers: DeepSeek-V2", plain),
    _spelling(put_among_infinities, "makeMoE: the chosen logits put among -inf, a softmax over all"),
    _spelling(put_and_listed, "the same in place, and read again as the list names them"),
    _spelling(put_by_index, "the same by an index"),
    _spelling(put_in_float, "the same in float32"),
    _spelling(masked_others, "a mask of zeros and ones, compared"),
    _spelling(where_listed, "a mask of booleans"),
    _spelling(lowered_others, "-inf added to others"),
    _spelling(one_hot_kept, "a sum of one_hot"),
    _spelling(shares_times_a_mask, "Mixture of experts of GShard: shares times a mask", plain),
    _spelling(divided_behind_a_mask, "the same divided by their sum"),
)
LOOKALIKES = (
    _other(above_a_bound, "scores that reach the k-th largest are", None),
    _other(above_a_bound_in_place, "scores that reach the k-th largest are", None),
    _other(not_below_a_bound, "scores that reach the k-th largest are", None),
    _other(others_lowered_by_a_number, "not among the largest is -4.0 where it must be -inf"),
    _other(the_listed_hidden, "the top-k list does something else than to"),
    _other(softmax_over_tokens, "another dim"),
    _other(softmax_over_tokens_first, "another dim", plain),
    _divided_otherwise(divided_with_an_eps, "0.001 is added to the sum of the chosen shares"),
    _divided_otherwise(divided_clamped_high, "clamped between 0.9 and inf"),
    _divided_otherwise(divided_clamped_low, "clamped between 1e-08 and 0.125"),
    _divided_otherwise(divided_by_the_largest, "something else than their sum"),
    _divided_otherwise(divided_by_their_length, "something else than their sum|there is none under the root"),
)
