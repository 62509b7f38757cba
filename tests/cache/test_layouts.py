"""Pages as operators are told that they lie: sizes that differ, sizes that are equal, and what only looks alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fusion import Example
from fusion.options import Options
from fusion.testing import Trial, means_what_it_says, trial
from tests.examples.inputs import Inputs, normal

from .layouts import HOST, RULES, UNEQUAL, Shape, Sizes, applied, calls, tried

pytestmark = pytest.mark.rotates(12)

FIA = "npu.npu_fused_infer_attention_score_v2"
Read = Callable[[Tensor, Tensor], Tensor]


def reads_pages(t: Trial) -> bool:
    """Whether the pages that the model gathers are read by its block table."""
    return any("Pages" in each.match.form or each.match.rule.name == "page_gather" for each in t.outcome.chosen)


# pages of grouped heads -----------------------------------------------------------------------------------------------


def rows(s: Sizes) -> tuple[Shape, Shape, Read]:
    """What a page is, what the operator is told of it, and rows [B, N, T, D] of those that a table names."""
    shape = s.size, s.heads, s.width
    return shape, (s.size, s.heads * s.width), lambda x, table: x[table].flatten(1, 2).transpose(1, 2)


def rows_by_number(s: Sizes) -> tuple[Shape, Shape, Read]:
    def read(x: Tensor, table: Tensor) -> Tensor:
        numbers = (table[:, :, None] * s.size + torch.arange(s.size)).flatten(1)
        return x.flatten(0, 1)[numbers].transpose(1, 2)

    return *rows(s)[:2], read


def rows_by_place(s: Sizes) -> tuple[Shape, Shape, Read]:
    def read(x: Tensor, table: Tensor) -> Tensor:
        at = torch.arange(s.keys)
        return x[table[:, at // s.size], at % s.size].transpose(1, 2)

    return *rows(s)[:2], read


def heads(s: Sizes) -> tuple[Shape, Shape, Read]:
    shape = s.heads, s.size, s.width
    return shape, shape, lambda x, table: x[table].transpose(1, 2).reshape(-1, s.heads, s.keys, s.width)


def _told_of_lines(s: Sizes) -> Shape:
    return 1, s.lines, s.size, s.line


def lines(s: Sizes) -> tuple[Shape, Shape, Read]:
    def read(x: Tensor, table: Tensor) -> Tensor:
        return x[table].squeeze(2).transpose(2, 3).reshape(-1, 1, s.keys, s.width)

    return (1, s.lines, s.size, s.line), _told_of_lines(s), read


def lines_without_heads(s: Sizes) -> tuple[Shape, Shape, Read]:
    def read(x: Tensor, table: Tensor) -> Tensor:
        return x[table].permute(0, 1, 3, 2, 4).reshape(-1, 1, s.keys, s.width)

    return (s.lines, s.size, s.line), _told_of_lines(s), read


def lines_turned_before(s: Sizes) -> tuple[Shape, Shape, Read]:
    def read(x: Tensor, table: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(2)[table].flatten(1, 2).unsqueeze(1)

    return (s.lines, s.size, s.line), _told_of_lines(s), read


def attended(s: Sizes, read: Read) -> Callable[..., Tensor]:
    """One or more queries up to a length of each sequence."""

    def forward(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        k, v = (read(pages, table).repeat_interleave(s.groups, 1) for pages in (keys, values))
        at = lengths[:, None, None, None] - 1 + torch.arange(s.queries)[:, None]
        scores = (q @ k.transpose(-2, -1) * s.width**-0.5).masked_fill(torch.arange(s.keys) > at, -math.inf)
        return scores.softmax(-1) @ v

    return forward


def paged(s: Sizes, page: Shape) -> Inputs:
    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        shapes = (s.batch, s.heads * s.groups, s.queries, s.width), (s.blocks, *page), (s.blocks, *page)
        given = (normal(n, *shape).to(dtype) for n, shape in enumerate(shapes))
        return *given, *named(s)

    return make


def named(s: Sizes) -> tuple[Tensor, Tensor]:
    """A table of pages, none of them in its own place, and lengths that differ."""
    table = (torch.arange(s.batch * s.pages) * 5 + 2).reshape(s.batch, s.pages) % s.blocks
    return table, (torch.arange(s.batch) * 5 + s.keys // 2) % s.keys + 1


OF_HEADS = {
    "unequal": UNEQUAL,
    "rows as many as heads": replace(UNEQUAL, heads=4, size=4),
    "rows as many as lanes": replace(UNEQUAL, heads=2, size=16, width=16),
    "blocks, rows, heads, pages, sequences": replace(UNEQUAL, batch=4, heads=4, blocks=4, pages=4, size=4),
    "one page": replace(UNEQUAL, batch=1, pages=1, queries=3),
    "one head": replace(UNEQUAL, heads=1, queries=2),
}
ONE = replace(UNEQUAL, heads=1, groups=4)
OF_LINES = {
    "unequal": ONE,
    "several queries": replace(ONE, queries=3),
    "rows as many as lines": replace(ONE, size=5),
    "rows as many as lanes of a line": replace(ONE, size=16, width=48),
    "rows, lines and lanes": replace(ONE, size=16, width=256),
    "lines as many as query heads": replace(ONE, width=64, size=4),
    "one page of one sequence": replace(ONE, batch=1, pages=1),
    "one block": replace(ONE, blocks=1, pages=2),
    "one line": replace(ONE, width=16),
}
PAGES = [
    *((form, name, s) for form in (rows, rows_by_number, rows_by_place, heads) for name, s in OF_HEADS.items()),
    *((f, name, s) for f in (lines, lines_without_heads, lines_turned_before) for name, s in OF_LINES.items()),
]


@pytest.mark.parametrize(("form", "name", "s"), PAGES, ids=lambda each: getattr(each, "__name__", None))
def test_pages_of_heads(form: Callable[[Sizes], tuple[Shape, Shape, Read]], name: str, s: Sizes):
    page, told, read = form(s)
    t = tried("attention", attended(s, read), paged(s, page))
    (call,) = calls(t, FIA)
    assert reads_pages(t)
    key = tuple(call.args[1].meta["val"].shape)
    whole = (s.blocks, s.size, s.heads * s.width)  # where there is one head, or one line, both say the same
    alike = s.heads == 1 and (form is heads or told[0] == told[1] == 1)
    assert key == (s.blocks, *told) or (alike and key == whole)


@pytest.mark.parametrize("queries", [1, 2], ids=["step", "queries"])
@pytest.mark.parametrize("size", [16, 32, 128])
@pytest.mark.parametrize("target", ["host", "ascend910_93"])
def test_lines_of_one_head_at_the_sizes_of_chips(target: str, size: int, queries: int):
    """A chip reads such lines of a latent alone: there their rows are gathered before."""
    s = replace(ONE, size=size, width=128, queries=queries)
    page, _, read = lines(s)
    example = Example("lines", attended(s, read), paged(s, page))
    t = trial(RULES["attention"], example, torch.bfloat16, options=Options(target=target, lower="eager"))
    means_what_it_says(t)
    assert reads_pages(t) == (target == "host")


def lanes_first(s: Sizes) -> Read:
    return lambda x, table: x[table].squeeze(2).permute(0, 1, 3, 4, 2).reshape(-1, 1, s.keys, s.width)


def rows_before_pages(s: Sizes) -> Read:
    return lambda x, table: x[table].squeeze(2).permute(0, 3, 1, 2, 4).reshape(-1, 1, s.keys, s.width)


def lines_read_as_rows(s: Sizes) -> Read:
    return lambda x, table: x[table].reshape(-1, 1, s.size, s.pages, s.width).transpose(2, 3).flatten(2, 3)


@pytest.mark.parametrize("read", [lanes_first, rows_before_pages, lines_read_as_rows])
@pytest.mark.parametrize("name", ["unequal", "rows as many as lines", "rows, lines and lanes"])
def test_other_orders_are_no_lines(read: Callable[[Sizes], Read], name: str):
    s = OF_LINES[name]
    assert not reads_pages(tried("attention", attended(s, read(s)), paged(s, lines(s)[0])))


def heads_turned_before(s: Sizes) -> Read:
    """Lines of several heads."""
    return lambda x, table: (
        x.transpose(1, 2).flatten(2)[table].flatten(1, 2).unflatten(-1, (s.heads, -1)).transpose(1, 2)
    )


def longer_pages(s: Sizes) -> Read:
    """Pages of more rows than their lines hold."""
    return lambda x, table: x.transpose(1, 2).flatten(2)[table].reshape(s.batch, 1, s.keys, s.width)


def rows_seen_as_lines(s: Sizes) -> Read:
    """Rows of lines, as if they lay line by line."""

    def read(x: Tensor, table: Tensor) -> Tensor:
        pages = x[table].reshape(s.batch, s.pages, s.lines, s.size, s.line)
        return pages.transpose(2, 3).reshape(s.batch, 1, s.keys, s.width)

    return read


@pytest.mark.parametrize(
    ("read", "s", "page"),
    [
        (heads_turned_before, replace(ONE, heads=2, groups=1, width=32), (4, 8, 16)),
        (longer_pages, replace(ONE, width=16), (2, 4, 16)),
        (rows_seen_as_lines, ONE, (8, 5, 16)),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_lines_of_other_pages_are_not_told_as_such(read: Callable[[Sizes], Read], s: Sizes, page: Shape):
    t = tried("attention", attended(s, read(s)), paged(s, page))
    assert not reads_pages(t) or {call.args[1].meta["val"].dim() for call in calls(t, FIA)} == {3}


def test_short_lines_are_not_those_of_the_operator():
    s = replace(ONE, line=8)
    t = tried("attention", attended(s, lines(s)[2]), paged(s, lines(s)[0]))
    assert not reads_pages(t)
    example = Example("short lines", attended(s, lines(s)[2]), paged(s, lines(s)[0]))
    t = trial(RULES["attention"], example, torch.float32, options=replace(HOST, fuel=0))
    assert any("read as lines of 8 lanes" in each.reason for each in t.outcome.refusals)


def places_by_row(at: Tensor, table: Tensor, s: Sizes) -> tuple[Tensor, Tensor]:
    """Keys by row, sequences by column: as many of both."""
    return table[:, at // s.size], (at % s.size)[:, None]


def sequences_by_column(at: Tensor, table: Tensor, s: Sizes) -> tuple[Tensor, Tensor]:
    """Row i has the i-th key of every sequence."""
    return table[torch.arange(s.batch), (at // s.size)[:, None]], at % s.size


@pytest.mark.parametrize("index", [places_by_row, sequences_by_column])
@pytest.mark.parametrize("rule", ["attention", "page_gather"])
def test_places_belong_to_the_dim_along_which_they_vary(index: Callable[..., tuple[Tensor, Tensor]], rule: str):
    s = replace(UNEQUAL, batch=4, pages=2, size=2, width=16)

    def read(pages: Tensor, table: Tensor) -> Tensor:
        return pages[index(torch.arange(s.keys), table, s)].transpose(1, 2)

    t = tried(rule, attended(s, read), paged(s, rows(s)[0]))
    assert not reads_pages(t)
    assert applied(t) == (rule == "attention")


# gathered pages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [rows, rows_by_number, heads, lines_without_heads], ids=lambda each: each.__name__)
@pytest.mark.parametrize("equal", [False, True], ids=["unequal", "equal"])
def test_gathered_pages(form: Callable[[Sizes], tuple[Shape, Shape, Read]], equal: bool):
    """Whole pages are copied in their own order, whatever the model makes of it."""
    s = replace(ONE if form is lines_without_heads else UNEQUAL, width=32, size=4)
    s = replace(s, size=2, batch=2, pages=2, heads=min(s.heads, 2)) if equal else s
    page, _, read = form(s)

    def forward(keys: Tensor, values: Tensor, table: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        return read(keys, table).cumsum(2), read(values, table).cumsum(3)

    whole = paged(s, page)
    t = tried("page_gather", forward, lambda dtype: whole(dtype)[1:])
    assert calls(t, "npu.npu_gather_pa_kv_cache")


# latents --------------------------------------------------------------------------------------------------------------

RANK, TURNED = 48, 32
LATENT_PAGES = {
    "rows": (lambda width, s: (s.size, width), lambda x, table: x[table].flatten(1, 2)),
    "lines": (
        lambda width, s: (width // 16, s.size, 16),
        lambda x, table: x[table].transpose(2, 3).flatten(3).flatten(1, 2),
    ),
    "lines of a head": (
        lambda width, s: (1, width // 16, s.size, 16),
        lambda x, table: x[table].squeeze(2).transpose(2, 3).flatten(3).flatten(1, 2),
    ),
    "lines turned before": (
        lambda width, s: (width // 16, s.size, 16),
        lambda x, table: x.transpose(1, 2).flatten(2)[table].flatten(1, 2),
    ),
}
OF_LATENTS = {
    "unequal": replace(UNEQUAL, heads=4),
    "rows as many as lines": replace(UNEQUAL, heads=2, size=3),
    "rows as many as lanes of a line": replace(UNEQUAL, size=16, heads=2),
    "queries as many as heads": replace(UNEQUAL, heads=3, queries=3),
    "one sequence, queries as many as heads": replace(UNEQUAL, batch=1, heads=3, queries=3, blocks=3),
    "all of them": replace(UNEQUAL, batch=3, pages=3, heads=3, queries=3, size=3, blocks=3),
}


def absorbed(s: Sizes, read: Read) -> Callable[..., Tensor]:
    """The last queries of every sequence."""

    def forward(q: Tensor, rotated: Tensor, latents: Tensor, ropes: Tensor, table: Tensor) -> Tensor:
        latent, rope = (read(pages, table).unsqueeze(1) for pages in (latents, ropes))
        scores = (q @ latent.transpose(-2, -1) + rotated @ rope.transpose(-2, -1)) / 8
        unseen = torch.arange(s.keys) > torch.arange(s.queries)[:, None] + s.keys - s.queries
        y = scores.masked_fill(unseen, -math.inf).softmax(-1) @ latent
        return y.transpose(1, 2).flatten(2) + 1

    return forward


def latent_inputs(s: Sizes, pages: tuple[Shape, Shape]) -> Inputs:
    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        queries = ((s.batch, s.heads, s.queries, width) for width in (RANK, TURNED))
        shapes = (*queries, *((s.blocks, *page) for page in pages))
        return *(normal(n, *shape).to(dtype) for n, shape in enumerate(shapes)), named(s)[0]

    return make


ATB = replace(HOST, disable=frozenset({"npu_fused_infer_attention_score_v2", "npu_fused_infer_attention_score"}))
"""The options that leave attention over a latent to atb."""


@pytest.mark.parametrize("by_atb", [False, True])
@pytest.mark.parametrize("lies", LATENT_PAGES)
@pytest.mark.parametrize("name", OF_LATENTS)
def test_pages_of_a_latent(by_atb: bool, lies: str, name: str):
    s = OF_LATENTS[name]
    page, read = LATENT_PAGES[lies]
    options = ATB if by_atb else replace(HOST, disable=frozenset({"npu_multi_head_latent_attention"}))
    rule = "latent_attention_atb" if by_atb else "latent_attention"
    t = tried(rule, absorbed(s, read), latent_inputs(s, (page(RANK, s), page(TURNED, s))), options)
    assert applied(t)
    if by_atb:
        (call,) = calls(t, "atb.npu_multi_head_latent_attention")
        assert call.kwargs["cache_mode"] == ("krope_ctkv" if lies == "rows" else "nzcache")
        return
    (call,) = calls(t, FIA)
    assert reads_pages(t)
    page_of = (s.size, RANK) if lies == "rows" else (1, RANK // 16, s.size, 16)
    assert tuple(call.args[1].meta["val"].shape) == (s.blocks, *page_of)


@pytest.mark.parametrize(("blocks", "size", "whole"), [(6, 8, True), (2, 2, True), (3, 16, False), (1, 4, False)])
def test_pages_in_their_own_order(blocks: int, size: int, whole: bool):
    """As many pages for every sequence: one that ends inside a page has no block table."""
    s = replace(UNEQUAL, heads=4, blocks=blocks, size=size, pages=1)
    keys = blocks * size // s.batch

    def forward(q: Tensor, rotated: Tensor, latents: Tensor, ropes: Tensor, _: Tensor) -> Tensor:
        latent, rope = (x.permute(0, 2, 1, 3).reshape(s.batch, 1, keys, -1) for x in (latents, ropes))
        scores = (q @ latent.transpose(-2, -1) + rotated @ rope.transpose(-2, -1)) / 8
        return scores.softmax(-1) @ latent

    page = LATENT_PAGES["lines"][0]
    t = tried("latent_attention_atb", forward, latent_inputs(s, (page(RANK, s), page(TURNED, s))), ATB)
    modes = [call.kwargs["cache_mode"] for call in calls(t, "atb.npu_multi_head_latent_attention")]
    assert (modes == ["nzcache"]) == whole


def test_the_result_lies_as_the_operator_says():
    """One sequence whose heads lie first in memory, decomposed: a view of the result needs no copy."""
    s = OF_LATENTS["one sequence, queries as many as heads"]
    page, read = LATENT_PAGES["rows"]

    def forward(*given: Tensor) -> Tensor:
        q, rotated, latents, ropes, table = given
        latent, rope = (read(pages, table) for pages in (latents, ropes))
        scores = torch.einsum("bnsc,btc->bnst", q, latent) + torch.einsum("bnsr,btr->bnst", rotated, rope)
        return torch.einsum("bnst,btc->bnsc", (scores / 8).softmax(-1), latent).transpose(1, 2).flatten(2)

    example = Example("decomposed", forward, latent_inputs(s, (page(RANK, s), page(TURNED, s))))
    t = trial(RULES["latent_attention_atb"], example, torch.float32, "decomposed", ATB)
    assert applied(t)
    means_what_it_says(t)
