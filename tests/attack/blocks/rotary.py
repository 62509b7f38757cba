"""Rotary embeddings in the ways that people write them."""

from __future__ import annotations

from ..program import Dims
from ..writer import Writer

WIDTH = 64


def heads_of(w: Writer, count: int, first: bool, width: int = WIDTH) -> Dims:
    return ("B", count, "S", width) if first else ("B", "S", count, width)


def tables(w: Writer, first: bool) -> tuple[str, str]:
    """cos and sin, broadcast over heads: of inputs, of angles, or of positions."""
    dim = 1 if first else 2
    how = w.pick("inputs", "angles", "positions", "shared", "gathered")
    if how == "inputs":
        cos, sin = (w.input(("B", "S", WIDTH), name=name) for name in ("cos", "sin"))
        return w.let(f"{cos}.unsqueeze({dim})"), w.let(f"{sin}.unsqueeze({dim})")
    if how == "shared":
        cos, sin = (w.input(("S", WIDTH), name=name) for name in ("cos", "sin"))
        shape = "[None, None]" if first else "[None, :, None]"
        return w.let(f"{cos}{shape}"), w.let(f"{sin}{shape}")
    x = next(reversed(w.dims))
    if how == "gathered":
        cos, sin = (w.input((16, WIDTH), name=name) for name in ("cos", "sin"))
        places = w.input(("B", "S"), "below 16", name="position")
        return w.let(f"{cos}[{places}].unsqueeze({dim})"), w.let(f"{sin}[{places}].unsqueeze({dim})")
    if how == "angles":
        angles = w.input(("B", "S", WIDTH // 2), dtype="float32", name="angles")
    else:
        places = w.input(("B", "S"), "below 16", name="position")
        frequencies = w.input((WIDTH // 2,), dtype="float32", name="frequencies")
        angles = w.let(f"{places}[:, :, None].float() * {frequencies}", "angles")
    both = w.let(f"torch.cat(({angles}, {angles}), dim=-1)", "emb")
    return tuple(w.let(f"{both}.{name}().to({x}.dtype).unsqueeze({dim})", name) for name in ("cos", "sin"))


def turned(w: Writer, x: str, half: int) -> str:
    """(-second half, first half)."""
    if w.maybe():
        return w.let(f"torch.cat((-{x}[..., {half}:], {x}[..., :{half}]), dim=-1)", "turned")
    a, b = w.both(w.pick(f"{x}.chunk(2, dim=-1)", f"{x}.split({half}, -1)"), 2, "x")
    return w.let(w.pick(f"torch.cat((-{b}, {a}), dim=-1)", f"torch.cat([{b} * -1, {a}], -1)"), "turned")


def halves(w: Writer, x: str, cos: str, sin: str, half: int = WIDTH // 2) -> str:
    how = w.pick("turned", "turned", "products", "in place", "lanes in place", "stack")
    if how == "lanes in place":
        return lanes_in_place(w, x, cos, sin, half)
    if how == "products":
        a, b = w.both(f"{x}.chunk(2, dim=-1)", 2, "x")
        c, d = w.let(f"{cos}[..., :{half}]", "c"), w.let(f"{sin}[..., :{half}]", "s")
        return w.let(f"torch.cat(({a} * {c} - {b} * {d}, {b} * {c} + {a} * {d}), dim=-1)", "y")
    if how == "stack":
        a, b = w.both(f"{x}.unflatten(-1, (2, {half})).unbind(-2)", 2, "x")
        t = w.let(f"torch.stack((-{b}, {a}), dim=-2).flatten(-2)", "turned")
        return w.let(f"{x} * {cos} + {t} * {sin}", "y")
    if how == "in place":
        y = w.let(f"{x} * {cos}", "y")
        w.do(f"{y} += {turned(w, x, half)} * {sin}")
        return y
    t = turned(w, x, half)
    return w.let(w.pick(f"{x} * {cos} + {t} * {sin}", f"({t} * {sin}) + ({cos} * {x})",
                        f"torch.addcmul({x} * {cos}, {t}, {sin})"), "y")  # fmt: skip


def lanes_in_place(w: Writer, x: str, cos: str, sin: str, half: int) -> str:
    """Products with cosines, whose halves are then changed by addcmul."""
    y = w.let(f"{x} * {cos}", "y")
    a, b = w.both(f"{x}.chunk(2, dim=-1)", 2, "x")
    s, t = w.let(f"{sin}[..., :{half}]", "s"), w.let(w.pick(f"{sin}[..., {half}:]", f"{sin}[..., :{half}]"), "s")
    for line in w.pick(
        (f"{y}[..., :{half}].addcmul_({b}, {s}, value=-1)", f"{y}[..., {half}:].addcmul_({a}, {t})"),
        (f"{y}[..., {half}:].addcmul_({t}, {a})", f"{y}[..., :{half}].sub_({b} * {s})"),
    ):
        w.do(line)
    return y


def neighbours(w: Writer, x: str, cos: str, sin: str, half: int = WIDTH // 2) -> str:
    """Pairs of neighbours, which stay neighbours or become halves."""
    c, d = w.let(f"{cos}[..., :{half}]", "c"), w.let(f"{sin}[..., :{half}]", "s")
    pairs = w.pick(f"({x}[..., ::2], {x}[..., 1::2])", f"{x}.unflatten(-1, (-1, 2)).unbind(-1)")
    a, b = w.both(pairs, 2, "x")
    one, two = w.let(f"{a} * {c} - {b} * {d}", "y"), w.let(w.pick(f"{b} * {c} + {a} * {d}", f"{a} * {d} + {b} * {c}"))
    return w.let(w.pick(f"torch.stack(({one}, {two}), dim=-1).flatten(-2)", f"torch.cat(({one}, {two}), dim=-1)"), "y")


def by_complex(w: Writer, x: str, first: bool) -> str:
    """Pairs of neighbours as complex numbers."""
    angles = w.input(("S", WIDTH // 2), dtype="float32", name="angles")
    frequencies = w.let(f"torch.polar(torch.ones_like({angles}), {angles})", "freqs")
    shape = "[None, None]" if first else "[None, :, None]"
    pairs = w.let(f"torch.view_as_complex({x}.float().unflatten(-1, (-1, 2)))", "pairs")
    return w.let(f"torch.view_as_real({pairs} * {frequencies}{shape}).flatten(-2).to({x}.dtype)", "y")


def rotate(w: Writer) -> None:
    """One tensor."""
    first = w.maybe()
    dims = heads_of(w, w.pick(1, 2, 4), first)
    x = w.take(dims)
    w.fuses("rope", "kv_rms", "mla_")
    how = w.pick("halves", "halves", "neighbours", "complex", "in float")
    if how == "complex":
        w.give(by_complex(w, x, first), dims)
        return
    cos, sin = tables(w, first)
    if how == "in float":
        h, cos, sin = (w.let(f"{each}.float()") for each in (x, cos, sin))
        w.give(w.let(f"{halves(w, h, cos, sin)}.to({x}.dtype)", "y"), dims)
        return
    w.give((neighbours if how == "neighbours" else halves)(w, x, cos, sin), dims)


def rotate_pair(w: Writer) -> None:
    """Queries and keys by the same tables."""
    first = w.maybe()
    heads, shared = w.pick((4, 2), (2, 2), (4, 1), (1, 1))
    q, k = (w.take(heads_of(w, count, first), name) for count, name in ((heads, "q"), (shared, "k")))
    cos, sin = tables(w, first)
    w.fuses("rope")
    for x, count in ((q, heads), (k, shared)):
        w.give(halves(w, x, cos, sin), heads_of(w, count, first))


def rotate_part(w: Writer) -> None:
    """The first or last lanes; the others pass."""
    first, front, rest = w.maybe(), w.maybe(), w.pick(64, 128)
    dims = heads_of(w, w.pick(1, 2, 4), first, WIDTH + rest)
    x = w.take(dims)
    cos, sin = tables(w, first)
    parts = (WIDTH, rest) if front else (rest, WIDTH)
    a, b = w.both(f"{x}.split({parts}, dim=-1)", 2, "part")
    y = w.pick(halves, neighbours)(w, a if front else b, cos, sin)
    w.fuses("rope")
    w.give(w.let(f"torch.cat(({y}, {b}), dim=-1)" if front else f"torch.cat(({a}, {y}), dim=-1)", "y"), dims)


def rotate_tokens(w: Writer) -> None:
    """Packed tokens [T, N, D]."""
    heads = w.pick(1, 2, 4)
    x, cos, sin = w.take(("T", heads, WIDTH)), w.input(("T", WIDTH), name="cos"), w.input(("T", WIDTH), name="sin")
    cos, sin = (w.let(w.pick(f"{each}.unsqueeze(1)", f"{each}[:, None]")) for each in (cos, sin))
    w.fuses("rope")
    w.give(halves(w, x, cos, sin), ("T", heads, WIDTH))


BLOCKS = (rotate, rotate, rotate_pair, rotate_part, rotate_tokens)
