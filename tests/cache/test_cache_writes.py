"""Positions: what is proven of them, what symbolic sizes leave, and what a write costs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusion.analysis.intervals import bounds
from fusion.options import Options
from fusion.planning.target import Target
from fusion.stages.canonicalise import canonicalise
from fusion.testing import capture
from tests.engine.graphs import fuse, names, numbers

pytestmark = pytest.mark.rotates(8)

PLACES = torch.tensor([7, -3, 0, 22])
RANGES = [
    (lambda x: x % 5, (0, 4)),
    (lambda x: (x % 5) * -2 + 1, (-7, 1)),
    (lambda x: x.clamp(-1, 6) // 4, (-1, 1)),
    (lambda x: x.clamp(min=2), (2, float("inf"))),
    (lambda x: x % 3 + torch.arange(4), (0, 5)),
    (lambda x: torch.where(x > 0, x % 3, x % 7 - 2), (-2, 4)),
    (lambda x: (x % 4).int(), (0, 3)),
    (lambda x: x.clamp(min=0).int(), (float("-inf"), float("inf"))),
    (lambda x: x + 1, (float("-inf"), float("inf"))),
]


@pytest.mark.parametrize(("form", "expected"), RANGES)
def test_bounds_hold_and_are_as_tight_as_said(form, expected):
    graph = canonicalise(capture(form, (PLACES,)).graph.graph)
    (output,) = graph.source.output_node().args[0]
    low, high = bounds(graph.value_of[output])
    assert (low, high) == expected
    assert all(low <= number <= high for number in form(PLACES).tolist())


# sizes that change -------------------------------------------------------------------------------------------------


def from_number(cache: Tensor, rows: Tensor, start: int) -> Tensor:
    cache[:, :, start : start + rows.shape[2]] = rows
    return cache * 2


def from_tensor(cache: Tensor, rows: Tensor, start: int) -> Tensor:
    cache.index_copy_(2, start + torch.arange(rows.shape[2]), rows)
    return cache * 2


def at_the_beginning(cache: Tensor, rows: Tensor, start: int) -> Tensor:
    cache[:, :, : rows.shape[2]] = rows
    return cache * 2


def narrowed(cache: Tensor, rows: Tensor, start: int) -> Tensor:
    cache.narrow(2, start, rows.shape[2]).copy_(rows)
    return cache * 2


@pytest.mark.parametrize("form", [from_number, from_tensor, at_the_beginning, narrowed])
@pytest.mark.parametrize("marked", [True, False], ids=["mark_dynamic", "dynamic=True"])
def test_every_length_and_start_is_written_as_in_eager(form, marked: bool):
    torch.compiler.reset()
    options = {"target": "host", "lower": "eager", "rules": {"cache_write"}}
    compiled = torch.compile(form, backend="cann_fusion", options=options, dynamic=None if marked else True)
    for length, start in ((3, 2), (5, 4), (2, 7)):
        cache, rows = numbers(2, 3, 9, 8), numbers(2, 3, length, 8, seed=1)
        if marked:
            torch._dynamo.mark_dynamic(rows, 2)
        plain, place = cache.clone(), cache.data_ptr()
        assert torch.equal(compiled(cache, rows, start), form(plain, rows, start))
        assert torch.equal(cache, plain)
        assert cache.data_ptr() == place


@pytest.mark.parametrize("form", [from_number, from_tensor, at_the_beginning, narrowed])
def test_a_symbolic_write_is_in_place(form):
    captured = capture(form, (numbers(2, 3, 9, 8), numbers(2, 3, 4, 8, seed=1), 2), dynamic=True)
    outcome = fuse(captured.graph)
    assert outcome.in_place
    assert len([name for name in names(captured.graph) if name.startswith("npu.") and "_.default" in name]) == 1
    assert not any("copy_" in name or "slice_scatter" in name for name in names(captured.graph))


def test_a_start_before_the_beginning_counts_from_the_end():
    captured = capture(from_number, (numbers(2, 3, 9, 8), numbers(2, 3, 4, 8, seed=1), -5), dynamic=True)
    expected = captured.graph(*[each.clone() if isinstance(each, Tensor) else each for each in captured.inputs])
    fuse(captured.graph)
    got = captured.graph(*[each.clone() if isinstance(each, Tensor) else each for each in captured.inputs])
    assert torch.equal(got[0], expected[0])


def test_places_of_unlike_sizes_are_refused_with_a_reason():
    def form(cache, rows, lengths):
        cache[torch.arange(rows.shape[0])[:, None], :, lengths[:, None] + torch.arange(rows.shape[1])] = rows
        return cache * 2

    args = (numbers(2, 3, 9, 8), numbers(2, 4, 3, 8, seed=1), torch.tensor([2, 3]))
    outcome = fuse(capture(form, args, dynamic=True).graph)
    assert not outcome.chosen
    assert any("they are not proven to be distinct along" in each.reason for each in outcome.refusals)


# cost --------------------------------------------------------------------------------------------------------------

NPU = Options(target="ascend910_93", lower="torchair")


def write(cache: Tensor, rows: Tensor, start: Tensor) -> Tensor:
    return cache.index_copy(2, start + torch.arange(rows.shape[2]), rows)


@pytest.mark.parametrize("options", [Options(target="host", lower="eager"), NPU], ids=["host", "npu"])
def test_a_write_is_cheap_only_where_it_is_copied_back(options):
    def back(cache, rows, start):
        cache.copy_(write(cache, rows, start))
        return cache * 2

    args = (numbers(2, 3, 64, 8), numbers(2, 3, 4, 8, seed=1), torch.tensor(3))
    (candidate,) = fuse(capture(back, args).graph, options).chosen
    assert candidate.benefit > 0
    assert not fuse(capture(lambda c, r, s: write(c, r, s) * 2, args).graph, options).chosen


def test_a_write_that_goes_to_another_input_costs_the_copy():
    def into(which):
        def form(cache, rows, start, place):
            (cache if which else place).copy_(write(cache, rows, start))
            return cache * 2, place * 2

        return form

    args = (numbers(2, 3, 64, 8), numbers(2, 3, 4, 8, seed=1), torch.tensor(3), numbers(2, 3, 64, 8, seed=2))
    back, elsewhere = (fuse(capture(into(which), args).graph) for which in (True, False))
    assert back.in_place
    assert not elsewhere.in_place
    copied = 2 * args[0].numel() * args[0].element_size() / Target.named("host").bandwidth
    assert sum(each.benefit for each in back.chosen) - sum(each.benefit for each in elsewhere.chosen) >= copied


def test_both_writes_into_one_cache_count():
    def twice(cache, rows, start):
        cache.copy_(write(write(cache, rows, start), rows, start + 8))
        return cache * 2

    captured = capture(twice, (numbers(2, 3, 64, 8), numbers(2, 3, 4, 8, seed=1), torch.tensor(3)))
    outcome = fuse(captured.graph)
    assert len(outcome.chosen) == 2
    assert outcome.in_place


@pytest.mark.parametrize("whole", [torch.int32, torch.int64], ids=str)
def test_a_choice_outside_writes_what_was_there(whole: torch.dtype):
    def chosen(cache, rows, start):
        cache.copy_(torch.where(torch.arange(cache.shape[2])[:, None] == start, rows, cache))
        return cache * 2

    for start in (-1, 0, 255, 256):
        args = (numbers(2, 3, 256, 64), numbers(2, 3, 1, 64, seed=1), torch.tensor(start, dtype=whole))
        captured = capture(chosen, args)
        assert fuse(captured.graph).in_place
        got = [each.clone() for each in captured.inputs]
        captured.graph(*got)
        plain = args[0].clone()
        chosen(plain, *args[1:])
        assert any(torch.equal(each, plain) for each in got if each.shape == plain.shape)
