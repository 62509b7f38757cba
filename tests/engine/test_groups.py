"""Sorts, counts, sums into rows and products of groups: what is one value, and what is none."""

from __future__ import annotations

import torch

from tests.engine.graphs import said, value

LIST = torch.tensor([3, 1, 2, 1])
ROWS = torch.arange(8.0).view(4, 2)


def counted(x, bins, low, high):
    return torch.histc(x.float(), bins=bins, min=low, max=high)


def test_sorts_are_one_where_both_keep_the_order_of_equals_or_none_does():
    by_sort, by_argsort = (lambda x: x.sort()[1]), (lambda x: x.argsort())
    assert said(value(by_sort, LIST)) == said(value(by_argsort, LIST)) == "ascending_index(arg0_1, 0, False)"
    assert said(value(lambda x: x.argsort(stable=True), LIST)) == "ascending_index(arg0_1, 0, True)"
    assert said(value(lambda x: x.sort()[0], LIST)) == "ascending(arg0_1, 0, False)"


def test_bins_of_one_whole_number_each_are_counts():
    for high in (3, 4):
        assert value(lambda x, high=high: counted(x, 4, 0, high), LIST).op == "histogram"
    for bins, low, high in ((4, 0, 5), (4, 1, 4), (8, 0, 4)):
        assert value(lambda x, how=(bins, low, high): counted(x, *how), LIST).op == "aten.histc.default"
    assert value(lambda x: torch.histc(x, bins=4, min=0, max=3), ROWS).op == "aten.histc.default"


def test_rows_are_added_by_an_index_however_it_is_written():
    forms = (
        lambda x, at: torch.zeros(5, 2).index_add(0, at, x),
        lambda x, at: torch.zeros(5, 2).scatter_add(0, at[:, None].expand(-1, 2), x),
        lambda x, at: torch.zeros(5, 2).index_put((at,), x, accumulate=True),
    )
    for level in ("composite", "core"):
        found = [value(form, ROWS, LIST, level=level) for form in forms]
        assert {each.op for each in found} == {"add_rows"}
        assert {tuple(arg.shape for arg in each.args) for each in found} == {((5, 2), (4, 2), (4,))}
    others = (
        lambda x, at: torch.zeros(5, 2).index_add(0, at, x, alpha=2),
        lambda x, at: torch.zeros(4, 5).index_add(1, at[:2], x),
        lambda x, at: torch.zeros(5, 2).scatter_add(0, at.view(2, 2).repeat(2, 1), x),
    )
    assert all(value(form, ROWS, LIST).op != "add_rows" for form in others)


def test_all_numbers_are_repeated_where_no_dim_is_named():
    line = torch.arange(4).view(2, 2)
    by_all, by_dim = (lambda x: x.repeat_interleave(3)), (lambda x: x.flatten().repeat_interleave(3, dim=0))
    assert said(value(by_all, line)) == said(value(by_dim, line))
