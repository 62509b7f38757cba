"""Writes into caches, and what reads them afterwards, in the ways that people write them."""

from __future__ import annotations

from ..writer import Writer
from .attention import heads

ROOM = 16
SIZE = 4


def write(w: Writer, cache: str, rows: str, start: str, dim: int) -> None:
    """Rows [.., S, ..] from `start` [] on, along `dim` of 1 or 2."""
    places = w.pick(f"torch.arange({rows}.shape[{dim}]) + {start}", f"{start} + torch.arange({rows}.shape[{dim}])")
    front = ":, " * dim
    w.do(w.pick(
        f"{cache}.index_copy_({dim}, {places}, {rows})",
        f"{cache}[{front}{places}] = {rows}",
        f"{cache}.copy_({cache}.index_copy({dim}, {places}, {rows}))",
    ))  # fmt: skip


def fixed(w: Writer, cache: str, rows: str, dim: int, first: int) -> None:
    """Rows from a position on that is known."""
    front, end = ":, " * dim, f"{first} + {rows}.shape[{dim}]"
    w.do(w.pick(
        f"{cache}[{front}{first}:{end}] = {rows}",
        f"{cache}.narrow({dim}, {first}, {rows}.shape[{dim}]).copy_({rows})",
        f"{cache}.copy_(torch.slice_scatter({cache}, {rows}, {dim}, {first}, {end}))",
    ))  # fmt: skip


def written(w: Writer) -> None:
    """One cache, by a position in a tensor or a known one."""
    dim, count, width = w.pick(1, 2), w.pick(1, 2, 4), w.pick(64, 128)
    shape = ("B", count, ROOM, width) if dim == 2 else ("B", ROOM, count, width)
    cache = w.input(shape, name="cache")
    rows = w.take(("B", count, "S", width) if dim == 2 else ("B", "S", count, width))
    w.fuses("cache_write", "kv_rms", "mla_")
    if w.maybe():
        write(w, cache, rows, w.input((), "below 3", name="start"), dim)
    else:
        fixed(w, cache, rows, dim, w.pick(0, 1, 2))
    read(w, cache, rows)


def read(w: Writer, cache: str, rows: str) -> None:
    """What is done with a cache behind its write."""
    w.kept.append(w.let(w.pick(f"{cache} * 2", cache, f"{cache}.sum(-1)", f"{cache}[:, 1:]", f"{cache}.clone()",
                               f"{cache}.flatten(0, 1)", f"{rows} + 1", f"{cache}[:, :1].contiguous()",
                               ), "y"))  # fmt: skip


def by_length(w: Writer) -> None:
    """One row of each sequence, at its own position."""
    count, width = w.pick(1, 2, 4), w.pick(64, 128)
    cache, rows = w.input(("B", count, ROOM, width), name="cache"), w.input(("B", count, width), name="rows")
    lengths = w.input(("B",), f"below {ROOM}", name="length")
    w.do(w.pick(
        f"{cache}[torch.arange({cache}.shape[0]), :, {lengths}] = {rows}",
        f"{cache}.scatter_(2, {lengths}[:, None, None, None].expand(-1, {count}, 1, {width}), {rows}.unsqueeze(2))",
        f"{cache}.copy_(torch.where((torch.arange({ROOM}) == {lengths}[:, None])[:, None, :, None], "
        f"{rows}.unsqueeze(2), {cache}))",
    ))  # fmt: skip
    read(w, cache, rows)


def slots(w: Writer) -> None:
    """Pages, by slots over all of them or by block and place."""
    count, width = w.pick(1, 2), w.pick(64, 128)
    pages = w.input((8, SIZE, count, width), name="pages")
    rows, places = w.take(("T", count, width)), w.input(("T",), "distinct 32", name="slots")
    w.fuses("cache_write")
    paged(w, pages, rows, places, count, width)
    read(w, pages, rows)


def paged(w: Writer, pages: str, rows: str, places: str, count: int, width: int) -> None:
    w.do(w.pick(
        f"{pages}.view(-1, {count}, {width})[{places}] = {rows}",
        f"{pages}.flatten(0, 1).index_copy_(0, {places}, {rows})",
        f"{pages}[{places} // {SIZE}, {places} % {SIZE}] = {rows}",
        f"{pages}.view(-1, {count}, {width}).index_put_(({places},), {rows})",
    ))  # fmt: skip


def slot_pairs(w: Writer) -> None:
    """Keys and values at the same slots."""
    count, width = w.pick(1, 2), w.pick(64, 128)
    keys, values = (w.input((8, SIZE, count, width), name="pages") for _ in range(2))
    key, value = w.take(("T", count, width), "key"), w.take(("T", count, width), "value")
    places = w.input(("T",), "distinct 32", name="slots")
    w.fuses("cache_write")
    paged(w, keys, key, places, count, width)
    paged(w, values, value, places, count, width)
    read(w, keys, key)
    read(w, values, value)


def lanes_of_one(w: Writer) -> None:
    """Latents and rotated keys at the same slots of one paged cache, in lanes of their own."""
    front, behind = w.pick((512, 64), (64, 64), (128, 64))
    pages = w.input((8, SIZE, 1, front + behind), name="pages")
    one, other = w.take(("T", 1, front), "c"), w.take(("T", 1, behind), "r")
    places = w.input(("T",), "distinct 32", name="slots")
    flat = w.let(w.pick(f"{pages}.view(-1, 1, {front + behind})", f"{pages}.flatten(0, 1)"), "flat")
    lines = [f"{flat}[{places}, :, :{front}] = {one}", f"{flat}[{places}, :, {front}:] = {other}"]
    if w.maybe(3):
        lines = [f"{flat}[..., :{front}].index_copy_(0, {places}, {one})",
                 f"{flat}[..., {front}:].index_copy_(0, {places}, {other})"]  # fmt: skip
    for line in w.pick(lines, lines[::-1], [lines[0], lines[1], lines[0]], lines[:1]):
        w.do(line)
    w.kept.append(w.let(f"{pages} * 2", "y"))


def pages_of_one(w: Writer) -> None:
    """Pages of keys and of values in one tensor, one behind the other or in turn; some are written twice."""
    count, width, in_turn = w.pick(1, 2), w.pick(64, 128), w.maybe()
    cache = w.input((8, 2, SIZE, count, width) if in_turn else (2, 8, SIZE, count, width), name="cache")
    places = w.input(("T",), "distinct 32", name="slots")
    w.fuses("cache_write")
    for number in w.pick((0, 1), (1, 0), (1,), (0, 1, 0)):
        rows = w.take(("T", count, width))
        if in_turn:
            part = w.pick(f"{cache}[:, {number}]", f"{cache}.unbind(1)[{number}]", f"{cache}.select(1, {number})")
            w.do(f"{part}[{places} // {SIZE}, {places} % {SIZE}] = {rows}")
        else:
            part = w.pick(f"{cache}[{number}]", f"{cache}.unbind(0)[{number}]", f"{cache}[{number}:{number + 1}][0]")
            paged(w, part, rows, places, count, width)
        if w.maybe():
            read(w, w.pick(cache, part), rows)
    w.kept.append(w.let(f"{cache} * 2", "y"))


def layers_of_one(w: Writer) -> None:
    """Keys and values of all layers in one tensor."""
    count, width = w.pick(1, 2, 4), w.pick(64, 128)
    cache = w.input((3, 2, "B", count, ROOM, width), name="cache")
    start = w.input((), "below 3", name="start")
    w.fuses("cache_write")
    for layer, number in w.pick(((0, 0), (0, 1)), ((2, 1), (2, 0)), ((1, 0), (2, 0)), ((1, 1),)):
        rows = w.take(("B", count, "S", width))
        part = w.pick(
            f"{cache}[{layer}, {number}]", f"{cache}[{layer}][{number}]", f"{cache}[{layer}].unbind()[{number}]"
        )
        if w.maybe():
            write(w, part, rows, start, 2)
        else:
            fixed(w, part, rows, 2, w.pick(0, 2))
        if w.maybe():
            read(w, w.pick(f"{cache}[{layer}]", part), rows)
    w.kept.append(w.let(f"{cache} * 2", "y"))


def slid(w: Writer) -> None:
    """A window of the last positions."""
    count, width = w.pick(1, 2, 4), 64
    cache, rows = w.input(("B", count, ROOM, width), name="cache"), w.take(("B", count, "S", width))
    w.fuses("cache_write")
    if w.maybe():
        w.do(f"{cache}.copy_(torch.cat(({cache}[:, :, {rows}.shape[2]:], {rows}), dim=2))")
    else:
        new = w.let(f"{cache}.roll(-{rows}.shape[2], dims=2)", "new")
        w.do(f"{new}[:, :, -{rows}.shape[2]:] = {rows}")
        w.do(f"{cache}.copy_({new})")
    read(w, cache, rows)


def decode(w: Writer) -> None:
    """Keys and values are written, then queries attend to the caches up to their position."""
    (n, m), width = heads(w)
    keys, values = (w.input(("B", m, ROOM, width), name=name) for name in ("keys", "values"))
    q = w.take(("B", n, "S", width), "q")
    k, v = (w.take(("B", m, "S", width), name) for name in ("k", "v"))
    start = w.input((), "below 3", name="start")
    for cache, rows in ((keys, k), (values, v)):
        write(w, cache, rows, start, 2)
    seen = w.let(w.pick(f"torch.arange({ROOM}) <= ({start} + torch.arange({q}.shape[2]))[:, None]",
                        f"torch.arange({ROOM})[None] <= (torch.arange({q}.shape[-2]) + {start}).unsqueeze(-1)"),
                 "seen")  # fmt: skip
    w.fuses("attention", target="" if w.narrow else "host")
    w.fuses("cache_write")
    if w.maybe():
        more = ", enable_gqa=True" if n > m else ""
        o = w.let(f"F.scaled_dot_product_attention({q}, {keys}, {values}, attn_mask={seen}{more})", "o")
    else:
        scores = w.let(f"{q} @ {keys}.repeat_interleave({n // m}, 1).mT * {width**-0.5}", "scores")
        p = w.let(f"F.softmax({scores}.masked_fill(~{seen}, float('-inf')), dim=-1, dtype=torch.float32)", "p")
        o = w.let(f"{p}.to({q}.dtype) @ {values}.repeat_interleave({n // m}, 1)", "o")
    w.give(o, ("B", n, "S", width))


def grown(w: Writer) -> None:
    """Keys and values that are joined to those before them."""
    (n, m), width = heads(w)
    q = w.take(("B", n, "S", width), "q")
    joined = []
    for name in ("k", "v"):
        past, rows = w.input(("B", m, "T", width), name="past"), w.take(("B", m, "S", width), name)
        joined.append(w.give(w.let(f"torch.cat(({past}, {rows}), dim={w.pick(2, -2)})", name), ("B", m, "U", width)))
    w.fuses("attention", target="" if w.narrow else "host")
    seen = w.let(f"torch.ones({q}.shape[2], {joined[0]}.shape[2], dtype=torch.bool).tril("
                 f"{joined[0]}.shape[2] - {q}.shape[2])", "seen")  # fmt: skip
    times = n // m
    k, v = (w.let(f"{each}.repeat_interleave({times}, 1)") if times > 1 else each for each in joined)
    w.give(w.let(f"F.scaled_dot_product_attention({q}, {k}, {v}, attn_mask={seen})", "o"), ("B", n, "S", width))


BLOCKS = (
    written, written, by_length, slots, slot_pairs, lanes_of_one, pages_of_one, layers_of_one, slid, decode, decode,
    grown,
)  # fmt: skip
