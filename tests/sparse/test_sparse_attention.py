"""Sparse attention over a latent is fused in every ordinary spelling of its parts; what only resembles it is not."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from sympy import Max, Min, Symbol
from torch import Tensor, fx

from fusion import testing
from fusion.graph import Algebra, Reading, Value
from fusion.options import Options
from fusion.runtime.verification import relative_error
from fusion.testing import LEVELS, Trial, capture
from patterns.attention.masks.assumed import Assumed
from patterns.sparse.indexer import read
from patterns.sparse.indexer.read_scores import NOT_A_SUM, parts
from patterns.sparse.lists import gathered_rows
from tests.latent import lookalikes_latent_attention

from . import lookalikes_sparse_attention, sparse_attention, sparse_attention_blocks, sparse_attention_lists
from .sparse_attention_base import Entry, reference

pytestmark = pytest.mark.rotates(48)

HOST = Options(target="host", lower="eager")
SPELLINGS = (
    *sparse_attention.SPELLINGS,
    *sparse_attention_lists.SPELLINGS,
    *sparse_attention_blocks.SPELLINGS,
)
LOOKALIKES = (*lookalikes_sparse_attention.LOOKALIKES, *lookalikes_latent_attention.LOOKALIKES)
QUERIES, KEYS = Symbol("queries", integer=True), Symbol("keys", integer=True)
Shape = tuple[int, ...]
NAMES = ("mla_prolog_v3", "lightning_indexer", "sparse_flash_attention")

# Not recognised yet: the entry, or the entry at a level in a mode, and what it would take.
MISSED: dict[Any, str] = {
    "padded_and_added": "zeros around a tensor are not read as a join, nor the sum of two such as one",
    "gathered_lanes": "lanes that a constant list rearranges are not followed",
    "where_positive": "where(x > 0, x, 0) is not read as relu(x), which it is but for NaN",
    "times_positive": "x · (x > 0) is not read as relu(x), which it is but for infinities and NaN",
    **dict.fromkeys(
        product(("one_hot",), LEVELS, ("prefill", "chunk", "step")),
        "torch asserts that the numbers of one_hot are there, and reads the model's own list for it",
    ),
}


def settings(entries: tuple[Entry, ...]) -> Any:
    """Parametrise a test by every entry at every level in each of its modes."""

    def one(entry: Entry, mode: str, level: testing.Level) -> Any:
        reason = MISSED.get(entry.name) or MISSED.get((entry.name, level, mode))
        marks = [pytest.mark.xfail(strict=True, reason=reason)] if reason else []
        return pytest.param(entry, mode, level, id=f"{entry.name}-{mode}-{level}", marks=marks)

    chosen = [one(each, mode, level) for each in entries for mode, level in product(each.modes, LEVELS)]
    return pytest.mark.parametrize(("entry", "mode", "level"), chosen)


def tried(form: Any, args: tuple[Any, ...], level: testing.Level) -> Trial:
    """The code before and after the pass with the whole library."""
    return testing.trial_of(capture(form, args, level), HOST)


def called(t: Trial) -> tuple[int, ...]:
    """How often prolog, indexer and sparse attention are called."""
    targets = [str(node.target) for node in t.fused.graph.nodes if "fusion" in node.meta]
    return tuple(sum(f"npu.npu_{name}" in each for each in targets) for name in NAMES)


def means_the_same(t: Trial) -> None:
    """The same algebra in float64; in the dtype as close to it as the code itself, of results and caches.

    Rounding may change which of two like keys is listed, in the one as in the other: the worst rows are left out.
    """
    inputs = [t.inputs(wide=True)[: len(t.captured.inputs)], t.inputs(wide=True), t.inputs(), t.inputs()]
    graphs = (testing.widen(t.captured.graph), testing.widen(t.fused), t.captured.graph, t.fused)
    outcomes = [outputs(graph, given, len(t.captured.inputs)) for graph, given in zip(graphs, inputs, strict=True)]
    for exact, same, old, new in zip(*outcomes, strict=True):
        assert relative_error(same, exact) <= testing.WIDENED, "the algebra is wrong"
        limit = 1.5 * usual_error(old, exact) + torch.finfo(old.dtype).eps
        assert usual_error(new, exact) <= limit, f"error {usual_error(new, exact):.3g} where {limit:.3g} is allowed"


def outputs(graph: fx.GraphModule, given: list[Any], count: int) -> list[Tensor]:
    """Results and what is written to."""
    given = given if len(given) == len(graph.graph.find_nodes(op="placeholder")) else given[:count]
    every = (*graph(*given), *given[:count])
    return [each for each in every if isinstance(each, Tensor) and each.is_floating_point()]


def usual_error(actual: Tensor, exact: Tensor) -> float:
    """The relative error of all rows but the worst eighth, and one at least."""
    rows = (actual.double() - exact).reshape(-1, exact.shape[-1]).square().sum(-1).sort().values
    kept = rows[: len(rows) - max(len(rows) // 8, 1)] if len(rows) > 1 else rows
    return float((kept.mean() / exact.square().sum(-1).mean()).sqrt())


@pytest.mark.parametrize("entry", [each for each in SPELLINGS if each.name != "no_weights"], ids=lambda each: each.name)
def test_spelling_is_sparse_attention(entry: Entry):
    """But for one whose heads all count alike."""
    for mode in entry.modes:
        block, args, copies = (entry.make(mode, torch.float64), *(entry.inputs(mode, torch.float64) for _ in range(2)))
        results = block(*args)
        exact = reference(block, *copies)
        have = [*results] if mode == "grow" else [results, *args[3:-1]]
        for got, want in zip(have, exact, strict=mode != "prefill"):
            torch.testing.assert_close(got.reshape(want.shape), want, rtol=0, atol=2e-5)


@settings(SPELLINGS)
def test_spelling_is_fused(entry: Entry, mode: str, level: testing.Level):
    dtype = torch.bfloat16
    t = tried(entry.make(mode, dtype), entry.inputs(mode, dtype), level)
    assert called(t) == entry.expected(dtype), "\n".join(map(str, t.outcome.refusals))
    means_the_same(t)
    testing.emits_valid_calls(t)


@pytest.mark.parametrize("level", LEVELS)
def test_pages_are_written_and_read_in_place(level: testing.Level):
    entry = next(each for each in SPELLINGS if each.name == "paged")
    t = tried(entry.make("step", torch.bfloat16), entry.inputs("step", torch.bfloat16), level)
    told = [dict(node.kwargs) for node in t.fused.graph.nodes if "fusion" in node.meta]
    layouts = [call[name] for call in told for name in ("layout_key", "layout_kv") if name in call]
    assert layouts == ["PA_BSND", "PA_BSND"]
    assert any("cache_index" in call for call in told)


@settings(sparse_attention_blocks.WHOLE)
def test_attention_that_lists_every_key_is_dense(entry: Entry, mode: str, level: testing.Level):
    dtype = torch.bfloat16
    t = tried(entry.make(mode, dtype), entry.inputs(mode, dtype), level)
    assert called(t) == entry.expected(dtype), "\n".join(map(str, t.outcome.refusals))
    assert any("npu_fused_infer_attention_score" in str(node.target) for node in t.fused.graph.nodes)
    means_the_same(t)
    testing.emits_valid_calls(t)


@settings(LOOKALIKES)
def test_look_alike_is_refused_or_keeps_its_meaning(entry: Entry, mode: str, level: testing.Level):
    t = tried(entry.make(mode, torch.bfloat16), entry.inputs(mode, torch.bfloat16), level)
    # Dense attention over the latent may stand in its place, and the prolog beside it; one query that sees every key
    # lists as the indexer does, whatever the model makes of the list.
    _, indexers, sparse = called(t)
    assert sparse == entry.sparse, "\n".join(map(str, t.outcome.refusals))
    assert indexers in ({entry.indexer, 1} if mode == "grow" else {entry.indexer})
    assert not t.outcome.failures
    reasons = [each.reason for each in t.outcome.refusals]
    assert not entry.reason or any(entry.reason in each for each in reasons), reasons
    means_the_same(t)


def test_as_many_keys_are_listed_as_are_known_before():
    known = {4: 4, Min(4, KEYS): 4, KEYS: None, Min(KEYS, QUERIES): None, Max(4, KEYS): None}
    assert {count: read.at_most(count) for count in known} == known


def test_places_of_one_row_are_distinct_only_while_it_stays_a_row():
    a = Algebra()
    scores = a.make("input", (), ("scores", 0), (2, 4, 8), torch.float32)
    places = a.make("largest_index", (scores,), (4,), (2, 4, 4), torch.int64)
    for same in (places, a.cast(places, torch.int32), a.reshape(places, (2, 1, 4, 4)), a.permute(places, (1, 0, 2))):
        assert gathered_rows.distinct(same)
    for other in (a.cast(places, torch.int8), a.reshape(places, (2, 16)), a.permute(places, (0, 2, 1))):
        assert not gathered_rows.distinct(other)


def summed(a: Algebra, q: Shape, k: Shape, w: Shape, over: int = -2) -> Value:
    """Σ w · relu(q k) over a dim, of inputs."""
    query, key, weights = (a.make("input", (), (str(shape), 0), shape, torch.float32) for shape in (q, k, w))
    rows = torch.broadcast_shapes(q[:-2], k[:-2])
    product = a.make("matmul", (query, key), (), (*rows, q[-2], k[-1]), torch.float32)
    rectified = a.make("relu", (product,), (), product.shape, torch.float32)
    shape = torch.broadcast_shapes(product.shape, w)
    weighed = a.make("mul", (weights, rectified), (), shape, torch.float32)
    return a.make("mean", (weighed,), (over,), (*shape[:over], 1, *shape[over:][1:]), torch.float32)


def test_a_sum_of_other_dims_is_not_that_of_an_indexer():
    a = Algebra()
    query, key, weights = (2, 3, 4, 8), (2, 1, 8, 5), (2, 3, 4, 1)
    assert not isinstance(parts(a, summed(a, query, key, weights)), str)
    others = (
        ((1, 3, 4, 8), (1, 1, 8, 5), weights),
        ((2, 3, 4, 2), (2, 5), weights),
        (query, (2, 3, 8, 5), weights),
        (query, (1, 1, 8, 5), weights),
        ((1, 1, 1, 1, 8), (1, 1, 1, 8, 5), (1, 1, 1, 1)),
    )
    sums = [summed(a, *shapes) for shapes in others]
    sums += [summed(a, query, key, weights, over) for over in (-1, -4)]
    assert [parts(a, each) for each in sums] == [NOT_A_SUM] * len(sums)


def test_an_indexer_lists_as_many_keys_as_are_known_before():
    a = Algebra()
    total = a.reshape(summed(a, (2, 3, 4, 8), (2, 1, 8, 5), (2, 3, 4, 1)), (2, 3, 5))
    for count, known in ((4, True), (KEYS, False)):
        places = a.make("largest_index", (total,), (count,), (2, 3, count), torch.int64)
        found = read.lightning_indexer(Assumed(a), places)
        assert known or "its length is symbolic" in str(found)
        assert isinstance(found, Reading) == known
