"""Writes in place: what is copied back over itself is not copied, and whoever reads the old cache reads it before."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, fx

from fusion.options import Options
from fusion.testing import capture

from .graphs import fuse, names, numbers

CACHE, ROWS, PLACES = numbers(2, 3, 9, 8), numbers(2, 3, 4, 8, seed=1), torch.tensor([7, 0, 2, 5])
START = torch.tensor(3)
NPU = Options(target="ascend910_93", lower="torchair")


def consecutive(cache: Tensor, rows: Tensor, start: Tensor) -> Tensor:
    cache.index_copy_(2, start + torch.arange(rows.shape[2]), rows)
    return cache


def checked(function, *args, options: Options | None = None, writes: int = 1) -> fx.GraphModule:
    """The fused graph, after results and every input have been compared with those of the plain one."""
    captured = capture(function, args)
    gm = fx.GraphModule(captured.graph, copy.deepcopy(captured.graph.graph))
    fuse(gm, *([options] if options else []))
    calls = [each.clone() for each in captured.inputs], [each.clone() for each in captured.inputs]
    expected, got = captured.graph(*calls[0]), gm(*calls[1])
    for have, want in zip((*got, *calls[1]), (*expected, *calls[0]), strict=True):
        assert torch.equal(have, want)
    in_place = [name for name in names(gm) if name.startswith("npu.") and "_.default" in name]
    assert len(in_place) == writes, gm.graph
    return gm


def copies(gm: fx.GraphModule) -> int:
    return sum("copy" in name or "index_put" in name for name in names(gm))


@pytest.mark.parametrize("options", [None, NPU], ids=["host", "npu"])
def test_a_write_that_is_copied_back_is_in_place(options):
    gm = checked(lambda c, r, s: consecutive(c, r, s) * 2, CACHE, ROWS, START, options=options)
    assert copies(gm) == 0


def test_a_cache_seen_through_a_transpose():
    def form(cache, rows, start):
        consecutive(cache.transpose(1, 2), rows, start)
        return cache * 2

    assert copies(checked(form, CACHE.transpose(1, 2).contiguous(), ROWS, START)) == 0


def test_slots_of_a_paged_cache():
    def form(cache, rows, slots):
        cache.view(-1, 8)[slots] = rows
        return cache * 2

    gm = checked(form, numbers(3, 4, 8), numbers(2, 8, seed=1), torch.tensor([7, 0]))
    assert copies(gm) == 0


def test_two_writes_one_after_the_other():
    def form(cache, rows, start, places):
        consecutive(cache, rows, start)
        between = cache * 3
        cache.index_copy_(2, places, rows)
        return between, cache * 2

    assert copies(checked(form, CACHE, ROWS, START, PLACES, writes=2)) == 0


def test_who_reads_the_old_cache_reads_it_before():
    def form(cache, rows, start):
        old = cache * 3
        return consecutive(cache, rows, start) * 2, old

    assert copies(checked(form, CACHE, ROWS, START)) == 0


def test_a_reader_that_stands_behind_is_put_before():
    captured = capture(lambda c, r, s: (c * 3, consecutive(c, r, s) * 2), (CACHE, ROWS, START))
    graph = captured.graph.graph
    (old,) = [node for node in graph.nodes if node.args[1:] == (3,)]
    list(graph.nodes)[-3].append(old)
    expected = captured.graph(*[each.clone() for each in captured.inputs])
    fuse(captured.graph)
    assert copies(captured.graph) == 0
    got = captured.graph(*[each.clone() for each in captured.inputs])
    assert all(map(torch.equal, got, expected))


def test_an_old_value_that_is_needed_afterwards_keeps_the_copy():
    """What is read depends on the write and on the old cache: no order gives both."""

    def form(cache, rows, start):
        written = cache.index_copy(2, start + torch.arange(rows.shape[2]), rows)
        difference = written - cache
        cache.copy_(written)
        return difference

    gm = checked(form, CACHE, ROWS, START, writes=0)
    assert "aten.copy_.default" in names(gm)


def test_a_result_that_is_another_tensor_of_the_caller_stays_another():
    def form(cache, rows, start):
        written = cache.index_copy(2, start + torch.arange(rows.shape[2]), rows)
        cache.copy_(written)
        return written

    checked(form, CACHE, ROWS, START, writes=0)


def test_rows_that_are_read_from_the_same_cache():
    def form(cache, start):
        cache.index_copy_(2, start + torch.arange(4), cache[:, :, :4])
        return cache * 2

    captured = capture(form, (CACHE, START))
    expected = [each.clone() for each in captured.inputs]
    captured.graph(*expected)
    fuse(captured.graph)
    got = [each.clone() for each in captured.inputs]
    captured.graph(*got)
    assert all(map(torch.equal, got, expected))


def test_a_second_pass_changes_nothing():
    gm = checked(lambda c, r, s: consecutive(c, r, s) * 2, CACHE, ROWS, START)
    before = [node.format_node() for node in gm.graph.nodes]
    assert not fuse(gm).chosen
    assert [node.format_node() for node in gm.graph.nodes] == before


def test_the_contract_speaks_of_inputs():
    from fusion.stages.verify import contract

    captured = capture(lambda c, r, s: consecutive(c, r, s) * 2, (CACHE, ROWS, START))
    before = contract(captured.graph.graph)
    assert len(before.written) == 1
    fuse(captured.graph)
    assert contract(captured.graph.graph) == before
