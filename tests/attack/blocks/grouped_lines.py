"""Heads that are normed, rotated and written into pages in blocks of NZ, and what only looks like it."""

from __future__ import annotations

from ..writer import Writer
from .norms import normed
from .rotary import halves, neighbours

BLOCKS_OF_PAGES, WIDTH = 5, 128
OTHERS = ("pairs", "two epsilons", "values turned", "keys as values", "one cache", "no norm", "part of the lanes")


def projected(w: Writer, heads: int, shared: int) -> tuple[str, str, str]:
    """Queries, keys and values [T, N, D] of one layer, of three, or of something else."""
    widths = (heads * WIDTH, shared * WIDTH, shared * WIDTH)
    kind = w.pick("one", "three", "given")
    if kind == "given":
        return tuple(w.take(("T", count, WIDTH), name) for count, name in ((heads, "q"), (shared, "k"), (shared, "v")))
    x = w.take(("T", 128))
    if kind == "three":
        weights = [w.input((width, 128), "matrix", name="w") for width in widths]
        return tuple(w.let(f"F.linear({x}, {each}).unflatten(-1, (-1, {WIDTH}))", "h") for each in weights)
    both = w.let(f"F.linear({x}, {w.input((sum(widths), 128), 'matrix', name='w')})", "qkv")
    if w.maybe():
        q, k, v = w.both(f"{both}.split({widths}, dim=-1)", 3, "h")
        return tuple(
            w.let(w.pick(f"{each}.unflatten(-1, (-1, {WIDTH}))", f"{each}.view(-1, {width // WIDTH}, {WIDTH})"), "h")
            for each, width in zip((q, k, v), widths, strict=True)
        )
    counts = [width // WIDTH for width in widths]
    return tuple(w.both(f"{both}.view(-1, {sum(counts)}, {WIDTH}).split({counts}, dim=1)", 3, "h"))


def int8_rows(w: Writer, rows: str, shared: int) -> str:
    """In int8, by a scale of each channel, head or lane, or of all, perhaps with a zero point."""
    dims = w.pick((shared, WIDTH), (shared, 1), (WIDTH,), (1,))
    scale = w.input(dims, "scale", w.dtype, name="scale")
    real = w.pick(f"{rows} / {scale}", f"{rows}.float() / {scale}", f"{rows} * {scale}")
    zero = w.pick("", "", f" + {w.input(dims, 'below 5', w.dtype, name='zero')}")
    return w.let(w.pick(f"({real}{zero}).round().clamp(-128, 127).to(torch.int8)",
                        f"torch.clamp(torch.round({real}{zero}), -128, 127).to(torch.int8)"), "whole")  # fmt: skip


def put(w: Writer, pages: str, rows: str, slots: str, size: int, lane: int, flat: bool) -> None:
    """Rows [T, M, D] into [Block, M · D / L, Size, L] or [Block, M, D / L, Size, L]."""
    block, place = f"{slots} // {size}", f"{slots} % {size}"
    if flat:
        w.do(f"{pages}[{block}, :, {place}] = {rows}.reshape({rows}.shape[0], -1, {lane})")
    else:
        w.do(f"{pages}[{block}, :, :, {place}] = {rows}.unflatten(-1, (-1, {lane}))")


def written_lines(w: Writer) -> None:
    """Queries are given, keys and values written."""
    heads, shared = w.pick((4, 2), (2, 1), (2, 2), (8, 2))
    wrong = w.pick(*OTHERS) if w.maybe(3) else ""
    q, k, v = projected(w, heads, shared)
    cos, sin = (w.let(f"{w.input(('T', WIDTH), name=name)}.unsqueeze(1)", name) for name in ("cos", "sin"))
    if wrong != "no norm":
        k = normed(w, k, WIDTH, "1e-6")
    q = normed(w, q, WIDTH, "1e-5" if wrong == "two epsilons" else "1e-6")
    turn = neighbours if wrong == "pairs" else halves
    if wrong == "part of the lanes":
        a, b = w.both(f"{q}.chunk(2, -1)", 2, "part")
        q = w.let(f"torch.cat(({b}, {a}), dim=-1)", "q")
    q, k = (turn(w, each, cos, sin, WIDTH // 2) for each in (q, k))
    v = turn(w, v, cos, sin, WIDTH // 2) if wrong == "values turned" else k if wrong == "keys as values" else v
    int8, flat, size = w.maybe(), w.maybe(), w.pick(4, 16, 32)
    lane = w.pick(32, 32, 16) if int8 else w.pick(16, 16, 8)
    dims = (shared * WIDTH // lane, size, lane) if flat else (shared, WIDTH // lane, size, lane)
    slots = w.input(("T",), f"distinct {BLOCKS_OF_PAGES * size}", name="slots")
    kind = "int8" if int8 else "normal"
    first = w.input((BLOCKS_OF_PAGES, *dims), kind, name="pages")
    second = first if wrong == "one cache" else w.input((BLOCKS_OF_PAGES, *dims), kind, name="pages")
    for pages, rows in ((first, k), (second, v)):
        put(w, pages, int8_rows(w, rows, shared) if int8 else rows, slots, size, lane, flat)
    w.give(w.let(f"{q} * 2", "q"), ("T", heads, WIDTH))
    w.kept += [w.let(f"{pages}.flatten(0, 1)", "seen") for pages in (first, second) if w.maybe()]


BLOCKS = (written_lines,)
