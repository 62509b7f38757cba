"""Lists of keys, of experts and of pages: what is chosen by top-k or read by a table."""

from __future__ import annotations

from typing import Any

from ..writer import Writer
from .latent import SMALL, Widths, expanded

EXPERTS, CHOSEN = 16, 4


def routing(w: Writer) -> None:
    """The experts of a router: softmax before or behind the choice."""
    logits = w.input(("T", EXPERTS), "apart", name="logits")
    k = w.pick(1, 2, CHOSEN)
    w.fuses("expert")
    if w.maybe():
        values, experts = w.both(
            w.pick(f"torch.topk({logits}, {k}, dim=-1)", f"{logits}.float().topk({k}, dim=-1)"), 2, "t"
        )
        shares = w.let(w.pick(f"F.softmax({values}, dim=-1)", f"torch.softmax({values}, dim=1)",
                              f"{values}.softmax(-1, dtype=torch.float32)"), "shares")  # fmt: skip
    else:
        soft = w.let(w.pick(f"F.softmax({logits}, dim=-1, dtype=torch.float)", f"{logits}.float().softmax(-1)"), "soft")
        shares, experts = w.both(f"torch.topk({soft}, {k}, dim=-1)", 2, "t")
        shares = w.let(w.pick(f"{shares} / {shares}.sum(-1, keepdim=True)", shares), "shares")
    dense = f"torch.zeros({logits}.shape, dtype={shares}.dtype).scatter(-1, {experts}, {shares})"
    w.kept.append(w.let(w.pick(dense, f"{dense}.to({logits}.dtype)"), "dense"))


def gating(w: Writer) -> None:
    """The experts of a router whose scores have a bias, in the best groups of them."""
    logits, bias = w.input(("T", EXPERTS), "apart", name="logits"), w.input((EXPERTS,), name="bias")
    wide = w.let(f"{logits}.float()", "wide")
    scores = w.let(w.pick(f"{wide}.sigmoid()", f"torch.sigmoid({wide})", f"F.softmax({wide}, dim=-1)"), "scores")
    choice = w.let(w.pick(f"{scores} + {bias}.float()", f"{scores} + {bias}.float()[None]", scores), "choice")
    choice = in_groups(w, choice) if w.maybe() else choice
    k = w.pick(2, CHOSEN)
    experts = w.let(w.pick(f"torch.topk({choice}, {k}, dim=-1)[1]", f"{choice}.topk({k}, -1).indices"), "experts")
    weights = w.let(w.pick(f"{scores}.gather(-1, {experts})", f"torch.take_along_dim({scores}, {experts}, -1)",
                           f"{scores}[torch.arange({scores}.shape[0])[:, None], {experts}]"), "weights")  # fmt: skip
    weights = w.let(w.pick(
        weights, f"{weights} / {weights}.sum(-1, keepdim=True)",
        f"{weights} / ({weights}.sum(-1, keepdim=True) + {w.pick('1e-20', '1e-6', '0.5')})",
        f"{weights} / {weights}.sum(-1, keepdim=True).clamp(min={w.pick('1e-8', '0.9')})",
        f"F.normalize({weights}, p=1, dim=-1)",
    ), "weights")  # fmt: skip
    weights = w.let(f"{weights} * {w.pick(2.5, 1.0)}", "weights") if w.maybe() else weights
    w.kept.append(w.let(f"torch.zeros_like({scores}).scatter(-1, {experts}, {weights})", "dense"))


def in_groups(w: Writer, choice: str) -> str:
    """The choice, filled where a group of four experts is not among the best."""
    groups = w.let(f"{choice}.view({choice}.shape[0], 4, 4)", "groups")
    best = w.let(w.pick(f"{groups}.topk(2, -1)[0].sum(-1)", f"{groups}.amax(-1)", f"{groups}.max(-1).values"), "best")
    kept = w.let(f"{best}.topk({w.pick(1, 2, 4)}, -1)[1]", "kept")
    mask = w.let(w.pick(
        f"torch.zeros_like({best}).scatter_(1, {kept}, 1)", f"F.one_hot({kept}, 4).sum(1)",
        f"(torch.arange(4) == {kept}[..., None]).any(1)", f"torch.zeros_like({best}).scatter(1, {kept}, 1.0)",
    ), "mask")  # fmt: skip
    wide = w.let(w.pick(f"{mask}.unsqueeze(-1).expand(-1, -1, 4).reshape({choice}.shape)",
                        f"{mask}.repeat_interleave(4, -1)"), "mask")  # fmt: skip
    least = w.pick("float('-inf')", "float('-inf')", "0.0")
    return w.let(w.pick(
        f"{choice}.masked_fill(~{wide}.bool(), {least})", f"torch.where({wide} != 0, {choice}, {least})",
        f"{choice}.masked_fill({wide} == 0, {least})",
    ), "choice")  # fmt: skip


def listed(w: Writer) -> None:
    """Attention to the keys that a list or an indexer names."""
    d, keys = Widths(w.pick(1, 2, 4), *SMALL), "S"
    q = w.take(("B", d.heads, "S", d.nope + d.rope), "q")
    latent, rope = w.take(("B", keys, d.latent), "latent"), w.take(("B", keys, d.rope), "rope")
    up = w.input((d.heads * (d.nope + d.value), d.latent), "matrix", name="up")
    seen = w.let(f"torch.ones({q}.shape[2], {q}.shape[2], dtype=torch.bool).tril()", "seen")
    if w.maybe():
        scores = w.input(("B", "S", keys), "apart", name="score")
    else:
        scores = indexed(w, w.input(("B", "S", 2, 8), name="iq"), w.input(("B", keys, 8), name="ik"), "S")
    both = chosen(w, scores, seen)
    w.give(expanded(w, d, q, latent, rope, up, both), ("B", d.heads, "S", d.value))


def indexed(w: Writer, query: str, key: str, rows: Any) -> str:
    """The scores of an indexer."""
    heads = w.input(("B", rows, 2), name="iw")
    products = w.let(f"F.relu(torch.einsum('bshd,btd->bsht', {query}.float(), {key}.float()))", "products")
    return w.let(f"torch.einsum('bsht,bsh->bst', {products}, {heads}.float())", "score")


def chosen(w: Writer, scores: str, seen: str) -> str:
    """The keys of the largest scores that are seen."""
    hidden = w.let(f"{scores}.masked_fill(~{seen}, float('-inf'))", "score")
    places = w.let(f"{hidden}.topk(min({w.pick(1, 2)}, {hidden}.shape[-1]), dim=-1).indices", "places")
    chosen = w.let(f"torch.zeros({hidden}.shape, dtype=torch.bool).scatter(-1, {places}, True)", "chosen")
    w.fuses("sparse_attention", "latent", "attention", target="host")
    return w.let(f"({chosen} & {seen}).unsqueeze(1)", "seen")


def listed_pages(w: Writer) -> None:
    """One token each over some rows of pages, up to a length; rotated lanes may have a block table of their own."""
    d, size, pages = Widths(w.pick(1, 2, 4), *SMALL), 4, 3
    q = w.take(("B", d.heads, 1, d.nope + d.rope), "q")
    table, other = (w.input(("B", pages), "distinct 9", name="table") for _ in range(2))
    named = ((d.latent, table), (d.rope, w.pick(table, table, other)), (8, w.pick(table, other)))
    latent, rope, key = (w.let(f"{w.input((9, size, width))}[{by}].flatten(1, 2)", "rows") for width, by in named)
    up = w.input((d.heads * (d.nope + d.value), d.latent), "matrix", name="up")
    lengths = w.let(f"{w.input(('B',), f'below {size * pages}', name='length')} + 1", "length")
    seen = w.let(f"(torch.arange({size * pages}) < {lengths}[:, None])[:, None]", "seen")
    if w.maybe():
        scores = w.input(("B", 1, size * pages), "apart", name="score")
    else:
        scores = indexed(w, w.input(("B", 1, 2, 8), name="iq"), key, 1)
    both = chosen(w, scores, seen)
    w.give(expanded(w, d, q, latent, rope, up, both), ("B", d.heads, 1, d.value))


def paged_attention(w: Writer) -> None:
    """One token each over the pages that a block table lists, up to a length."""
    n, m = w.pick((4, 2), (2, 2), (4, 1), (1, 1))
    width, size, pages = w.pick(64, 128), 4, 3
    q, table = w.take(("B", n, 1, width), "q"), w.input(("B", pages), "distinct 9", name="table")
    keys, values = (w.input((9, size, m, width), name=name) for name in ("keys", "values"))
    lengths = w.let(f"{w.input(('B',), f'below {size * pages}', name='length')} + 1", "length")
    k, v = (w.let(w.pick(f"{each}[{table}].flatten(1, 2).transpose(1, 2)",
                         f"{each}.index_select(0, {table}.flatten())"
                         f".view({table}.shape[0], {size * pages}, {m}, {width}).transpose(1, 2)"), "k")
            for each in (keys, values))  # fmt: skip
    if n > m:
        k, v = (w.let(f"{each}.repeat_interleave({n // m}, 1)", "k") for each in (k, v))
    hidden = w.let(f"(torch.arange({size * pages}) >= {lengths}[:, None])[:, None, None]", "hidden")
    w.fuses("attention", target="" if w.narrow else "host")
    if w.maybe():
        w.give(w.let(f"F.scaled_dot_product_attention({q}, {k}, {v}, attn_mask=~{hidden})", "o"), ("B", n, 1, width))
        return
    scores = w.let(f"({q} @ {k}.mT * {width**-0.5}).masked_fill({hidden}, float('-inf'))", "scores")
    w.give(w.let(f"{scores}.softmax(-1) @ {v}", "o"), ("B", n, 1, width))


def gathered(w: Writer) -> None:
    """Pages of two caches for any other use."""
    m, width = w.pick(1, 2), w.pick(64, 128)
    table = w.input(("B", 3), "distinct 9", name="table")
    for name in ("keys", "values"):
        pages = w.input((9, 4, m, width), name=name)
        w.kept.append(w.let(f"{pages}[{table}].flatten(1, 2)", "rows"))


def parts(w: Writer) -> None:
    """Attention over a part of the keys, and its log-sum-exp."""
    n, width = w.pick(1, 2, 4), w.pick(64, 128)
    q, k, v = (w.take(("B", n, dim, width), name) for name, dim in (("q", "S"), ("k", "T"), ("v", "T")))
    scores = w.let(f"({q} @ {k}.transpose(-2, -1)).float() * {width**-0.5}", "scores")
    w.fuses("attention", target="" if w.narrow else "host")
    if w.maybe():
        sums = w.let(f"{scores}.logsumexp(-1)", "lse")
        o = w.let(f"{scores}.softmax(-1).to({v}.dtype) @ {v}", "o")
    else:
        sums = w.let(f"{scores}.logsumexp(-1, keepdim=True)", "lse")
        o = w.let(f"({scores} - {sums}).exp().to({v}.dtype) @ {v}", "o")
    w.give(o, ("B", n, "S", width))
    w.kept.append(sums)


def merged(w: Writer) -> None:
    """Outputs over two parts by their log-sum-exps."""
    n, width = w.pick(1, 2, 4), w.pick(64, 128)
    outs = [w.take(("B", n, "S", width), "out") for _ in range(2)]
    sums = [w.input(("B", n, "S"), dtype="float32", name="lse") for _ in range(2)]
    if w.maybe():
        dim = w.pick(0, -1)
        shares = w.both(f"torch.stack(({sums[0]}, {sums[1]}), {dim}).softmax({dim}).unbind({dim})", 2, "share")
    else:
        both = w.let(f"torch.logaddexp({sums[0]}, {sums[1]})", "both")
        shares = [w.let(w.pick(f"({lse} - {both}).exp()", f"torch.exp({lse} - {both})"), "share") for lse in sums]
        if w.maybe(3):
            w.kept.append(both)
    first, second = (w.let(f"{out}.float() * {share}.unsqueeze(-1)") for out, share in zip(outs, shares, strict=True))
    w.fuses("attention_update", target="ascend910_93" if w.narrow else "none")
    w.give(w.let(f"({first} + {second}).to({outs[0]}.dtype)", "o"), ("B", n, "S", width))


BLOCKS = (gating, routing, listed, listed_pages, paged_attention, gathered, parts, merged)
