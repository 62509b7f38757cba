"""Attention to keys and values that a cache holds in int8 (C8), in the ways that people write it.

A cache lies as rows or in pages; its scales are of each channel, of each head, of all, or of each token.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..program import Dims
from ..writer import Writer
from .attention import attend, softmaxed
from .quant import quantised

BLOCKS_OF_PAGES = 9


@dataclass(frozen=True)
class Cache:
    """How a cache lies, with its sizes.

    Attributes:
        kind: "rows", "positions", "pages", "flat pages", "heads", "lines" or "flat lines" (of NZ).
        size: rows of a page.
        pages: of each sequence.
        table: the name of the block table [B, pages], "" for rows.
    """

    kind: str
    heads: int
    shared: int
    width: int
    size: int
    pages: int
    table: str

    @property
    def room(self) -> int:
        return self.size * self.pages

    @property
    def dims(self) -> Dims:
        lanes = self.shared * self.width
        kinds: dict[str, Dims] = {
            "rows": ("B", self.shared, self.room, self.width),
            "positions": ("B", self.room, self.shared, self.width),
            "pages": (BLOCKS_OF_PAGES, self.size, self.shared, self.width),
            "flat pages": (BLOCKS_OF_PAGES, self.size, lanes),
            "heads": (BLOCKS_OF_PAGES, self.shared, self.size, self.width),
            "lines": (BLOCKS_OF_PAGES, self.shared, self.width // 32, self.size, 32),
            "flat lines": (BLOCKS_OF_PAGES, lanes // 32, self.size, 32),
        }
        return kinds[self.kind]

    def rows(self, w: Writer, cache: str, table: str) -> str:
        """[B, M, T, D]."""
        if self.kind == "rows":
            return cache
        if self.kind == "positions":
            return w.let(w.pick(f"{cache}.transpose(1, 2)", f"{cache}.permute(0, 2, 1, 3)"), "rows")
        pages = w.let(w.pick(
            f"{cache}[{table}]", f"{cache}[{table}.long()]",
            f"{cache}.index_select(0, {table}.flatten()).unflatten(0, {table}.shape)",
        ), "pages")  # fmt: skip
        shape = f"{table}.shape[0], {self.room}, {self.shared}, {self.width}"
        if self.kind == "pages":
            heads_last = w.pick(f"{pages}.flatten(1, 2)", f"{pages}.reshape({shape})")
            return w.let(w.pick(f"{heads_last}.transpose(1, 2)", f"{heads_last}.permute(0, 2, 1, 3)"), "rows")
        if self.kind == "flat pages":
            return w.let(f"{pages}.reshape({shape}).transpose(1, 2)", "rows")
        if self.kind == "heads":
            return w.let(f"{pages}.transpose(1, 2).flatten(2, 3)", "rows")
        pages = f"{pages}.unflatten(2, ({self.shared}, -1))" if self.kind == "flat lines" else pages
        shape = f"{table}.shape[0], {self.shared}, {self.room}, {self.width}"
        return w.let(f"{pages}.permute(0, 2, 1, 4, 3, 5).reshape({shape})", "rows")


def laid(w: Writer, *kinds: str) -> Cache:
    kind = w.pick(*kinds)
    lines = kind.endswith("lines")
    heads, shared = (10, 1) if lines else w.pick((4, 2), (4, 1), (2, 2), (1, 1), (8, 2))
    width, size, pages = (128, 128, 1) if lines else (w.pick(64, 128), w.pick(32, 32, 16), w.pick(1, 2, 3))
    table = "" if kind in ("rows", "positions") else w.input(("B", pages), f"distinct {BLOCKS_OF_PAGES}", name="table")
    return Cache(kind, heads, shared, width, size, pages, table)


# numbers -------------------------------------------------------------------------------------------------------------


def scale_dims(w: Writer, c: Cache, of: str) -> Dims:
    """Dims of scales that broadcast to [B, M, T, D]."""
    dims: dict[str, tuple[Dims, ...]] = {
        "channels": ((c.shared, 1, c.width), (1, c.shared, 1, c.width)),
        "lanes": ((c.width,), (1, 1, c.width)),
        "heads": ((c.shared, 1, 1), (1, c.shared, 1, 1)),
        "all": ((1,), (), (1, 1, 1, 1)),
        "tokens": (("B", c.shared, c.room, 1),),
        "tokens of all heads": (("B", 1, c.room, 1),),
        "sequences": (("B", 1, 1, 1),),
    }
    return w.pick(*dims[of])


GRAINS = ("channels", "channels", "heads", "all", "lanes", "tokens", "tokens of all heads", "sequences")


def floats(w: Writer, c: Cache, rows: str, like: str, of: str, zero: str) -> str:
    """Rows in the dtype of `like`: by scales of each of these, and zero points of a kind, "" for none."""
    scale = w.input(scale_dims(w, c, of), "scale", w.dtype if not of.startswith("tokens") else "", name="scale")
    return by_scale(w, rows, scale, like, zeros(w, c, zero), of)


def zeros(w: Writer, c: Cache, zero: str) -> str:
    """Zero points: whole numbers, in floats or in int8."""
    if not zero:
        return ""
    if zero == "number":
        return str(w.pick(3, -7, 0.5))
    return w.input(scale_dims(w, c, w.pick("channels", "heads", "all")), "below 9", zero, name="zero")


def by_scale(w: Writer, rows: str, scale: str, like: str, zero: str, of: str) -> str:
    real = w.let(w.pick(f"{rows}.to({like}.dtype)", f"{rows}.float()", f"{rows}.to({scale}.dtype)"), "real")
    if zero:
        real = w.let(w.pick(f"{real} - {zero}", f"{real} + {zero}", f"{rows} - {zero}"), "real")
    scaled = w.pick(f"{real} * {scale}", f"{scale} * {real}", f"{real}.mul({scale})", f"{real} * {scale}.float()")
    if of != "all" and w.maybe(6):
        scaled = f"{real} * {scale}.expand({rows}.shape)"
    return w.let(f"({scaled}).to({like}.dtype)", "k")


def numbers(w: Writer, c: Cache) -> tuple[tuple[str, str], tuple[str, str]]:
    """For keys and for values what scales are of, and the dtype of zero points."""
    of, zero = w.pick(*GRAINS), w.pick("", "", "", "number", w.dtype, "int8")
    if w.maybe(4):
        return (of, w.pick("", zero)), (w.pick(*GRAINS), zero)
    return (of, zero), (of, w.pick(zero, zero, ""))


# attention -----------------------------------------------------------------------------------------------------------


def lengths_of(w: Writer, c: Cache, q: str) -> str:
    """How many keys each sequence has, at least as many as there are queries."""
    drawn = w.input(("B",), f"below {c.room - 7}", name="length")
    return w.let(f"{drawn} + {w.pick(f'{q}.shape[2]', 7)}", "lengths")


def unseen(w: Writer, c: Cache, q: str, lengths: str) -> str:
    """Booleans [B, 1, S, T], true where a key is hidden."""
    places = f"torch.arange({c.room})"
    kind = w.pick("length", "order", "order", "window")
    if kind == "length":
        return w.let(w.pick(f"({places} >= {lengths}[:, None])[:, None, None]",
                            f"~({places}[None, None, None] < {lengths}.view(-1, 1, 1, 1))"), "hidden")  # fmt: skip
    last = w.let(f"{lengths}[:, None] - {q}.shape[2] + torch.arange({q}.shape[2])", "last")
    hidden = f"{places} > {last}[..., None]"
    if kind == "window":
        hidden = f"({hidden}) | ({places} <= {last}[..., None] - {w.pick(3, 20)})"
    return w.let(f"({hidden})[:, None]", "hidden")


def attended(w: Writer, c: Cache, q: str, k: str, v: str) -> None:
    """Over the keys of each length; perhaps beside a sink, or with its log-sum-exp."""
    if w.maybe(4):
        w.give(attend(w, q, k, v, (c.heads, c.shared), c.width, c.room), ("B", c.heads, "S", c.width))
        return
    hidden = unseen(w, c, q, lengths_of(w, c, q))
    if w.maybe(3):
        gqa = ", enable_gqa=True" if c.heads != c.shared else ""
        o = w.let(f"F.scaled_dot_product_attention({q}, {k}, {v}, attn_mask=~{hidden}{gqa})", "o")
        w.give(o, ("B", c.heads, "S", c.width))
        return
    times = c.heads // c.shared
    k, v = (w.let(f"{each}.repeat_interleave({times}, 1)", "k") if times > 1 else each for each in (k, v))
    factor = c.width**-0.5
    scores = w.pick(f"({q} @ {k}.mT).float() * {factor}", f"({q} * {factor}) @ {k}.transpose(2, 3)")
    scores = w.let(f"({scores}).masked_fill({hidden}, float('-inf'))", "scores")
    kind = w.pick("plain", "plain", "plain", "sink", "sum")
    if kind == "sink":
        sink = w.input((c.heads,), name="sink")
        column = w.let(f"{sink}.view(1, -1, 1, 1).expand({q}.shape[0], -1, {q}.shape[2], -1)", "column")
        p = w.let(f"torch.cat(({scores}, {column}), dim=-1).softmax(-1)[..., :-1]", "p")
    else:
        if kind == "sum":
            w.kept.append(w.let(f"{scores}.logsumexp(-1)", "lse"))
        p = softmaxed(w, scores, q)
    w.give(w.let(f"{p}.to({v}.dtype) @ {v}", "o"), ("B", c.heads, "S", c.width))


KINDS = ("rows", "positions", "pages", "pages", "flat pages", "heads", "lines", "flat lines")


def int8_attention(w: Writer) -> None:
    """Keys and values that become floats as they are read."""
    c = laid(w, *KINDS)
    q = w.take(("B", c.heads, "S", c.width), "q")
    other = w.input(("B", c.pages), f"distinct {BLOCKS_OF_PAGES}", name="table") if c.table and w.maybe(4) else c.table
    both = zip(numbers(w, c), (c.table, other), strict=True)
    k, v = (
        floats(w, c, c.rows(w, w.input(c.dims, "int8", name="cache"), table), q, of, zero) for (of, zero), table in both
    )
    w.fuses("attention", target="" if w.narrow else "host")
    attended(w, c, q, k, v)


# writes --------------------------------------------------------------------------------------------------------------


def whole(w: Writer, x: str, scale: str) -> str:
    """Rows in int8 by a scale that the model holds."""
    q = w.pick(f"{x} / {scale}", f"{x}.float() / {scale}", f"{x} * (1.0 / {scale})")
    return w.let(w.pick(
        f"({q}).round().clamp(-128, 127).to(torch.int8)", f"torch.clamp(torch.round({q}), -128, 127).to(torch.int8)",
        f"({q}).clamp(-128, 127).round().to(torch.int8)", f"({q}).round().clamp(-127, 127).char()",
    ), "whole")  # fmt: skip


def into_pages(w: Writer, c: Cache, cache: str, rows: str, slots: str) -> None:
    w.do(w.pick(
        f"{cache}.view(-1, {c.shared}, {c.width})[{slots}] = {rows}",
        f"{cache}[{slots} // {c.size}, {slots} % {c.size}] = {rows}",
        f"{cache}.flatten(0, 1).index_copy_(0, {slots}, {rows})",
    ))  # fmt: skip


def into_rows(w: Writer, cache: str, rows: str, start: str) -> None:
    places = w.let(f"{start} + torch.arange({rows}.shape[2])", "places")
    w.do(w.pick(f"{cache}[:, :, {places}] = {rows}", f"{cache}.index_copy_(2, {places}, {rows})"))


def int8_step(w: Writer) -> None:
    """New rows are quantised and written, by a position or by slots; then the cache is read."""
    c = laid(w, "rows", "rows", "pages")
    q = w.take(("B", c.heads, "S", c.width), "q")
    of = w.pick("channels", "heads", "all")
    slots = w.input(("T",), f"distinct {BLOCKS_OF_PAGES * c.size}", name="slots") if c.table else ""
    start = "" if c.table else w.input((), f"below {c.room - 7}", name="start")
    found = []
    for name in ("k", "v"):
        cache = w.input(c.dims, "int8", name="cache")
        scale = w.input(scale_dims(w, c, of), "scale", w.dtype, name="scale")
        if c.table:
            of_rows = w.let(f"{scale}.expand(1, {c.shared}, 1, {c.width})[0, :, 0]", "scale")
            into_pages(w, c, cache, whole(w, w.take(("T", c.shared, c.width), name), of_rows), slots)
        else:
            into_rows(w, cache, whole(w, w.take(("B", c.shared, "S", c.width), name), scale), start)
        found.append((cache, scale))
    w.fuses("attention", target="" if w.narrow else "host")
    k, v = (by_scale(w, c.rows(w, cache, c.table), scale, q, "", of) for cache, scale in found)
    attended(w, c, q, k, v)


def int8_tokens(w: Writer) -> None:
    """Rows that are quantised by scales of their own, beside which they are written; then the cache is read."""
    c = laid(w, "rows")
    q, start = w.take(("B", c.heads, "S", c.width), "q"), w.input((), f"below {c.room - 7}", name="start")
    found = []
    for name in ("k", "v"):
        cache, scales = (
            w.input(c.dims, "int8", name="cache"),
            w.input(("B", c.shared, c.room, 1), "scale", name="scales"),
        )
        rows, scale = quantised(w, w.input(("B", c.shared, "S", c.width), "rows", name=name))
        into_rows(w, cache, rows, start)
        into_rows(w, scales, scale, start)
        found.append(by_scale(w, cache, scales, q, "", "tokens"))
    attended(w, c, q, *found)


BLOCKS = (int8_attention, int8_attention, int8_attention, int8_step, int8_tokens)
