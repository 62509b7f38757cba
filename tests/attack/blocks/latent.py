"""Attention over a latent that all heads share: expanded, absorbed, over caches, behind a prolog."""

from __future__ import annotations

from dataclasses import dataclass

from ..writer import Writer
from .attention import data_mask, masked, position_mask
from .norms import normed

SMALL, LARGE = (16, 8, 32, 16), (128, 64, 512, 128)


@dataclass(frozen=True)
class Widths:
    """Heads, lanes of a key without and with rotation, of the latent, and of a value."""

    heads: int
    nope: int
    rope: int
    latent: int
    value: int

    @property
    def scale(self) -> str:
        return f"{(self.nope + self.rope) ** -0.5}"


def widths(w: Writer) -> Widths:
    return Widths(w.pick(1, 2, 4), *w.pick(SMALL, SMALL, SMALL, LARGE))


def seen_by(w: Writer, q: str, latent: str, keys: str) -> str:
    """Booleans that broadcast to [B, N, S, T]; "" where all are seen."""
    kind = w.pick("", "causal", "last", "padding", "position")
    if kind in ("causal", "last"):
        return position_mask(w, q, latent, kind)
    return data_mask(w, latent, kind, keys) if kind else ""


def shares(w: Writer, scores: str, seen: str, q: str) -> str:
    scores = masked(w, scores, seen, q) if seen else scores
    return w.let(w.pick(f"F.softmax({scores}, dim=-1, dtype=torch.float32).to({q}.dtype)",
                        f"torch.softmax({scores}, -1)", f"{scores}.float().softmax(-1).to({q}.dtype)",
                        ), "p")  # fmt: skip


def expanded(w: Writer, d: Widths, q: str, latent: str, rope: str, up: str, seen: str) -> str:
    """Keys and values of every head; [B, N, S, E]."""
    both = w.let(w.pick(f"F.linear({latent}, {up})", f"{latent} @ {up}.t()"))
    both = w.let(f"{both}.unflatten(-1, ({d.heads}, {d.nope + d.value})).transpose(1, 2)")
    k, v = w.both(w.pick(f"{both}.split(({d.nope}, {d.value}), dim=-1)",
                         f"({both}[..., :{d.nope}], {both}[..., {d.nope}:])"), 2, "k")  # fmt: skip
    if w.maybe(3):
        nope, turn = w.both(f"{q}.split(({d.nope}, {d.rope}), -1)", 2, "q")
        scores = w.let(f"({nope} @ {k}.mT + {turn} @ {rope}[:, None].mT) * {d.scale}", "scores")
        return w.let(f"{shares(w, scores, seen, q)} @ {v}", "o")
    wide = w.pick(f"{rope}.unsqueeze(1).expand(-1, {d.heads}, -1, -1)", f"{rope}[:, None].repeat(1, {d.heads}, 1, 1)")
    k = w.let(f"torch.cat(({k}, {wide}), dim=-1)", "k")
    if w.maybe():
        mask = f", attn_mask={seen}" if seen else ""
        return w.let(f"F.scaled_dot_product_attention({q}, {k}, {v}{mask}, scale={d.scale})", "o")
    scores = w.let(f"{q} @ {k}.transpose(-2, -1) * {d.scale}", "scores")
    return w.let(f"{shares(w, scores, seen, q)} @ {v}", "o")


def absorbed(w: Writer, d: Widths, q: str, latent: str, rope: str, up: str, seen: str) -> str:
    """The latent itself is attended to, as keys and values or as one of both; [B, N, S, E]."""
    keys, values = w.both(
        f"{up}.view({d.heads}, {d.nope + d.value}, {d.latent}).split(({d.nope}, {d.value}), 1)", 2, "up"
    )
    nope, turn = w.both(f"{q}.split(({d.nope}, {d.rope}), dim=-1)", 2, "q")
    if w.maybe(4):
        wide = w.let(f"torch.einsum('btc,ndc->bntd', {latent}, {keys})", "k")
        scores = w.let(f"({nope} @ {wide}.mT + {turn} @ {rope}[:, None].mT) * {d.scale}", "scores")
        read = w.let(f"{shares(w, scores, seen, q)} @ {latent}[:, None]", "o")
        return w.let(f"{read} @ {values}.mT", "o")
    into = w.let(w.pick(f"{nope} @ {keys}", f"torch.einsum('bnsd,ndc->bnsc', {nope}, {keys})"), "q")
    if w.maybe():
        scores = w.let(w.pick(
            f"({into} @ {latent}[:, None].mT + {turn} @ {rope}[:, None].mT) * {d.scale}",
            f"(torch.einsum('bnsc,btc->bnst', {into}, {latent}) + torch.einsum('bnsr,btr->bnst', {turn}, {rope}))"
            f" * {d.scale}",
        ), "scores")  # fmt: skip
    else:
        row = w.let(f"torch.cat(({latent}, {rope}), dim=-1).unsqueeze(1)", "row")
        scores = w.let(f"torch.cat(({into}, {turn}), -1) @ {row}.mT * {d.scale}", "scores")
    if w.maybe(4):
        v = w.let(f"torch.einsum('btc,nec->bnte', {latent}, {values})", "v")
        return w.let(f"{shares(w, scores, seen, q)} @ {v}", "o")
    read = w.let(f"{shares(w, scores, seen, q)} @ {latent}[:, None]", "o")
    return w.let(w.pick(f"{read} @ {values}.mT", f"torch.einsum('bnsc,nec->bnse', {read}, {values})"), "o")


def fuses(w: Writer, d: Widths) -> None:
    w.fuses("latent_attention", "attention", target="" if d.latent == LARGE[2] and w.narrow else "host")


def latent_attention(w: Writer) -> None:
    """Over a latent and rotated keys that are given."""
    d, keys = widths(w), w.pick("S", "T")
    q = w.take(("B", d.heads, "S", d.nope + d.rope), "q")
    latent, rope = w.take(("B", keys, d.latent), "latent"), w.take(("B", keys, d.rope), "rope")
    up = w.input((d.heads * (d.nope + d.value), d.latent), "matrix", name="up")
    fuses(w, d)
    o = w.pick(expanded, absorbed)(w, d, q, latent, rope, up, seen_by(w, q, latent, keys))
    if w.maybe():
        w.give(w.let(f"{o}.transpose(1, 2).flatten(2)", "o"), ("B", "S", d.heads * d.value))
    else:
        w.give(o, ("B", d.heads, "S", d.value))


def latent_caches(w: Writer) -> None:
    """The same over caches that are written to first."""
    d = widths(w)
    q = w.take(("B", d.heads, "S", d.nope + d.rope), "q")
    start, room = w.input((), "below 3", name="start"), 16
    caches = []
    for width in (d.latent, d.rope):
        cache, rows = w.input(("B", room, width), name="cache"), w.take(("B", "S", width), "rows")
        places = f"{start} + torch.arange({rows}.shape[1])"
        w.do(w.pick(f"{cache}.index_copy_(1, {places}, {rows})", f"{cache}[:, {places}] = {rows}"))
        caches.append(cache)
    up = w.input((d.heads * (d.nope + d.value), d.latent), "matrix", name="up")
    seen = w.let(f"torch.arange({room}) <= ({start} + torch.arange({q}.shape[2]))[:, None]", "seen")
    fuses(w, d)
    w.fuses("cache_write", "kv_rms", "mla_")
    w.give(w.pick(expanded, absorbed)(w, d, q, *caches, up, seen), ("B", d.heads, "S", d.value))


def head_projection(w: Writer) -> None:
    """Every head by its own matrix."""
    heads, width, other = w.pick(2, 4), 128, w.pick(64, 512)
    x, weight = w.take(("B", heads, "S", width)), w.input((heads, width, other), "matrix", name="w")
    w.fuses("head_projection", "latent", "attention", target="ascend910_93" if w.narrow else "none")
    y = w.pick(f"{x} @ {weight}", f"torch.einsum('bnsd,ndc->bnsc', {x}, {weight})", f"torch.matmul({x}, {weight})")
    w.give(w.let(y, "y"), ("B", heads, "S", other))


def latent_line(w: Writer) -> None:
    """The norm of a latent, the rotation of its key, and both writes."""
    d = Widths(1, *LARGE)
    row = w.take(("B", "S", d.latent + d.rope), "row")
    latent, rope = w.both(f"{row}.split(({d.latent}, {d.rope}), dim=-1)", 2, "latent")
    latent = normed(w, latent, d.latent)
    cos, sin = (w.input(("B", "S", d.rope), name=name) for name in ("cos", "sin"))
    half = d.rope // 2
    c, s = w.let(f"{cos}[..., :{half}]", "c"), w.let(f"{sin}[..., :{half}]", "s")
    a, b = w.let(f"{rope}[..., ::2]", "a"), w.let(f"{rope}[..., 1::2]", "b")
    turned = w.let(f"torch.cat(({a} * {c} - {b} * {s}, {b} * {c} + {a} * {s}), -1)", "turned")
    start = w.input((), "below 3", name="start")
    w.fuses("kv_rms", "rms_norm", "cache_write")
    for made, width in ((latent, d.latent), (turned, d.rope)):
        cache = w.input(("B", 16, width), name="cache")
        w.do(f"{cache}.index_copy_(1, {start} + torch.arange({made}.shape[1]), {made})")
        w.kept.append(w.let(w.pick(f"{cache} * 2", cache, f"{cache}[:, :1]"), "e"))


BLOCKS = (latent_attention, latent_attention, latent_caches, head_projection, latent_line)
