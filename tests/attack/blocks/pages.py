"""Caches in pages that a block table names: as rows, by heads, or in blocks of NZ; written to, and attended to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..writer import Writer
from .attention import heads
from .latent import Widths, absorbed, expanded, widths

BLOCKS_OF_PAGES, EACH, LANES = 9, 2, 16


@dataclass(frozen=True)
class Layout:
    """How a page lies: `dims` of pages of `count` heads and `width` lanes, what puts rows into them, what gathers them.

    Attributes:
        dims: (heads, width, size) -> dims of all pages.
        put: (pages, block, place, rows [T, N, D], width) -> a statement.
        gathered: (pages, table, width) -> rows [B, N, P · Size, D].
    """

    dims: Callable[[int, int, int], tuple[int, ...]]
    put: Callable[[str, str, str, str, int], str]
    gathered: Callable[[str, str, int], str]


LAYOUTS = (
    Layout(
        lambda n, d, size: (BLOCKS_OF_PAGES, size, n, d),
        lambda pages, block, place, rows, d: f"{pages}[{block}, {place}] = {rows}",
        lambda pages, table, d: f"{pages}[{table}].flatten(1, 2).transpose(1, 2)",
    ),
    Layout(
        lambda n, d, size: (BLOCKS_OF_PAGES, n, size, d),
        lambda pages, block, place, rows, d: f"{pages}[{block}, :, {place}] = {rows}",
        lambda pages, table, d: f"{pages}[{table}].transpose(1, 2).flatten(2, 3)",
    ),
    Layout(
        lambda n, d, size: (BLOCKS_OF_PAGES, n, d // LANES, size, LANES),
        lambda pages, block, place, rows, d: (
            f"{pages}[{block}, :, :, {place}] = {rows}.unflatten(-1, ({d // LANES}, {LANES}))"
        ),
        lambda pages, table, d: f"{pages}[{table}].permute(0, 2, 1, 4, 3, 5).flatten(2, 3).flatten(-2)",
    ),
)


def reached(w: Writer, table: str, size: int, queries: str) -> tuple[str, str]:
    """Lengths [B], and which keys [B, 1, S, P · Size] each of the last queries sees."""
    room = EACH * size
    lengths = w.let(f"{w.input(('B',), f'below {room - 7}', name='length')} + 7", "lengths")
    last = w.let(f"{lengths}[:, None] - {queries} + torch.arange({queries})", "last")
    return lengths, w.let(
        w.pick(
            f"torch.arange({room})[None, None, None] <= {last}[:, None, :, None]",
            f"(torch.arange({room}) < {last}.unsqueeze(-1) + 1).unsqueeze(1)",
        ),
        "seen",
    )


def written(w: Writer, layout: Layout, pages: str, rows: str, at: tuple[str, str], width: int) -> None:
    """Rows [B, S, N, D] at the slots of their tokens."""
    w.do(layout.put(pages, *at, f"{rows}.flatten(0, 1)", width))


def slots(w: Writer, table: str, lengths: str, size: int, queries: str) -> tuple[str, str]:
    """Block and place of each of the last tokens."""
    last = w.let(f"{lengths}[:, None] - {queries} + torch.arange({queries})", "last")
    block = w.let(f"{table}.gather(1, {last} // {size}).flatten()", "block")
    return block, w.let(f"({last} % {size}).flatten()", "place")


def paged_attention(w: Writer) -> None:
    """Grouped heads over gathered pages, which may be written to before."""
    (n, m), width = heads(w)
    size, layout = w.pick(4, 8, 16), w.pick(*LAYOUTS)
    q, table = w.take(("B", n, "S", width), "q"), w.input(("B", EACH), f"distinct {BLOCKS_OF_PAGES}", name="table")
    pages = [w.input(layout.dims(m, width, size), name=name) for name in ("keys", "values")]
    lengths, seen = reached(w, table, size, f"{q}.shape[2]")
    if w.maybe():
        at = slots(w, table, lengths, size, f"{q}.shape[2]")
        for each, name in zip(pages, ("k", "v"), strict=True):
            written(w, layout, each, w.take(("B", "S", m, width), name), at, width)
    k, v = (w.let(layout.gathered(each, table, width), "rows") for each in pages)
    w.fuses("attention", target="" if w.narrow else "host")
    if w.maybe():
        more = ", enable_gqa=True" if n > m else ""
        o = w.let(f"F.scaled_dot_product_attention({q}, {k}, {v}, attn_mask={seen}{more})", "o")
    else:
        scores = w.let(f"{q} @ {k}.repeat_interleave({n // m}, 1).mT * {width**-0.5}", "scores")
        p = w.let(f"{scores}.float().masked_fill(~{seen}, float('-inf')).softmax(-1).to({q}.dtype)", "p")
        o = w.let(f"{p} @ {v}.repeat_interleave({n // m}, 1)", "o")
    w.give(o, ("B", n, "S", width))


def paged_latent(w: Writer) -> None:
    """A latent and its rotated key in pages of their own, by one block table."""
    d, size, layout = widths(w), w.pick(4, 16), w.pick(*LAYOUTS)
    q = w.take(("B", d.heads, "S", d.nope + d.rope), "q")
    table = w.input(("B", EACH), f"distinct {BLOCKS_OF_PAGES}", name="table")
    _, seen = reached(w, table, size, f"{q}.shape[2]")
    latent, rope = (
        w.let(f"{layout.gathered(w.input(layout.dims(1, width, size), name='pages'), table, width)}.squeeze(1)", "rows")
        for width in (d.latent, lanes(d))
    )
    rope = rope if lanes(d) == d.rope else w.let(f"{rope}[..., :{d.rope}]", "rope")
    up = w.input((d.heads * (d.nope + d.value), d.latent), "matrix", name="up")
    w.fuses("latent_attention", "attention", target="host")
    w.give(w.pick(expanded, absorbed)(w, d, q, latent, rope, up, seen), ("B", d.heads, "S", d.value))


def lanes(d: Widths) -> int:
    """Lanes of a rotated key, at least those of one block of NZ."""
    return max(d.rope, LANES)


BLOCKS = (paged_attention, paged_latent)
