"""Loops over sequences of different lengths, packed or in pages of their own, and what only looks like them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from ..program import changed
from ..writer import Writer

SIZE, PAGES, WIDTHS = 16, 3, (64, 128)


@dataclass(frozen=True)
class Loop:
    """What every turn of a loop computes.

    Attributes:
        queries: of each sequence.
        keys: of each sequence, as many or more.
        order: "none", "causal", "last" (the last query stands at the last key) or "window n".
        odd: the sequence in which something is another thing, -1 for none.
        wrong: what that is.
    """

    heads: int
    shared: int
    width: int
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    order: str
    odd: int
    wrong: str


def loop(w: Writer, lengths: tuple[int, ...], wrong: tuple[str, ...]) -> Loop:
    """As many sequences as are drawn."""
    heads, shared = w.pick((4, 2), (4, 1), (2, 2), (1, 1))
    count = w.pick(1, 2, 2, 3, 3, 4)
    queries = w.pick(
        tuple(w.pick(1, 1, 2, 3, 5) for _ in range(count)), (1,) * count, (1, 4, 1, 1)[:count],
        tuple(w.pick(0, 1, 3) for _ in range(count)),
    )  # fmt: skip
    keys = tuple(max(each, w.pick(*lengths)) for each in queries)
    odd = w.pick(*range(count)) if w.maybe(3) else -1
    order = w.pick("none", "causal", "last", "last", f"window {w.pick(1, 2, 9, 20)}")
    return Loop(heads, shared, w.pick(*WIDTHS), queries, keys, order, odd, w.pick(*wrong) if odd >= 0 else "")


def between(lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(pairwise((0, *accumulate(lengths))))


def turn(w: Writer, c: Loop, number: int, q: str, k: str, v: str) -> str:
    """Attention of one sequence: q [s, n, d], keys and values [t, m, d] to [s, n, d]."""
    odd = c.wrong if c.odd == number else ""
    factor = 0.3 if odd == "scale" else c.width**-0.5
    order = w.pick("none", "last", "window 3") if odd == "order" else c.order
    if w.maybe():
        how = [f"scale={factor}"] if odd == "scale" or w.maybe() else []
        how += ["enable_gqa=True"] if c.heads != c.shared else []
        seen = visible(w, order, c.queries[number], c.keys[number])
        if order == "causal" and w.maybe():
            how.append("is_causal=True")
        elif seen:
            how.append(f"attn_mask={seen}")
        q, k, v = (w.let(w.pick(f"{each}.transpose(0, 1)[None]", f"{each}.transpose(0, 1).unsqueeze(0)",
                                f"{each}[None].transpose(1, 2)"), "part") for each in (q, k, v))  # fmt: skip
        o = w.let(f"F.scaled_dot_product_attention({', '.join([q, k, v, *how])})", "o")
        return w.let(
            w.pick(f"{o}[0].transpose(0, 1)", f"{o}.squeeze(0).transpose(0, 1)", f"{o}.transpose(1, 2)[0]"), "o"
        )
    times = c.heads // c.shared
    k, v = (w.let(f"{each}.repeat_interleave({times}, 1)", "k") if times > 1 else each for each in (k, v))
    scores = w.let(w.pick(f"torch.einsum('qhd,khd->hqk', {q}, {k}).float() * {factor}",
                          f"torch.einsum('qhd,khd->hqk', {q} * {factor}, {k})"), "scores")  # fmt: skip
    seen = visible(w, order, c.queries[number], c.keys[number])
    scores = w.let(f"{scores}.masked_fill(~{seen}, float('-inf'))", "scores") if seen else scores
    return w.let(f"torch.einsum('hqk,khd->qhd', {scores}.softmax(-1).to({v}.dtype), {v})", "o")


def visible(w: Writer, order: str, queries: int, keys: int) -> str:
    """Booleans [s, t], "" for all."""
    if order == "none":
        return ""
    behind = 0 if order == "causal" else keys - queries
    ones = f"torch.ones({queries}, {keys}, dtype=torch.bool)"
    seen = w.pick(f"{ones}.tril({behind})", f"torch.arange({keys}) <= torch.arange({queries})[:, None] + {behind}",
                  f"~{ones}.triu({behind + 1})")  # fmt: skip
    if order.startswith("window"):
        seen = f"({seen}) & {ones}.triu({behind + 1 - int(order.split()[1])})"
    return w.let(seen, "seen")


def joined(w: Writer, c: Loop, outs: list[str]) -> None:
    """What the sequences give, one behind the other, or otherwise."""
    width = c.heads * c.width
    if c.wrong == "left out" and len(outs) > 1:
        del outs[c.odd]
    if c.wrong == "swapped" and len(outs) > 1:
        outs[0], outs[c.odd] = outs[c.odd], outs[0]
    flat = w.maybe(3)
    outs = [w.let(f"{each}.reshape({each}.shape[0], {width})", "o") for each in outs] if flat else outs
    y = w.let(w.pick(f"torch.cat([{', '.join(outs)}])", f"torch.cat(({', '.join(outs)},), dim=0)"), "y")
    w.kept.append(w.let(w.pick(y, y if flat else f"{y}.flatten(1)", f"{y} * 2"), "y"))


def is_plain(c: Loop) -> bool:
    """Whether the loop is one of those that become one call."""
    alike = all(q == k for q, k in zip(c.queries, c.keys, strict=True)) or c.order in ("none", "last")
    return c.odd < 0 and len(c.queries) > 1 and all(c.queries) and all(c.keys) and alike


def packed_segments(w: Writer) -> None:
    """Parts of packed queries and keys."""
    c = loop(w, (0, 1, 1, 4, 5, 16), ("scale", "order", "overlap", "keys", "swapped", "left out", "shared"))
    c = c if w.maybe() else changed(c, keys=c.queries)
    spare = w.pick(0, 0, 2)
    q = w.input((sum(c.queries) + spare, c.heads, c.width), name="q")
    k, v = (w.input((sum(c.keys) + spare, c.shared, c.width), name=name) for name in "kv")
    if is_plain(c):
        w.fuses("attention", target="" if w.narrow else "host")
    outs, first = [], w.pick(0, spare)
    parts = list(zip(between(c.queries), between(c.keys), strict=True))
    cuts = cut_by_sizes(w, c, spare, q, k, v) if not first and c.odd < 0 and w.maybe(3) else []
    for number, ((start, end), (low, high)) in enumerate(parts):
        odd = c.wrong if c.odd == number else ""
        if odd == "overlap":
            start, end = max(start - 1, 0), max(end - 1, end - start)
        if odd == "keys":
            low, high = parts[number - 1][1][0], parts[number - 1][1][0] + high - low
        named = [f"{q}[{start + first}:{end + first}]", *(f"{each}[{low + first}:{high + first}]" for each in (k, v))]
        named = [cut[number] for cut in cuts] if cuts else named
        if odd == "shared":
            named[2] = named[1]
        outs.append(turn(w, c, number, *(w.let(each, "part") for each in named)))
    joined(w, c, outs)


def cut_by_sizes(w: Writer, c: Loop, spare: int, *packed: str) -> list[list[str]]:
    """The parts of queries, keys and values by one split each."""
    sizes = (c.queries, c.keys, c.keys)
    return [
        w.both(f"{each}.split({[*size, spare]})", len(size) + 1, "part")
        for each, size in zip(packed, sizes, strict=True)
    ]


def paged_segments(w: Writer) -> None:
    """Keys and values in the pages that a row of a block table names."""
    c = loop(
        w, (1, 15, 16, 17, 32, 48), ("scale", "order", "caches", "row", "swapped", "left out", "values", "overlap")
    )
    by_heads, spare = w.maybe(3), w.pick(0, 1)
    page = (c.shared, SIZE, c.width) if by_heads else (SIZE, c.shared, c.width)
    keys, values = (w.input((9, *page), name=name) for name in ("keys", "values"))
    table = w.input((len(c.queries) + spare, PAGES), "distinct 9", w.pick("int32", ""), name="table")
    table = w.let(f"{table}.roll(1, 0)", "table") if w.maybe(6) else table
    q = w.input((sum(c.queries), c.heads, c.width), name="q")
    if is_plain(c):
        w.fuses("attention", target="" if w.narrow else "host")
    outs, first, whole = [], w.pick(0, spare), w.maybe(4)
    for number, (start, end) in enumerate(between(c.queries)):
        odd = c.wrong if c.odd == number else ""
        count = PAGES * SIZE if whole else c.keys[number]
        c = changed(c, keys=(*c.keys[:number], count, *c.keys[number + 1 :]))
        filled = PAGES if whole or w.maybe(4) else max(-(-count // SIZE), 1)
        row = (number + 1) % len(c.queries) if odd == "row" else number
        if odd == "overlap" and start:
            start, end = start - 1, end - 1
        pages = w.let(f"{table}[{row + first}, :{filled}]{w.pick('', '.long()')}", "pages")
        other = (
            w.let(f"{table}[{(row + 1) % len(c.queries) + first}, :{filled}]", "pages") if odd == "values" else pages
        )
        both = (values, keys) if odd == "caches" else (keys, values)
        rows = [rows_of(w, c, by_heads, cache, by, count) for cache, by in zip(both, (pages, other), strict=True)]
        outs.append(turn(w, c, number, w.let(f"{q}[{start}:{end}]", "part"), *rows))
    joined(w, c, outs)


def rows_of(w: Writer, c: Loop, by_heads: bool, cache: str, pages: str, count: int) -> str:
    """The first rows [t, m, d] of some pages."""
    found = w.pick(f"{cache}[{pages}]", f"{cache}.index_select(0, {pages})")
    found = f"{found}.transpose(1, 2)" if by_heads else found
    return w.let(
        w.pick(f"{found}.reshape(-1, {c.shared}, {c.width})[:{count}]", f"{found}.flatten(0, 1)[:{count}]"), "rows"
    )


BLOCKS = (packed_segments, packed_segments, paged_segments, paged_segments)
