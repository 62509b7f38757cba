"""Softmax attention in the ways that people write it: products, masks, softmaxes, heads that are shared."""

from __future__ import annotations

from ..writer import Writer

WIDTHS = (64, 128)


def position_mask(w: Writer, q: str, k: str, kind: str) -> str:
    """Booleans [.., S, T], true where a key is seen."""
    s, t = f"{q}.shape[-2]", f"{k}.shape[-2]"
    if kind == "causal":
        return w.let(w.pick(
            f"torch.ones({s}, {t}, dtype=torch.bool).tril()",
            f"torch.arange({t})[None, :] <= torch.arange({s})[:, None]",
            f"torch.arange({s}).unsqueeze(1) >= torch.arange({t})",
            f"~torch.ones({s}, {t}, dtype=torch.bool).triu(1)",
            f"torch.tril(torch.ones({s}, {t})) == 1",
            f"torch.tril(torch.ones({s}, {t}), diagonal=0).bool()",
        ), "seen")  # fmt: skip
    if kind == "last":
        return w.let(w.pick(
            f"torch.ones({s}, {t}, dtype=torch.bool).tril({t} - {s})",
            f"torch.arange({t}) <= torch.arange({s})[:, None] + ({t} - {s})",
        ), "seen")  # fmt: skip
    far = w.pick(1, 2, 3)
    if w.maybe():
        ones = w.let(f"torch.ones({s}, {t}, dtype=torch.bool)", "ones")
        return w.let(f"{ones}.tril() & {ones}.triu({1 - far})", "seen")
    distance = w.let(f"torch.arange({s})[:, None] - torch.arange({t})[None]", "distance")
    return w.let(w.pick(f"({distance} >= 0) & ({distance} < {far})", f"({distance} > -1) & ({distance} <= {far - 1})"),
                 "seen")  # fmt: skip


def data_mask(w: Writer, k: str, kind: str, keys: int | str) -> str:
    """Booleans that broadcast to [B, 1, S, T], from a padding, lengths or a position."""
    t = f"{k}.shape[-2]"
    if kind == "padding":
        there = w.input(("B", keys), w.pick("left padded", "right padded"), name="padding")
        return w.let(w.pick(f"{there}[:, None, None, :].bool()", f"({there} == 1)[:, None, None]",
                            f"{there}.view({there}.shape[0], 1, 1, -1) != 0"), "seen")  # fmt: skip
    if kind == "lengths":
        lengths = w.input(("B",), f"below {keys}", name="length")
        lengths = w.let(f"{lengths} + 1")
        return w.let(f"(torch.arange({t}) < {lengths}[:, None])[:, None, None]", "seen")
    if kind == "position":
        at = w.input(w.pick((), (1,)), f"below {keys}", name="at")
        return w.let(w.pick(f"(torch.arange({t}) <= {at})[None, None, None]", f"torch.arange({t})[None] <= {at}"),
                     "seen")  # fmt: skip
    return w.input(("B", 1, "S", keys), "few bool" if kind == "few" else "bool", name="seen")


def mask(w: Writer, q: str, k: str, keys: int | str) -> str:
    """The keys that are seen, "" where all are."""
    kind = w.pick("none", "causal", "causal", "last", "window", "padding", "lengths", "position", "any", "few", "both")
    if kind == "none":
        return ""
    if kind in ("causal", "last", "window"):
        return position_mask(w, q, k, kind)
    if kind == "both":
        first, second = position_mask(w, q, k, "causal"), data_mask(w, k, "padding", keys)
        return w.let(w.pick(f"{first} & {second}", f"{second} & {first}", f"torch.logical_and({first}, {second})"),
                     "seen")  # fmt: skip
    return data_mask(w, k, kind, keys)


def masked(w: Writer, scores: str, seen: str, q: str) -> str:
    least = w.pick("float('-inf')", "-math.inf", f"torch.finfo({q}.dtype).min", "-1e9" if not w.narrow else "-1e4")
    return w.let(w.pick(
        f"{scores}.masked_fill(~{seen}, {least})",
        f"{scores}.masked_fill({seen}.logical_not(), {least})",
        f"torch.where({seen}, {scores}, {least})",
        f"{scores} + torch.zeros({seen}.shape, dtype={q}.dtype).masked_fill(~{seen}, {least})",
    ), "scores")  # fmt: skip


def softmaxed(w: Writer, scores: str, q: str) -> str:
    if w.maybe():
        return w.let(w.pick(f"F.softmax({scores}, dim=-1, dtype=torch.float32).to({q}.dtype)",
                            f"{scores}.float().softmax(-1).to({q}.dtype)"), "p")  # fmt: skip
    if w.maybe(3):
        e = w.let(f"torch.exp({scores} - {scores}.amax(-1, keepdim=True))", "e")
        return w.let(f"{e} / {e}.sum(-1, keepdim=True)", "p")
    if w.maybe(4):
        total = w.let(w.pick(f"{scores}.logsumexp(-1, keepdim=True)", f"torch.logsumexp({scores}, -1, True)"), "total")
        return w.let(w.pick(f"torch.exp({scores} - {total})", f"({scores} - {total}).exp()"), "p")
    if w.maybe(6):
        return w.let(w.pick(f"{scores}.log_softmax(-1).exp()", f"torch.softmax({scores}, -1).nan_to_num(0.0)"), "p")
    return w.let(w.pick(f"torch.softmax({scores}, dim=-1)", f"{scores}.softmax(-1)", f"F.softmax({scores}, -1)"), "p")


def shared(w: Writer, x: str, times: int, keys: int | str) -> str:
    """Every key head for the query heads that share it."""
    if times == 1:
        return x
    return w.let(w.pick(
        f"{x}.repeat_interleave({times}, dim=1)",
        f"{x}[:, :, None].expand(-1, -1, {times}, -1, -1).reshape({x}.shape[0], -1, *{x}.shape[2:])",
        f"{x}.unsqueeze(2).expand(-1, -1, {times}, -1, -1).flatten(1, 2)",
    ), "k")  # fmt: skip


def by_rows(w: Writer, scores: str, q: str, v: str) -> str:
    """Heads and sequences joined in one dim when the scores have been masked."""
    rows = w.let(w.pick(f"{scores}.flatten(0, 1)", f"{scores}.reshape(-1, *{scores}.shape[2:])"), "scores")
    o = w.let(f"torch.bmm({softmaxed(w, rows, q)}, {v}.flatten(0, 1))", "o")
    return w.let(w.pick(f"{o}.view({q}.shape[0], -1, *{o}.shape[1:])", f"{o}.reshape(*{q}.shape[:3], -1)"), "o")


def attend(w: Writer, q: str, k: str, v: str, heads: tuple[int, int], width: int, keys: int | str) -> str:
    """[B, N, S, D] of queries of N heads, keys and values of M."""
    seen = mask(w, q, k, keys)
    times = heads[0] // heads[1]
    if w.maybe(3):
        more = f", attn_mask={seen}" if seen else w.pick("", ", is_causal=True", f", scale={width**-0.5}")
        if times > 1 and w.maybe():
            more += ", enable_gqa=True"
        else:
            k, v = shared(w, k, times, keys), shared(w, v, times, keys)
        return w.let(f"F.scaled_dot_product_attention({q}, {k}, {v}{more})", "o")
    k, v = shared(w, k, times, keys), shared(w, v, times, keys)
    turned = w.pick(f"{k}.transpose(-2, -1)", f"{k}.mT", f"{k}.transpose(2, 3)")
    scores = w.let(w.pick(
        f"{q} @ {turned} * {width ** -0.5}", f"torch.matmul({q}, {turned}) / math.sqrt({width})",
        f"({q} * {width ** -0.5}) @ {turned}", f"torch.einsum('bhsd,bhtd->bhst', {q}, {k}) * {width ** -0.5}",
    ), "scores")  # fmt: skip
    scores = masked(w, scores, seen, q) if seen else scores
    if w.maybe(4):
        return by_rows(w, scores, q, v)
    p = softmaxed(w, scores, q)
    return w.let(w.pick(f"{p} @ {v}", f"torch.matmul({p}, {v})", f"torch.einsum('bhst,bhtd->bhsd', {p}, {v})"), "o")


def heads(w: Writer) -> tuple[tuple[int, int], int]:
    return w.pick((4, 4), (4, 2), (4, 1), (2, 2), (1, 1), (2, 1)), w.pick(*WIDTHS)


def attention(w: Writer) -> None:
    """Over keys and values of as many positions or others."""
    (n, m), width = heads(w)
    keys = w.pick("S", "S", "T")
    q = w.take(("B", n, "S", width), "q")
    k, v = w.take(("B", m, keys, width), "k"), w.take(("B", m, keys, width), "v")
    w.fuses("attention", "latent", "sparse", target="" if w.narrow else "host")
    o = attend(w, q, k, v, (n, m), width, keys)
    if w.maybe():
        dims = ("B", "S", n * width)
        w.give(w.let(f"{o}.transpose(1, 2).{w.pick('flatten(2)', f'reshape({q}.shape[0], -1, {n * width})')}"), dims)
    else:
        w.give(o, ("B", n, "S", width))


def from_tokens(w: Writer) -> None:
    """Projections of hidden states that are split into heads."""
    (n, m), width = heads(w)
    x = w.take(("B", "S", 128))
    parts = []
    for name, count in (("q", n), ("k", m), ("v", m)):
        weight = w.input((count * width, 128), "matrix", name="w")
        y = w.let(f"F.linear({x}, {weight})")
        parts.append(w.let(w.pick(
            f"{y}.view({x}.shape[0], -1, {count}, {width}).transpose(1, 2)",
            f"{y}.unflatten(-1, ({count}, {width})).transpose(1, 2)",
            f"{y}.view(*{x}.shape[:2], {count}, {width}).permute(0, 2, 1, 3)",
        ), name))  # fmt: skip
    w.fuses("attention", target="" if w.narrow else "host")
    o = attend(w, *parts, (n, m), width, "S")
    weight = w.input((128, n * width), "matrix", name="w")
    o = w.let(f"{o}.transpose(1, 2).{w.pick('flatten(2)', f'contiguous().view({x}.shape[0], -1, {n * width})')}")
    w.give(w.let(f"F.linear({o}, {weight})"), ("B", "S", 128))


def with_sink(w: Writer) -> None:
    """One more score for every head, whose share is dropped."""
    (n, _), width = heads(w)
    q, k, v = (w.take(("B", n, "S", width), name) for name in "qkv")
    sink = w.input((n,), name="sink")
    scores = masked(w, w.let(f"{q} @ {k}.mT * {width**-0.5}", "scores"), position_mask(w, q, k, "causal"), q)
    p = w.pick(joined_sink, reduced_sink, sum_of_logarithms)(w, scores, w.let(f"{sink}.reshape(1, -1, 1, 1)", "sink"))
    w.fuses("attention", target="" if w.narrow else "host")
    w.give(w.let(f"{p} @ {v}", "o"), ("B", n, "S", width))


def joined_sink(w: Writer, scores: str, sink: str) -> str:
    column = w.let(f"{sink}.expand({scores}.shape[0], -1, {scores}.shape[-2], -1)", "column")
    both = w.let(f"torch.cat(({scores}, {column}), dim=-1)", "both")
    both = w.let(f"{both} - {both}.max(dim=-1, keepdim=True).values", "both") if w.maybe() else both
    return w.let(f"{both}.softmax(-1)[..., :-1]", "p")


def reduced_sink(w: Writer, scores: str, sink: str) -> str:
    """Added to the sum of exponentials."""
    largest = w.let(w.pick(f"torch.maximum({scores}.amax(-1, keepdim=True), {sink})",
                           f"{scores}.amax(-1, keepdim=True).clamp(min={sink})"), "largest")  # fmt: skip
    e = w.let(f"torch.exp({scores} - {largest})", "e")
    return w.let(f"{e} / ({e}.sum(-1, keepdim=True) + torch.exp({sink} - {largest}))", "p")


def sum_of_logarithms(w: Writer, scores: str, sink: str) -> str:
    """Joined to the logarithm of the sum, or a factor of what is normed without it."""
    total = w.let(f"{scores}.logsumexp(-1, keepdim=True)", "total")
    if w.maybe():
        return w.let(f"torch.exp({scores} - torch.logaddexp({total}, {sink}))", "p")
    return w.let(f"{scores}.softmax(-1) * torch.sigmoid({total} - {sink})", "p")


def assigned(w: Writer) -> None:
    """A mask or scores that are filled by assignments, one of what is seen and one of what is not."""
    (n, _), width = heads(w)
    q, k, v = (w.take(("B", n, "S", width), name) for name in "qkv")
    seen = position_mask(w, q, k, w.pick("causal", "window"))
    least = w.pick("float('-inf')", f"torch.finfo({q}.dtype).min")
    scores = w.let(f"{q} @ {k}.mT * {width**-0.5}", "scores")
    if w.maybe(3):
        w.do(f"{scores}[..., ~{seen}] = {least}")
    else:
        made = w.let(f"torch.{w.pick('zeros', 'ones')}({seen}.shape, dtype={q}.dtype)", "added")
        writes = [f"{made}[{seen}] = 0", f"{made}[~{seen}] = {least}"]
        for line in w.pick(writes, writes[::-1], writes[1:]):
            w.do(line)
        scores = w.let(f"{scores} + {made}", "scores")
    w.give(w.let(f"{softmaxed(w, scores, q)} @ {v}", "o"), ("B", n, "S", width))


def one_by_one(w: Writer) -> None:
    """A loop over the sequences of a batch, each of which may end earlier."""
    (n, _), width = heads(w)
    q, k, v = (w.take(("B", n, "S", width), name) for name in "qkv")
    causal = w.pick("", ", is_causal=True")
    row = "F.scaled_dot_product_attention({q}[i:i + 1], {k}[i:i + 1{cut}], {v}[i:i + 1{cut}]{causal})"
    row = row.format(q=q, k=k, v=v, causal=causal, cut=w.pick("", f", :, :max(1, {k}.shape[2] - i)"))
    w.give(w.let(f"torch.cat([{row} for i in range({q}.shape[0])])", "o"), ("B", n, "S", width))


def delta_rule(w: Writer) -> None:
    """A state that every position reads and corrects: no softmax attention, whatever it looks like."""
    (n, _), width = heads(w)
    q, k, v = (w.take(("B", n, "S", width), name) for name in "qkv")
    step = w.input(("B", n, "S"), name="step")
    state = w.let(f"torch.zeros({q}.shape[0], {n}, {width}, {width}, dtype={q}.dtype)", "state")
    rows = w.let("[]", "rows")
    for at in range(min(w.sizes["S"], 3)):
        key = w.let(f"{k}[:, :, {at}] * {width**-0.5}", "key")
        old = w.let(f"({key}.unsqueeze(-2) @ {state}).squeeze(-2)", "old")
        change = w.let(f"({v}[:, :, {at}] - {old}) * {step}[:, :, {at}, None]", "change")
        state = w.let(f"{state} + {key}.unsqueeze(-1) * {change}.unsqueeze(-2)", "state")
        w.do(f"{rows}.append(({q}[:, :, {at}].unsqueeze(-2) @ {state}).squeeze(-2))")
    if w.sizes["S"]:
        w.kept.append(w.let(f"torch.stack({rows}, dim=2)", "o"))


def bias(w: Writer, heads: int, q: str, k: str, keys: str) -> str:
    """Numbers [B or 1, N, S, T] that are no mask: a table, slopes by distance, or a product."""
    kind = w.pick("table", "slopes", "pairs", "queries")
    if kind == "table":
        return w.input((w.pick(1, "B"), heads, "S", keys), name="bias")
    if kind == "slopes":
        slopes = w.input((heads, 1, 1), name="slope")
        far = w.let(f"torch.arange({k}.shape[2]) - torch.arange({q}.shape[2])[:, None]", "far")
        return w.let(w.pick(f"{slopes} * {far}.to({q}.dtype)", f"(-{slopes} * {far}.abs())[None]"), "bias")
    if kind == "pairs":
        pairs, weight = w.input(("B", "S", keys, 8), name="pairs"), w.input((heads, 8), "matrix", name="w")
        return w.let(f"F.linear({pairs}, {weight}).permute(0, 3, 1, 2)", "bias")
    table = w.input((keys, 64), name="rel")
    return w.let(f"{q}[..., :64] @ {table}.t()", "bias")


def biased(w: Writer) -> None:
    """A bias before or behind the mask, to sdpa or by hand; what is masked may be clamped."""
    (n, _), width = heads(w)
    keys = w.pick("S", "T")
    q = w.take(("B", n, "S", width), "q")
    k, v = (w.take(("B", n, keys, width), name) for name in "kv")
    b, seen = bias(w, n, q, k, keys), mask(w, q, k, keys)
    if w.maybe(3):
        both = w.let(f"torch.where({seen}, {b}, -math.inf)" if seen else b, "bias")
        w.give(w.let(f"F.scaled_dot_product_attention({q}, {k}, {v}, attn_mask={both}.to({q}.dtype))", "o"),
               ("B", n, "S", width))  # fmt: skip
        return
    scores = w.let(f"{q} @ {k}.mT * {width**-0.5}", "scores")
    if seen and w.maybe():
        scores, seen = masked(w, scores, seen, q), ""
    scores = w.let(w.pick(f"{scores} + {b}", f"{b} + {scores}"), "scores")
    scores = w.let(f"{scores} + {bias(w, n, q, k, keys)}", "scores") if w.maybe(4) else scores
    scores = masked(w, scores, seen, q) if seen else scores
    scores = w.let(f"{scores}.clamp(min=torch.finfo({q}.dtype).min)", "scores") if w.maybe(5) else scores
    p = softmaxed(w, scores, q)
    w.give(w.let(f"{p}.to({q}.dtype) @ {v}", "o"), ("B", n, "S", width))


def summed(w: Writer) -> None:
    """An order and a padding of least numbers, which are added up; what is masked may be clamped."""
    (n, _), width = heads(w)
    q, k, v = (w.take(("B", n, "S", width), name) for name in "qkv")
    seen, least = position_mask(w, q, k, w.pick("causal", "causal", "window")), f"torch.finfo({q}.dtype).min"
    there = w.input(("B", "S"), w.pick("left padded", "right padded"), name="padding")
    gone = w.let(f"1.0 - {there}[:, None, None, :].to({q}.dtype)", "gone")
    second = w.let(f"{gone}.masked_fill({gone}.to(torch.bool), {least})", "second")
    first = w.let(w.pick(
        f"torch.zeros({seen}.shape, dtype={q}.dtype).masked_fill(~{seen}, {least})",
        f"torch.full({seen}.shape, {least}, dtype={q}.dtype).masked_fill({seen}, 0)",
    ), "first")  # fmt: skip
    scores = w.let(f"{q} @ {k}.mT * {width**-0.5}", "scores")
    scores = w.let(w.pick(
        f"{scores} + ({first} + {second})", f"{scores} + ({second} + {first})", f"({scores} + {first}) + {second}",
        f"torch.where({seen}, {scores}, {least}) + {second}", f"({scores} + {second}).masked_fill(~{seen}, {least})",
    ), "scores")  # fmt: skip
    if w.maybe(3):
        scores = w.let(w.pick(
            f"torch.max({scores}, torch.tensor({least}, dtype={q}.dtype))", f"{scores}.clamp(min={least})"
        ), "scores")  # fmt: skip
    o = by_rows(w, scores, q, v) if w.maybe(3) else w.let(f"{softmaxed(w, scores, q)} @ {v}", "o")
    w.give(o, ("B", n, "S", width))


def positions_first(w: Writer) -> None:
    """Sequences behind positions in memory; heads joined with them, repeated before or after."""
    (n, m), width = heads(w)
    keys = w.pick("S", "S", "T")
    q, k, v = (w.take(dims, name) for name, dims in (
        ("q", ("S", "B", n, width)), ("k", (keys, "B", m, width)), ("v", (keys, "B", m, width))
    ))  # fmt: skip
    w.fuses("attention", target="" if w.narrow else "host")
    if w.maybe():
        q, k, v = (w.let(f"{each}.permute(1, 2, 0, 3)", "t") for each in (q, k, v))
        o = w.let(f"{attend(w, q, k, v, (n, m), width, keys)}.permute(2, 0, 1, 3)", "o")
    else:
        if n != m:
            k, v = (w.let(f"{each}.repeat_interleave({n // m}, dim=2)", "k") for each in (k, v))
        q, k, v = (w.let(f"{each}.reshape({each}.shape[0], -1, {width}).transpose(0, 1)", "t") for each in (q, k, v))
        scores = w.let(f"torch.bmm({q}, {k}.transpose(1, 2)) * {width**-0.5}", "scores")
        scores = masked(w, scores, position_mask(w, q, k, "causal"), q) if keys == "S" and w.maybe() else scores
        o = w.let(f"torch.bmm({softmaxed(w, scores, q)}, {v}).transpose(0, 1)", "o")
        o = w.let(f"{o}.reshape({o}.shape[0], -1, {n}, {width})", "o")
    w.give(w.let(w.pick(o, f"{o}.contiguous()", f"{o}.flatten(2).unflatten(2, ({n}, {width}))"), "o"),
           ("S", "B", n, width))  # fmt: skip


def in_segments(w: Writer) -> None:
    """A loop over segments of packed tokens, cut before they are turned or after, joined alike."""
    (n, m), width = heads(w)
    q, k, v = w.take(("S", n, width), "q"), w.take(("S", m, width), "k"), w.take(("S", m, width), "v")
    first = w.pick(1, 2, f"{q}.shape[0] // 2")
    how = w.pick("", ", is_causal=True") + (", enable_gqa=True" if n != m else "")
    parts = []
    for begin, end in ((0, first), (first, f"{q}.shape[0]")):
        cut = f"{begin}:{end}"
        turned = [w.let(w.pick(
            f"{each}[{cut}].transpose(0, 1)[None]", f"{each}.transpose(0, 1)[None][:, :, {cut}]",
            f"{each}.transpose(0, 1).unsqueeze(0)[..., {cut}, :]",
        ), "part") for each in (q, k, v)]  # fmt: skip
        parts.append(w.let(f"F.scaled_dot_product_attention({', '.join(turned)}{how})", "o"))
    joined = w.let(w.pick(
        f"torch.cat(({parts[0]}, {parts[1]}), dim=2)[0].transpose(0, 1)",
        f"torch.cat(({parts[0]}.transpose(1, 2), {parts[1]}.transpose(1, 2)), dim=1)[0]",
        f"torch.cat(({parts[0]}[0], {parts[1]}[0]), dim=1).transpose(0, 1)",
    ), "o")  # fmt: skip
    w.give(joined, ("S", n, width))


BLOCKS = (
    positions_first,
    in_segments,
    summed,
    attention,
    attention,
    attention,
    from_tokens,
    with_sink,
    with_sink,
    assigned,
    one_by_one,
    delta_rule,
    biased,
    biased,
)
