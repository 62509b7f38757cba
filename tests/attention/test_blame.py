"""Why attention stays as it is written: once for each, the nearest reason, at the line that is to blame."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusion
from fusion import Options
from fusion.graph import Algebra
from fusion.pipeline import fuse_graph
from fusion.report.report import Report
from fusion.testing import capture
from patterns.attention.reasons import unclaimed, uses
from patterns.attention.reasons.blame import unproven

B, N, S, T, D = 2, 4, 8, 24, 64
CAPPED = (
    "scores: they are capped by tanh (soft capping, logit_softcapping); npu_fused_infer_attention_score requires "
    "scores without it, and no other operator here has it"
)
TRUTHS = "what is added to the scores is computed"
LOWERED = "would see those that are lowered least"
WIDE = "it is read in float32 before anything rounds it"


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).bfloat16()


QKV = normal(B, N, S, D), normal(B, N, T, D), normal(B, N, T, D)


def explained(function: Callable[..., Any], *more: Any, qkv: Any = QKV, **options: Any) -> Report:
    return fusion.explain(function, *qkv, *more, options={"target": "ascend910_93", **options})


def told(report: Report) -> list[tuple[str, str]]:
    """What is said of attention, and the line that is blamed."""
    rules = ("softmax_attention", "attention", "latent_attention", "head_projection")
    return [(each.reason, each.source) for each in report.refusals if each.rule in rules]


def one(report: Report) -> tuple[str, str]:
    (found,) = told(report)
    return found


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q.float() @ k.float().mT) / 8
    scores = torch.tanh(scores / 30) * 30
    weights = scores.softmax(-1)
    return (weights @ v.float()).to(q.dtype)


def plain(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q @ k.mT / 8).softmax(-1)
    return weights @ v, weights


def test_reasons_are_sought_for_reports_alone(monkeypatch: pytest.MonkeyPatch):
    sought: list[str] = []
    for module, name in ((uses, "_used_weights"), (unclaimed, "without_softmax")):
        seek = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, seek=seek: (sought.append(seek.__name__), seek(*given))[1])
    traced = capture(plain, QKV)
    fuse_graph(traced.graph.graph, fusion.installed(), Options(target="ascend910_93"), with_refusals=False)
    assert not sought
    assert "something else reads them" in one(explained(plain))[0]
    assert "_used_weights" in sought


def test_a_cap_is_blamed_where_it_stands_once_for_each_attention():
    assert one(explained(capped)) == (CAPPED, "scores = torch.tanh(scores / 30) * 30")


def test_that_weights_and_values_are_no_projection_of_heads_is_not_told():
    heads = tuple(each[0, :, :, :] for each in QKV)
    assert one(explained(lambda q, k, v: capped(q, k[:, :22], v[:, :22]).transpose(0, 1), qkv=heads))[0] == CAPPED


class Layer(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = x @ x.mT / 8 + mask
        return x + scores.softmax(-1).to(x.dtype) @ x


class Layers(nn.Module):
    """Equal layers, of which few are searched; the mask is made once."""

    def __init__(self, capped: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([(Capped if capped else Layer)() for _ in range(6)])

    def forward(self, x: Tensor, slopes: Tensor) -> Tensor:
        mask = slopes * torch.arange(S)
        for layer in self.layers:
            x = layer(x, mask)
        return x


class Capped(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + capped(x, x, x)


def test_every_layer_is_told_of_with_its_own_line_or_that_of_what_all_share():
    x, slopes = normal(B, N, S, D), normal(N, 1, 1).float()
    found = fusion.explain(Layers(capped=True), x, slopes, options={"target": "ascend910_93"}).refusals
    modules = [each.module for each in found if each.reason == CAPPED]
    assert len(modules) == 6
    assert len(set(modules)) == 6
    found = fusion.explain(Layers(capped=False), x, slopes, options={"target": "ascend910_93"}).refusals
    assert [each.source for each in found if "bias" in each.reason] == ["mask = slopes * torch.arange(S)"]


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = q @ k.mT / 8
    masked = scores + bias
    return masked.softmax(-1).to(v.dtype) @ v


def test_a_mask_that_is_passed_in_is_blamed_where_it_is_added_and_may_be_assumed():
    for bias in (normal(B, 1, S, T), normal(S, T)):
        reason, line = one(explained(biased, bias.float()))
        assert (line, "(name a mask that is passed in by the" in reason) == (
            "masked = scores + bias",
            True,
        )


def rows_of_a_table(q: Tensor, k: Tensor, v: Tensor, table: Tensor, places: Tensor) -> Tensor:
    return biased(q, k, v, table.index_select(0, places)[None, None].expand(B, 1, S, T))


def test_so_may_one_whose_rows_are_chosen():
    assert "assume" in one(explained(rows_of_a_table, normal(32, T).float(), torch.arange(S)))[0]


def test_what_is_said_of_one_that_is_passed_in_is_not_said_again_of_its_sum_with_an_order():
    """And of no bias that the operator does not take either, here as it is wider than the queries."""

    def ordered(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return biased(q, k, v, bias + torch.full((S, T), -math.inf).triu(1))

    reason, _ = one(explained(ordered, normal(B, N, S, T).float()))
    assert reason.count("what is added to the scores is not proven") == 1


OF_NUMBERS: dict[str, Callable[..., Any]] = {
    "a table of distances": lambda q, k, v, x: biased(
        q, k, v, x[:4, :4][(torch.arange(S)[:, None] - torch.arange(T)) % 4].permute(2, 0, 1)
    ),
    "slopes": lambda q, k, v, x: biased(q, k, v, x[0, 0] * torch.arange(T)),
    "one number for each key": lambda q, k, v, x: biased(q, k, v, x.flatten()[:T]),
    "keys in another order": lambda q, k, v, x: biased(q, k, v, x[:S, torch.tensor([*range(3, T), 0, 2, 1])]),
}


@pytest.mark.parametrize("name", OF_NUMBERS)
def test_the_option_is_not_named_where_it_could_not_help(name: str):
    reason, _ = one(explained(OF_NUMBERS[name], normal(8, T).float()))
    assert "what is added to the scores is not proven" in reason
    assert "assume" not in reason


def test_nor_of_a_row_that_is_passed_in():
    assert "assume" not in one(explained(biased, normal(T).float()))[0]


def padded(q: Tensor, k: Tensor, v: Tensor, valid: Tensor, least: float = -10000.0) -> Tensor:
    mask = (1.0 - valid[:, None, None, :].float()) * least
    return biased(q, k, v, mask)


def test_padding_of_numbers_is_told_with_what_booleans_would_not_mend():
    valid = torch.ones(B, T, dtype=torch.int64)
    reason, line = one(explained(padded, valid))
    assert TRUTHS in reason
    assert LOWERED in reason
    assert line.startswith("mask = (1.0 - valid")
    reason, _ = one(explained(padded, valid.bool()))
    assert TRUTHS not in reason
    assert LOWERED in reason
    reason, _ = one(explained(padded, valid.float()))
    assert reason.count(TRUTHS) == 1
    assert LOWERED not in reason


OF_PLACES: dict[str, Callable[..., Any]] = {
    "numbers of a table": lambda q, k, v, x, n: biased(q, k, v, x[n]),
    "a slope": lambda q, k, v, x, n: biased(q, k, v, -0.25 * (n[:, :1] - n[:1]).abs()),
    "a slope for each head": lambda q, k, v, x, n: biased(q, k, v, -x[:4, None, None] * (n[:, :1] - n[:1]).abs()),
    "the places": lambda q, k, v, x, n: biased(q, k, v, n.to(q.dtype)),
    "the places from 1 on": lambda q, k, v, x, n: biased(q, k, v, (n + 1).to(q.dtype)),
    "a curve": lambda q, k, v, x, n: biased(q, k, v, (1.0 - x.exp()).view(S, T)),
}


@pytest.mark.parametrize("name", OF_PLACES)
def test_places_that_are_passed_in_are_no_truths(name: str):
    places = torch.arange(S * T).reshape(S, T)
    reason = one(explained(OF_PLACES[name], normal(S * T).float(), places))[0]
    assert TRUTHS not in reason
    assert "what is added to the scores is not proven" in reason


def raised_and_masked(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    raised = torch.where(seen, 0.0, math.inf)
    scores = q @ k.mT / 8 + raised
    return scores.masked_fill(torch.ones(S, T).triu(T - S + 1).bool(), -math.inf).softmax(-1).to(v.dtype) @ v


def test_booleans_whose_mask_is_turned_round_are_told_as_no_numbers():
    """Scores that are multiplied by -1 after their keys are raised."""

    def turned(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        raised = (q @ k.mT + torch.where(seen[:, None, None], 0.0, math.inf)) * -0.125
        return raised.to(q.dtype).softmax(-1) @ v

    reason, _ = one(explained(turned, torch.ones(B, T, dtype=torch.bool)))
    assert "what is added to the scores is not proven" in reason
    assert TRUTHS not in reason


def test_of_several_masks_the_one_that_is_no_mask_is_blamed():
    assert one(explained(raised_and_masked, torch.ones(T).bool()))[1] == "raised = torch.where(seen, 0.0, math.inf)"


def test_padding_of_booleans_that_swallows_any_score_fuses():
    report = explained(lambda *given: padded(*given, least=-3e38), torch.ones(B, T, dtype=torch.bool))
    assert [each.rule for each in report.matches] == ["attention"]
    reason, _ = one(explained(lambda *given: padded(*given, least=-3e38), torch.ones(B, T, dtype=torch.int64)))
    assert TRUTHS in reason
    assert LOWERED not in reason


def test_the_least_number_that_hides_a_key_is_what_bfloat16_makes_of_ten_thousand():
    def ordered(q: Tensor, k: Tensor, v: Tensor, least: float, dtype: torch.dtype) -> Tensor:
        return biased(q, k, v, torch.full((S, T), least, dtype=dtype).triu(1))

    report = explained(ordered, -10000.0, torch.bfloat16)
    assert [each.rule for each in report.matches] == ["attention"]
    assert "pse_shift" not in str(report.graphs[0].graph)
    assert "pse_shift" in str(explained(ordered, -9900.0, torch.bfloat16).graphs[0].graph)
    assert "would be rounded" in one(explained(ordered, -9900.0, torch.float32))[0]


# results in float32 --------------------------------------------------------------------------------------------


def in_float32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of one sequence."""
    wide = q.float()
    scores = wide @ k.float().mT / math.sqrt(D)
    return scores.softmax(-1) @ v.float()


def each_sequence(q: Tensor, k: Tensor, v: Tensor, then: Callable[[Tensor], Any]) -> Any:
    out = torch.empty(q.shape)
    for place in range(q.shape[0]):
        out[place] = in_float32(q[place], k[place], v[place])
    return then(out)


THEN: dict[str, Callable[[Tensor], Any]] = {
    "rounded": lambda out: out.bfloat16(),
    "filled and rounded": lambda out: out.masked_fill(out.new_ones(S, 1).bool().triu(1), 0.0).bfloat16(),
}
KEPT: dict[str, Callable[[Tensor], Any]] = {
    "kept": lambda out: out,
    "both": lambda out: (out, out.bfloat16()),
    "scaled": lambda out: (out * 2).bfloat16(),
    "of float16": lambda out: out.half(),
}


@pytest.mark.parametrize("name", THEN)
def test_results_that_are_stored_in_float32_and_rounded_are_those_of_the_operator(name: str):
    given = [each.clone() for each in QKV]
    report = explained(lambda *qkv: each_sequence(*qkv, THEN[name]))
    assert [each.rule for each in report.matches] == ["attention"] * B
    fused = fusion.fuse(lambda *qkv: each_sequence(*qkv, THEN[name]), target="host", lower="eager")
    exact = each_sequence(*(each.double() for each in given), lambda out: out)
    assert (fused(*given).double() - exact).abs().max() <= 2 * (THEN[name](exact.float()).double() - exact).abs().max()


@pytest.mark.parametrize("name", KEPT)
def test_results_that_are_read_in_float32_are_not(name: str):
    found = told(explained(lambda *qkv: each_sequence(*qkv, KEPT[name])))
    assert [line for reason, line in found if WIDE in reason] == ["wide = q.float()"]
    assert all(WIDE in reason or reason.startswith("query: it is float32") for reason, _ in found)


def keys_widened_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keys = k.float()
    wide = q.float()
    return (wide @ keys.mT / 8).softmax(-1) @ v.float()


def test_where_queries_are_widened_is_to_blame():
    assert one(explained(keys_widened_first))[1] == "wide = q.float()"


def mended(q: Tensor, k: Tensor, v: Tensor, number: float = 0.0, other: Tensor | None = None) -> Tensor:
    """Keys and values of which something is replaced once they are in float32."""
    k, v = k.float(), v.float()
    k[k != k] = number
    v = torch.where(v == 3.0, number if other is None else other, v)
    return ((q.float() @ k.mT / 8).softmax(-1) @ v).to(q.dtype)


def test_what_is_chosen_of_widened_numbers_is_held_by_the_narrow_dtype():
    assert [each.rule for each in explained(mended).matches] == ["attention"]
    given = [each.clone() for each in QKV]
    given[1][0, 0, 0, 0] = math.nan
    fused = fusion.fuse(mended, target="host", lower="eager")
    exact = mended(*(each.double() for each in given))
    assert (fused(*given).double() - exact).abs().max() <= 2 * (mended(*given).double() - exact).abs().max()


@pytest.mark.parametrize("other", [None, torch.full((D,), 0.1), normal(D).float() / 3])
def test_numbers_that_it_does_not_hold_are_not_chosen(other: Tensor | None):
    number = 0.1 if other is None else 0.0
    report = explained(lambda *given: mended(*given, number=number, other=other))
    assert report.matches == []
    assert "their dtypes are" in one(report)[0]


def test_queries_that_were_never_narrower_are_refused_by_the_limit():
    wide = tuple(each.float() for each in QKV)
    assert "query: it is float32" in one(explained(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, qkv=wide))[0]


def test_operands_that_were_narrow_in_several_dtypes_are_refused_by_the_limit():
    given = QKV[0], QKV[1].half(), QKV[2]
    assert "query: it is float32" in one(explained(in_float32, qkv=given))[0]


def test_of_numbers_that_nothing_is_known_of_no_input_is_blamed():
    a = Algebra()
    made = a.make("aten.rand.default", (), (), (S, T), torch.float32)
    assert "assume" not in unproven(made)
    assert "assume" in unproven(a.make("input", (), ("mask", 0), (S, T), torch.float32))


def summed(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Two biases that are added one after the other, and multiplied with the scores."""
    return ((q @ k.mT + bias + bias.flip(0)) * 0.125).softmax(-1) @ v


def test_several_biases_that_are_scaled_with_the_scores_are_not_added():
    assert "as a bias it is a sum of several, which" in one(explained(summed, normal(S, T)))[0]


def sunk(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A logit beside those of the keys, which costs as many calls where it is fused."""
    sink = torch.zeros(1, N, 1, 1, dtype=q.dtype).expand(B, -1, S, -1)
    return torch.cat(((q @ k.mT) * D**-0.5, sink), -1).softmax(-1)[..., :-1] @ v


def test_attention_that_would_take_as_long_is_told():
    report = explained(sunk)
    assert told(report)[0][0].startswith(
        "npu_fused_infer_attention_score_v2: estimated as fast as the model's own calls"
    )
    assert not report.ops


def weighed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = torch.softmax(q @ k.mT / 8, -1)
    return weights @ v, weights


COMPUTED = (
    "weights: something else reads them beside the product with values, so that they are computed in any case; "
    "npu_fused_infer_attention_score returns none and requires that product alone; do not return them"
)


@pytest.mark.parametrize("read", [lambda w: w, lambda w: w.float().mean(1), lambda w: w.flatten(0, 1)[0]])
def test_weights_that_are_read_besides_are_to_blame(read: Callable[[Tensor], Tensor]):
    def form(*qkv: Tensor) -> tuple[Tensor, Tensor]:
        y, weights = weighed(*qkv)
        return y, read(weights)

    report = explained(form)
    assert not report.matches
    assert one(report) == (COMPUTED, "weights = torch.softmax(q @ k.mT / 8, -1)")


def test_weights_of_one_product_that_only_other_views_read_are_not():
    def form(*qkv: Tensor) -> Tensor:
        y, weights = weighed(*qkv)
        weights.flatten(0, 1)
        return y

    report = explained(form)
    assert [each.rule for each in report.matches] == ["attention"]
    assert told(report) == []
