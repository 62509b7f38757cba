"""What stands before latent attention: layers in floats or int8, norms, rotations, and rows that are stored."""

from __future__ import annotations

from ..writer import Writer
from .latent import Widths, absorbed, expanded
from .norms import normed
from .pages import BLOCKS_OF_PAGES, EACH, LAYOUTS, reached, slots, written
from .quant import product, quantised

SMALL, LARGE = Widths(2, 16, 16, 32, 16), Widths(2, 128, 64, 512, 128)
HIDDEN, QUERIES = {SMALL: 64, LARGE: 1024}, {SMALL: 32, LARGE: 1536}
ROOM = 16


def layer(w: Writer, x: str, wide: int, rows: int, int8: bool) -> str:
    """One linear layer."""
    if int8:
        return product(w, *quantised(w, x), wide, rows, f"{x}.dtype")
    weight = w.input((rows, wide), "matrix", name="w")
    return w.let(w.pick(f"F.linear({x}, {weight})", f"{x} @ {weight}.t()"))


def turned(w: Writer, x: str, cos: str, sin: str) -> str:
    """Pairs of lanes, rotated; the first of each pair in the first half."""
    if w.maybe():
        x = w.let(f"{x}.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)")
        a, b = w.both(f"{x}.chunk(2, dim=-1)", 2, "a")
        return w.let(f"{x} * {cos} + torch.cat((-{b}, {a}), dim=-1) * {sin}", "turned")
    half = f"{x}.shape[-1] // 2"
    c, s = w.let(f"{cos}[..., :{half}]", "c"), w.let(f"{sin}[..., :{half}]", "s")
    a, b = w.let(f"{x}[..., ::2]", "a"), w.let(f"{x}[..., 1::2]", "b")
    return w.let(f"torch.cat(({a} * {c} - {b} * {s}, {b} * {c} + {a} * {s}), -1)", "turned")


def tables(w: Writer, d: Widths) -> tuple[str, str]:
    """cos and sin [B, S, Dr] of equal halves."""
    angle = w.input(("B", "S", d.rope // 2), name="angle")
    both = w.let(f"torch.cat(({angle}, {angle}), -1)", "both")
    return w.let(f"{both}.cos()", "cos"), w.let(f"{both}.sin()", "sin")


def prolog(w: Writer) -> None:
    """Hidden states to attention, all in one."""
    d = w.pick(SMALL, SMALL, SMALL, LARGE)
    int8 = w.maybe(3)
    wide, queries = HIDDEN[d], QUERIES[d]
    x = w.take(("B", "S", wide))
    cos, sin = tables(w, d)
    low = normed(w, layer(w, x, wide, queries, int8 and w.maybe()), queries)
    q = layer(w, low, queries, d.heads * (d.nope + d.rope), int8)
    q = w.let(w.pick(f"{q}.unflatten(-1, ({d.heads}, -1)).transpose(1, 2)",
                     f"{q}.view({x}.shape[0], {x}.shape[1], {d.heads}, -1).permute(0, 2, 1, 3)"), "q")  # fmt: skip
    nope, turning = w.both(f"{q}.split(({d.nope}, {d.rope}), dim=-1)", 2, "q")
    q = w.let(f"torch.cat(({nope}, {turned(w, turning, f'{cos}.unsqueeze(1)', f'{sin}.unsqueeze(1)')}), -1)", "q")
    both = layer(w, x, wide, d.latent + d.rope, int8 and w.maybe())
    latent, rope = w.both(f"{both}.split(({d.latent}, {d.rope}), dim=-1)", 2, "latent")
    latent, rope = normed(w, latent, d.latent), turned(w, rope, cos, sin)
    if w.maybe(4):
        latent = w.let(f"{latent} * {w.pick(0.5, 2.0, 1.5)}", "latent")
    store = w.pick(fresh, fresh, consecutive, paged, paged, stored_in_int8)
    latent, rope, seen = store(w, d, latent, rope, f"{x}.shape[1]")
    up = w.input((d.heads * (d.nope + d.value), d.latent), "matrix", name="up")
    w.fuses("mla_prolog", "latent_attention", "rope", "attention", target="host")
    w.give(w.pick(expanded, absorbed)(w, d, q, latent, rope, up, seen), ("B", d.heads, "S", d.value))


Stored = tuple[str, str, str]
"""A latent [B, T, C], rotated keys [B, T, Dr], and which of them are seen."""


def fresh(w: Writer, d: Widths, latent: str, rope: str, count: str) -> Stored:
    """No cache."""
    return latent, rope, w.let(f"torch.ones({count}, {count}, dtype=torch.bool).tril()", "seen")


def consecutive(w: Writer, d: Widths, latent: str, rope: str, count: str) -> Stored:
    """Rows from a position on."""
    start = w.input((), "below 3", name="start")
    places = w.let(f"{start} + torch.arange({count})", "places")
    caches = []
    for rows, width in ((latent, d.latent), (rope, d.rope)):
        cache = w.input(("B", ROOM, width), name="cache")
        w.do(w.pick(f"{cache}.index_copy_(1, {places}, {rows})", f"{cache}[:, {places}] = {rows}"))
        caches.append(cache)
    return *caches, w.let(f"torch.arange({ROOM}) <= {places}[:, None]", "seen")


def paged(w: Writer, d: Widths, latent: str, rope: str, count: str) -> Stored:
    """Rows at slots in pages, of one layout or of two."""
    size = w.pick(8, 16)
    table = w.input(("B", EACH), f"distinct {BLOCKS_OF_PAGES}", name="table")
    lengths, seen = reached(w, table, size, count)
    at = slots(w, table, lengths, size, count)
    layout = w.pick(*LAYOUTS)
    read = []
    for rows, width in ((latent, d.latent), (rope, d.rope)):
        layout = w.pick(*LAYOUTS) if w.maybe(6) else layout
        pages = w.input(layout.dims(1, width, size), name="pages")
        written(w, layout, pages, f"{rows}.unsqueeze(2)", at, width)
        read.append(w.let(f"{layout.gathered(pages, table, width)}.squeeze(1)", "rows"))
    return *read, seen


def stored_in_int8(w: Writer, d: Widths, latent: str, rope: str, count: str) -> Stored:
    """The latent by one scale, or a scale of each lane, in pages of int8."""
    size, scale = w.pick(8, 16), w.input(w.pick((1,), (d.latent,)), "scale", name="scale")
    whole = w.let(f"({latent}.float() / {scale}).round().clamp(-128, 127).to(torch.int8)", "whole")
    table = w.input(("B", EACH), f"distinct {BLOCKS_OF_PAGES}", name="table")
    lengths, seen = reached(w, table, size, count)
    at = slots(w, table, lengths, size, count)
    layout = w.pick(*LAYOUTS)
    first, second = (
        w.input(layout.dims(1, d.latent, size), "int8", "int8", "pages"),
        w.input(layout.dims(1, d.rope, size), name="pages"),
    )
    written(w, layout, first, f"{whole}.unsqueeze(2)", at, d.latent)
    written(w, layout, second, f"{rope}.unsqueeze(2)", at, d.rope)
    numbers = w.let(f"{layout.gathered(first, table, d.latent)}.squeeze(1)", "rows")
    read = w.let(f"({numbers}.float() * {scale}).to({rope}.dtype)", "latent")
    return read, w.let(f"{layout.gathered(second, table, d.rope)}.squeeze(1)", "rows"), seen


BLOCKS = (prolog,)
