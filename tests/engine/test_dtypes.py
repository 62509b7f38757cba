"""Numbers are kept as torch keeps them, and nothing that a narrow dtype may change is passed over."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from sympy import Symbol

from fusion.analysis import dtypes
from fusion.analysis.constant_folding import Folder
from fusion.analysis.intervals import bounds, is_exact
from fusion.graph import Algebra
from fusion.testing import capture
from patterns.cache.read_block_tables import gathers
from patterns.cache.read_writes import Writes

from .graphs import fuse, numbers, read_graph, value

KNOWN = tuple(dtypes.KINDS)


def test_several_operands_are_computed_with_in_the_dtype_that_torch_takes():
    a = Algebra()
    for first, second, ranks in product(KNOWN, KNOWN, [(1, 1), (1, 0), (0, 1), (0, 0)]):
        tensors = [torch.zeros((2,) * rank, dtype=dtype) for dtype, rank in zip((first, second), ranks, strict=True)]
        values = [a.make("input", (), (str(n),), tuple(each.shape), each.dtype) for n, each in enumerate(tensors)]
        assert dtypes.common(*values) is torch.result_type(*tensors)
        for number in (True, 3, 0.5):
            assert dtypes.common(values[0], number) is torch.result_type(tensors[0], number)


@pytest.mark.parametrize("dtype", KNOWN, ids=str)
def test_numbers_are_held_as_torch_holds_them(dtype):
    whole = torch.tensor([0, 1, -1, 127, 128, 255, 256, 2049, 32768, 65537, 2**24 + 1, 2**31, -(2**31) - 1, 2**40 + 3])
    parts = torch.tensor([0.0, -0.5, 0.1, 2.7, -2.7, 1.00390625, 3.01171875, 65519.0, 65520.0, 1e-9, 1e30, torch.inf])
    for source in (whole, parts.double(), whole > 0):
        held = dtypes.rounded_to(source.numpy(), dtype)
        if dtype in dtypes.INTEGERS and source.dtype is torch.float64:
            assert held is None  # some lie beyond
            source = source[:6]
            held = dtypes.rounded_to(source.numpy() % 3, dtype)
            source = source % 3
        expected = source.to(dtype)
        assert held is not None
        assert np.array_equal(held, (expected.double() if expected.is_floating_point() else expected).numpy())
        for each, kept in zip(source.tolist(), expected.tolist(), strict=True):
            assert dtypes.rounded_number(each, dtype) == kept


@pytest.mark.parametrize("wide", KNOWN, ids=str)
def test_a_dtype_holds_another_if_all_its_numbers_come_back(wide):
    for narrow in dtypes.INTEGERS:
        limits = torch.iinfo(narrow)
        ends = torch.tensor([limits.min, limits.min + 1, -1 if limits.min else 1, 0, limits.max - 1, limits.max])
        kept = ends.to(narrow).to(wide)
        exact = wide is not torch.bool and kept.tolist() == ends.tolist()
        assert dtypes.holds(wide, narrow) == exact


def test_a_dtype_that_is_not_known_holds_no_other():
    assert dtypes.holds(torch.float32, torch.bfloat16)
    assert not dtypes.holds(torch.bfloat16, torch.float32)
    assert not dtypes.holds(torch.uint16, torch.uint8)


@pytest.mark.parametrize(("number", "dtype"), [(1e30, torch.int32), (0.1, torch.float8_e4m3fn), (1, None)])
def test_what_torch_leaves_open_is_not_known(number, dtype):
    assert dtypes.rounded_number(number, dtype) is None
    assert not dtypes.is_exact(number, dtype)


def test_what_is_no_whole_number_has_no_bounds():
    a, size = Algebra(), Symbol("s", positive=True, integer=True)
    x = a.make("input", (), ("x",), (3,), torch.float32)
    assert bounds(x) == bounds(a.shift(x, 1)) == (-torch.inf, torch.inf)
    assert not is_exact(a.shift(x, 1))
    assert bounds(a.make("number", (), (size,), (), torch.int64)) == (0, torch.inf)
    assert bounds(a.make("number", (), (size - 5,), (), torch.int64)) == (-torch.inf, torch.inf)


def test_only_casts_between_floats_of_16_bits_and_more_round():
    a = Algebra()
    for held, to, rounds in (
        (torch.float32, torch.bfloat16, True),
        (torch.int32, torch.float32, False),
        (torch.float32, torch.int32, False),
        (torch.float32, torch.float8_e4m3fn, False),
    ):
        assert dtypes.is_rounding(a.cast(a.make("input", (), ("x",), (3,), held), to)) == rounds
    assert dtypes.holds(torch.float16, torch.bool)
    assert not dtypes.is_exact(2049, torch.float16)
    assert dtypes.is_exact(float("nan"), torch.float16)


@pytest.mark.parametrize("place", [3, -4])
def test_an_index_beyond_the_end_is_left_to_the_model(place):
    a = Algebra()
    line = a.make("arange", (), (0, 1), (3,), torch.int64)
    index = a.make("constant", (), ((place, 0),), (2,), torch.int64)
    assert Folder().fold(a.make("index", (line, index), (0,), (2,), torch.int64)) is None


def test_fractions_do_not_grow_by_whole_steps():
    a = Algebra()
    assert Folder().steps(a.make("arange", (), (0.5, 1), (3,), torch.float64)) is None


def test_what_may_wrap_round_is_bounded_by_its_dtype_alone():
    assert bounds(value(lambda x: (x % 100).to(torch.int8) + 27, torch.tensor([3]))) == (27, 126)
    assert bounds(value(lambda x: (x % 100).to(torch.int8) + 29, torch.tensor([3]))) == (-128, 127)
    assert bounds(value(lambda x: -(x % 100).to(torch.uint8), torch.tensor([3]))) == (0, 255)
    assert bounds(value(lambda x: (x % 2 == 0).to(torch.uint8), torch.tensor([3]))) == (0, 1)
    assert is_exact(value(lambda x: (x + 2**20) * 2**10, torch.tensor([3])))
    assert not is_exact(value(lambda x: x * 2**20, torch.tensor([3])))


@pytest.mark.parametrize(("dtype", "exact"), [(torch.int64, True), (torch.int32, True), (torch.int16, False)], ids=str)
def test_positions_of_a_symbolic_size_fit_from_int32_on(dtype, exact):
    captured = capture(lambda x: torch.arange(x.shape[0], dtype=dtype) + x[0], (torch.arange(9),), dynamic=True)
    graph = read_graph(captured.graph.graph)
    (counted,) = (each for each in graph.value_of.values() if getattr(each, "op", "") == "arange")
    assert is_exact(counted) == exact


# what is passed over -----------------------------------------------------------------------------------------------


def _gathers(graph):
    """Whether pages that a table names are gathered."""
    return bool(graph.readings.all("gathered_pages"))


def paged(narrow, size=4):
    """Two caches of pages that one table gathers, its numbers or the places cast on the way."""

    def form(pages, more, table):
        t = torch.arange(table.shape[1] * size)
        block = narrow(table[:, t // size])
        return pages[block, t % size], more[block, t % size]

    return form


@pytest.mark.parametrize(
    ("narrow", "read"),
    [
        (lambda block: block, True),
        (lambda block: block.int(), False),
        (lambda block: block.to(torch.int8).long(), False),
        (lambda block: block.to(torch.float16).long(), False),
    ],
)
@pytest.mark.rotates(6)
def test_numbers_of_pages_are_not_taken_from_before_a_cast_that_changes_them(narrow, read):
    table = torch.tensor([[1, 0, 2], [3, 5, 4]])
    graph = read_graph(capture(paged(narrow), (numbers(6, 4, 8), numbers(6, 4, 8), table)).graph.graph)
    assert _gathers(graph) == read


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64], ids=str)
def test_places_in_pages_are_counted_as_their_dtype_counts(dtype):
    def form(pages, more, table):
        place = torch.arange(300).to(dtype).long()
        return pages[table[:, :, None], place], more[table[:, :, None], place]

    args = (numbers(6, 300, 8), numbers(6, 300, 8), torch.tensor([[1, 0], [3, 5]]))
    graph = read_graph(capture(form, args).graph.graph)
    assert _gathers(graph) == (dtype is torch.int64)


def test_rows_that_int32_cannot_count_name_no_pages():
    a = Algebra()
    for dtype, rows in ((torch.int32, 2**31), (torch.int32, 2**31 + 16), (torch.int64, 2**31 + 16)):
        table = a.make("input", (), ("table", 0), (2, 3), dtype)
        line = a.cast(a.make("arange", (), (0, 1), (16,), torch.int64), dtype)
        index = a.add(a.reshape(a.scale(table, 16), (2, 3, 1)), a.reshape(line, (1, 1, 16)))
        source = a.make("input", (), (f"rows{rows}", 0), (rows, 8), torch.float16)
        gathered = a.make("index", (source, index), (0,), (2, 3, 16, 8), torch.float16)
        found = list(gathers(a, Folder(), gathered, 2, 48))
        assert [each.size for each in found if each.table is table] == [16] * (dtype is torch.int64 or rows == 2**31)


def test_slots_are_counted_in_a_dtype_that_holds_them():
    a = Algebra()
    for blocks, wide in ((2**20, torch.int32), (2**28, torch.int64)):
        cache = a.make("input", (), ("cache", 0), (blocks, 16, 8), torch.float16)
        rows = a.make("input", (), ("rows", 0), (5, 8), torch.float16)
        slots = a.make("input", (), ("slots", 0), (5,), torch.int32)
        block = a.make("floor_divide", (a.shift(slots, 1),), (16,), (5,), torch.int32)
        place = a.make("remainder", (slots,), (16,), (5,), torch.int32)
        written = a.make("write_rows", (cache, rows, block, place), (0,), cache.shape, torch.float16)
        _, slot = Writes(a, Folder(), {cache}, {}).read(written)
        assert slot.captures["slots"].dtype is wide


def test_places_that_a_row_lists_are_those_after_a_cast_that_changes_them():
    def form(narrow):
        return lambda x, places: (x * 1.5).scatter(-1, narrow(places), 0.0)

    args = (numbers(3, 8), torch.tensor([[1, 0], [3, 5], [2, 6]]))
    assert value(form(lambda i: i), *args).args[0].arg.op == "input"
    assert value(form(lambda i: i.int().long()), *args).args[0].arg.op == "cast"
    chosen = value(lambda x: (x * 1.5).scatter(-1, x.topk(2).indices.int().long(), 0.0), args[0]).args[0]
    assert chosen.arg.op == "largest_index"


@pytest.mark.parametrize("start", [0, 200, 254, 255])
def test_a_position_in_bytes_does_not_wrap_round_where_it_is_moved(start):
    def moved(cache, rows, start):
        cache.copy_(torch.where((torch.arange(cache.shape[2]) - 3)[:, None] == start, rows, cache))
        return cache * 2

    args = (numbers(2, 3, 300, 8), numbers(2, 3, 1, 8, seed=1), torch.tensor(start, dtype=torch.uint8))
    captured = capture(moved, args)
    assert fuse(captured.graph).chosen
    got = [each.clone() for each in captured.inputs]
    captured.graph(*got)
    plain = args[0].clone()
    moved(plain, *args[1:])
    assert any(torch.equal(each, plain) for each in got if each.shape == plain.shape)
