"""A bias that may hold -inf, by the ways in which it is put to operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusion import testing
from fusion.language import Refused
from fusion.options import Options
from fusion.testing import Trial, capture
from patterns.attention.masks.biases import Bias
from patterns.attention.masks.visibility import Structured
from tests.engine.graphs import read_graph

from .attention_base import B, N, S
from .attention_bias import INFINITE

HOST, A3 = (Options(target=target, lower="eager") for target in ("host", "ascend910_93"))


def sdpa(q: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, q, q, attn_mask=bias)


def written(q: Tensor, bias: Tensor) -> Tensor:
    return ((q @ q.mT).float() / 4 + bias).softmax(-1).to(q.dtype) @ q


def tried(form, bias: Tensor, level: testing.Level, options: Options = HOST) -> Trial:
    q = torch.randn(B, N, S, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    return testing.trial_of(capture(form, (q, bias), level), options)


def test_what_sdpa_adds_is_guarded_where_that_takes_fewer_calls():
    bias = INFINITE.bfloat16()
    whole = tried(sdpa, bias, "composite")
    assert not whole.outcome.chosen
    assert any("as a bias it may be -inf, which no page of" in each.reason for each in whole.outcome.refusals)
    assert not tried(sdpa, bias, "decomposed").outcome.chosen
    apart = tried(written, bias, "composite")
    assert [each.match.rule.name for each in apart.outcome.chosen] == ["attention"]
    testing.means_what_it_says(apart)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_bias_is_not_rounded(dtype: torch.dtype):
    t = tried(written, INFINITE.to(dtype), "composite")
    assert not t.outcome.chosen
    assert any("rounded from " + str(dtype)[6:] + " to bfloat16" in each.reason for each in t.outcome.refusals)


def test_the_least_number_stands_for_infinity():
    t = tried(written, INFINITE.bfloat16(), "composite", A3)
    call = next(each for each in t.fused.graph.nodes if "fused_infer_attention" in str(each.target))
    assert "clamp" in str(call.kwargs["pse_shift"].target)
    assert not {"atten_mask", "sparse_mode"} & set(call.kwargs)
    testing.means_what_it_says(t)


def test_what_a_query_without_keys_gives_is_only_told_where_all_that_is_hidden_is_shown():
    y, whole = torch.zeros(B, N, S, 16), Structured(None, None, None, None, "none", None, None, "zero")
    bias = Bias(torch.full((1, N, S, S), -torch.inf), "nan")
    assert bias.restored(y, whole).isnan().all()
    for hides in ({"mask_kind": "causal_upper_left"}, {"kv_len": 3}, {"kv_lens": torch.tensor([3, S])}):
        with pytest.raises(Refused, match="it may be -inf, and the mask beside it has"):
            bias.restored(y, replace(whole, **hides))


class Tabled(nn.Module):
    """A bias that is made of a table, of numbers [S, S] that are given, and of S places."""

    def __init__(self, made: Callable[..., Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.made, self.table = made, nn.Parameter(torch.zeros(8, S, dtype=dtype))

    def forward(self, q: Tensor, given: Tensor, places: Tensor) -> Tensor:
        return written(q, self.made(self.table, given, places))


def rows(table: Tensor, given: Tensor, places: Tensor) -> Tensor:
    return table[places]


def between(table: Tensor) -> Tensor:
    """A table for another size, as vision models scale theirs (BEiT)."""
    return F.interpolate(table[None, None], (S, S), mode="bilinear")[0, 0]


def shifted(scores: Tensor, fill: float) -> Tensor:
    """Scores [S, S] of relative positions, each row one further than the one before (Transformer-XL, conformers)."""
    return F.pad(scores, (1, 0), value=fill).view(S + 1, S)[1:]


MADE: dict[str, tuple[Callable[..., Tensor], torch.dtype, bool]] = {
    "rows of a table": (rows, torch.bfloat16, False),
    "rows of a narrow table": (rows, torch.float16, False),
    "rows that are given": (lambda t, x, n: x[n], torch.bfloat16, True),
    "a number of each row": (lambda t, x, n: t[:S] * x[:, :1], torch.bfloat16, False),
    "a number of each key": (lambda t, x, n: t[:S] * x[:1], torch.bfloat16, True),
    "products that may be too large": (lambda t, x, n: t[:S] * x[:, :1], torch.float16, True),
    "a choice": (lambda t, x, n: torch.where(x > 0, t[:S], 0.5), torch.bfloat16, False),
    "a choice of what is given": (lambda t, x, n: torch.where(n > 0, x, t[:S]), torch.bfloat16, True),
    "rows between those of a table": (lambda t, x, n: between(t), torch.bfloat16, False),
    "rows between those that are given": (lambda t, x, n: between(x[:8]), torch.bfloat16, True),
    "shifted by a row, as relative positions are": (lambda t, x, n: shifted(t[:S], 0.0), torch.bfloat16, False),
    "what is given, shifted": (lambda t, x, n: shifted(x, 0.0), torch.bfloat16, True),
    "shifted beside -inf": (lambda t, x, n: shifted(t[:S], -torch.inf), torch.bfloat16, True),
    "what is given, clamped": (lambda t, x, n: x.clamp(-5, 5), torch.bfloat16, False),
    "what is given, clamped from below": (lambda t, x, n: x.clamp(min=-5), torch.bfloat16, True),
    "a cast of finite numbers": (lambda t, x, n: x.float().sigmoid().to(t.dtype), torch.bfloat16, False),
    "numbers beyond those of a byte": (
        lambda t, x, n: (x.sigmoid() * -1e5).to(torch.float8_e5m2).to(t.dtype),
        torch.bfloat16,
        True,
    ),
    "a cast of what is given": (lambda t, x, n: x.half().to(t.dtype), torch.bfloat16, True),
}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.rotates(4)
def test_a_bias_is_guarded_if_it_may_be_infinite(name: str):
    made, dtype, infinite = MADE[name]
    given = torch.zeros(B, N, S, 16, dtype=dtype), torch.zeros(S, S, dtype=dtype), torch.arange(S)
    captured = capture(Tabled(made, dtype), given, "composite")
    readings = read_graph(captured.graph.graph, captured.facts).readings
    ((_, reading),) = readings.all("softmax_attention")
    assert ("empty_bias" in reading.captures) == infinite


FILLED: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], bool]] = {
    "behind the bias": (lambda s, b, m: (s + b).masked_fill(m, -1e4), True),
    "chosen behind the bias": (lambda s, b, m: torch.where(m, -1e9, s + b), True),
    "before the bias": (lambda s, b, m: s.masked_fill(m, -1e4) + b, False),
    "before the bias and behind it": (lambda s, b, m: (s.masked_fill(m, -1e4) + b).masked_fill(m.roll(1), -1e4), False),
    "between two of them": (lambda s, b, m: (s + b).masked_fill(m, -1e4) + b * 2, False),
}


@pytest.mark.parametrize("name", FILLED)
@pytest.mark.parametrize("level", testing.LEVELS)
@pytest.mark.rotates(4)
def test_a_number_that_replaces_scores_behind_a_bias_leaves_a_query_without_keys_their_mean(name: str, level):
    filled, known = FILLED[name]
    hidden = torch.zeros(B, 1, S, S, dtype=torch.bool)
    hidden[1:], hidden[0, :, 2], hidden[0, :, 3, 5:] = True, True, True

    def form(q: Tensor, bias: Tensor, hidden: Tensor) -> Tensor:
        return filled(q @ q.mT / 4, bias.clamp(-5, 5), hidden).softmax(-1) @ q

    made = torch.Generator().manual_seed(0)
    q, bias = (torch.randn(B, N, S, width, generator=made).bfloat16() for width in (16, S))
    t = testing.trial_of(capture(form, (q, bias, hidden), level), A3)
    assert [each.match.rule.name for each in t.outcome.chosen] == (["attention"] if known else [])
    assert known or any("lowered least" in each.reason for each in t.outcome.refusals)
    testing.means_what_it_says(t)
