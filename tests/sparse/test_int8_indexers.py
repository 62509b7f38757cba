"""Indexers of int8 rows with scales: each spelling becomes the operator of int8, what looks like one does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch

from fusion import Example
from fusion.frontend.library import installed
from fusion.options import Options
from fusion.testing import LEVELS, Level, Trial, emits_valid_calls, means_what_it_says, refuses, trial
from patterns.sparse.indexer.indexer import Indexer

from . import int8_indexers
from .int8_indexers import FLOATS, PAGES, REFUSED, ROWS, UNLIKE, Form, Inputs

RULE = next(each for each in installed().rules if each.name == "indexer_topk")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OPERATOR = "npu.npu_quant_lightning_indexer.default"
EVERY = ROWS | PAGES


def tried(form: Form, make: Callable[[], Inputs], dtype: torch.dtype, level: Level = "composite", target: str = "host"):
    """Floats in float64 become the model's; scales in float16 stay what they are."""

    def inputs(of: torch.dtype) -> tuple[Any, ...]:
        return tuple(each.to(of) if each.dtype == torch.float64 else each for each in make())

    return trial(RULE, Example(form.__name__, form, inputs), dtype, level, Options(target=target, lower="eager"))


def called(t: Trial) -> list[str]:
    assert not t.outcome.failures
    return [str(node.target) for node in t.fused.graph.nodes if "lightning_indexer" in str(node.target)]


SLOWER = [(int8_indexers.both_first, torch.float16), (int8_indexers.heads_first, torch.float16)]
"""Spellings whose plain code takes less time, by the costs of so few keys."""


def settings() -> Iterator[Any]:
    """Yield every spelling at every level in every dtype and batch."""
    for form, level, dtype, batch in product(EVERY, LEVELS, DTYPES, (1, 2)):
        if (form, dtype) not in SLOWER:
            yield pytest.param(form, level, dtype, batch, id=f"{form.__name__}-{level}-{dtype}-{batch}")


@pytest.mark.rotates(18)
@pytest.mark.parametrize(("form", "level", "dtype", "batch"), settings())
def test_int8_rows_are_read_as_they_lie(form: Form, level: Level, dtype: torch.dtype, batch: int):
    t = tried(form, lambda: EVERY[form](batch), dtype, level)
    assert called(t) == [OPERATOR], "\n".join(map(str, t.outcome.refusals))
    (chosen,) = t.outcome.chosen
    assert chosen.match.form == ("listed[PagedInt8Indexer]" if form in PAGES else "listed[Indexer]")
    means_what_it_says(t)
    emits_valid_calls(t)


@pytest.mark.parametrize(("form", "dtype"), SLOWER)
def test_plain_code_that_takes_less_time_stays(form: Form, dtype: torch.dtype):
    t = tried(form, lambda: EVERY[form](1), dtype, "core")
    assert called(t) == []
    refuses(t, "us slower than the model's own calls at these sizes")


@pytest.mark.rotates(6)
@pytest.mark.parametrize("form", REFUSED, ids=lambda each: each.__name__)
def test_look_alike_is_refused(form: Form):
    why, make = REFUSED[form]
    t = tried(form, make, torch.bfloat16)
    assert called(t) == []
    refuses(t, why)


@pytest.mark.parametrize("form", UNLIKE, ids=lambda each: each.__name__)
def test_other_sums_are_left_alone(form: Form):
    assert called(tried(form, int8_indexers.tokens, torch.bfloat16)) == []


@pytest.mark.parametrize("form", FLOATS, ids=lambda each: each.__name__)
def test_rows_that_are_dequantised_first_are_floats(form: Form):
    t = tried(form, int8_indexers.tokens, torch.bfloat16)
    assert called(t) == ["npu.npu_lightning_indexer.default"]
    means_what_it_says(t)


def test_scales_in_float32_that_float16_does_not_hold_go_into_the_weights():
    weights = torch.tensor([[[1.0, -2.0]]], dtype=torch.float16)
    given, ones = Indexer(weights=weights, query_scale=torch.full((1, 1, 2), 2.0**-30)).weighted()
    assert given.dtype == ones.dtype == torch.float16
    assert (given * ones * 2).equal(weights)


def test_scales_by_another_table_are_gathered():
    t = tried(int8_indexers.by_two_tables, int8_indexers.paged, torch.bfloat16)
    assert [each.match.form for each in t.outcome.chosen] == ["listed[Indexer]"]
    assert called(t) == [OPERATOR]
    means_what_it_says(t)


@pytest.mark.parametrize("form", [int8_indexers.folded, int8_indexers.by_products], ids=lambda each: each.__name__)
@pytest.mark.parametrize("batch", [1, 2])
def test_lists_of_ordinary_numbers_differ_where_scores_are_nearly_equal_alone(form: Form, batch: int):
    """The operator rounds weights and sums to float16: lists agree but where that tells scores hardly apart."""
    queries, heads, keys, lanes = 5, 16, 192, 128
    of = torch.Generator().manual_seed(batch)
    query = torch.randn(batch, queries, heads, lanes, generator=of, dtype=torch.float64)
    rows = torch.randn(batch, keys, lanes, generator=of, dtype=torch.float64) * (1 + torch.arange(keys)[:, None] % 7)
    key, scale = int8_indexers.quantised(rows)
    inputs = query, key, scale.squeeze(-1).half(), torch.randn(batch, queries, heads, generator=of, dtype=torch.float64)
    t = tried(form, lambda: inputs, torch.bfloat16, target="ascend910_93")
    assert called(t) == [OPERATOR], "\n".join(map(str, t.outcome.refusals))
    scores = exact(*inputs)
    want, have = scores.topk(int8_indexers.K, -1).indices, t.fused(*t.inputs())[0]
    gap = 4 * torch.finfo(torch.float16).eps * scores.abs().amax(-1, keepdim=True)
    least = scores.gather(-1, want).amin(-1, keepdim=True)
    assert (scores.gather(-1, have.long()) >= least - gap).all()
    kept = (want[..., None] == have[..., None, :]).any(-1).double().mean()
    assert kept >= 0.95, kept


def exact(query: torch.Tensor, key: torch.Tensor, scale: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The scores [B, S, T] in float64 of what the model quantises."""
    q8, s_q = int8_indexers.quantised(query.bfloat16())
    summed = torch.einsum("bshd,btd->bsht", q8.double(), key.double()).relu()
    return (
        torch.einsum("bsht,bsh->bst", summed, weights.bfloat16().double() * s_q.squeeze(-1).double())
        * scale.double()[:, None]
    )
