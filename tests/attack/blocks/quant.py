"""Layers in int8, in the ways that people write them."""

from __future__ import annotations

from ..writer import Writer
from .norms import normed


def quantised(w: Writer, x: str) -> tuple[str, str]:
    """Whole numbers, and the scale of each row with its dim kept."""
    h = w.let(f"{x}.float()")
    largest = w.pick(f"{h}.abs().amax(dim=-1, keepdim=True)", f"{h}.abs().max(dim=-1, keepdim=True).values",
                     f"torch.max(torch.abs({h}), dim=-1, keepdim=True)[0]")  # fmt: skip
    scale = w.let(w.pick(f"{largest} / 127", f"{largest} / 127.0", f"({largest} / 127).clamp(min=1e-8)"), "scale")
    whole = w.pick(
        f"({h} / {scale}).round().clamp(-128, 127).to(torch.int8)", f"torch.round({h} / {scale}).to(torch.int8)",
        f"({h} * (1.0 / {scale})).round().clamp(-128, 127).to(torch.int8)", f"({h} / {scale}).round().to(torch.int8)",
    )  # fmt: skip
    return w.let(whole, "whole"), scale


def product(w: Writer, whole: str, tokens: str, wide: int, rows: int, dtype: str) -> str:
    weight, scale = w.input((rows, wide), "int8", name="w"), w.input((rows,), f"scale {wide}", name="scale")
    if w.maybe():
        flat = w.let(f"torch._int_mm({whole}.reshape(-1, {wide}), {weight}.t())", "flat")
        total = w.let(f"{flat}.view(*{whole}.shape[:-1], {rows}).float() * {tokens} * {scale}", "total")
    else:
        total = w.let(w.pick(f"F.linear({whole}.float(), {weight}.float()) * ({tokens} * {scale})",
                             f"({whole}.float() @ {weight}.t().float()) * {tokens} * {scale}"), "total")  # fmt: skip
    return w.let(f"{total}.to({dtype})", "y")


def dynamic_quant(w: Writer) -> None:
    dims = w.pick(("B", "S", 64), ("T", 128))
    x = w.input(dims, "rows")
    w.fuses("quantisation", "quantised_linear", target="" if w.narrow else "host")
    whole, scale = quantised(w, x)
    if w.maybe():
        w.kept += [whole, scale]
        return
    w.fuses("quantised_linear", target="" if w.narrow else "none")
    rows = w.pick(64, 128)
    w.give(product(w, whole, scale, dims[-1], rows, f"{x}.dtype"), (*dims[:-1], rows))


def behind_a_norm(w: Writer) -> None:
    dims = ("B", "S", w.pick(64, 128))
    x, residual = w.take(dims), w.take(dims, "r")
    total = w.let(f"{x} + {residual}", "s")
    y = normed(w, total, dims[-1])
    w.fuses("encoded_norm", "add_norm", "rms_norm")
    whole, scale = quantised(w, y)
    w.kept += [total, *([whole, scale] if w.maybe() else [product(w, whole, scale, dims[-1], 64, "torch.bfloat16")])]


def weight_only(w: Writer) -> None:
    """A layer whose weight alone is in whole numbers, with scales of rows or of groups of lanes."""
    wide, rows = w.pick(64, 128), w.pick(64, 128)
    x, weight = w.take(("B", "S", wide)), w.input((rows, wide), "int8", name="w")
    kind = w.pick("rows", "behind", "groups", "flat groups", "one")
    lead = {
        "rows": (rows, 1),
        "behind": (rows,),
        "groups": (rows, wide // 32, 1),
        "flat groups": (rows * wide // 32, 1),
    }
    scale = w.input(lead.get(kind, (1,)), f"scale {wide}", name="scale")
    whole = w.let(f"{weight}.to({x}.dtype)", "whole")
    if kind == "behind":
        w.give(w.let(f"(F.linear({x}, {whole}) * {scale}).to({x}.dtype)", "y"), ("B", "S", rows))
        return
    cut = {"groups": f"{whole}.view({rows}, -1, 32)", "flat groups": f"{whole}.view(-1, 32)"}.get(kind, whole)
    real = w.let(f"({cut} * {scale}).view({rows}, {wide}).to({x}.dtype)", "real")
    w.give(w.let(w.pick(f"F.linear({x}, {real})", f"{x} @ {real}.t()"), "y"), ("B", "S", rows))


def static_quant(w: Writer) -> None:
    """By the scale of a tensor or of each lane, before a product of int8 or alone."""
    wide = w.pick(64, 128)
    x = w.take(("B", "S", wide))
    scale = w.input(w.pick((1,), (wide,)), "scale", w.pick("", "float32"), name="quant")
    q = w.pick(f"{x} / {scale}", f"{x}.float() / {scale}.float()", f"{x} * (1 / {scale})")
    q = w.let(w.pick(q, f"{q} + 3"), "q")
    whole = w.let(f"torch.clamp(torch.round({q}), -128, 127).to(torch.int8)", "whole")
    if w.maybe():
        w.kept.append(whole)
        return
    w.give(product(w, whole, f"{scale}[:1].float()", wide, 64, f"{x}.dtype"), ("B", "S", 64))


def static_behind_a_norm(w: Writer) -> None:
    """By constants, of a sum or of what is none."""
    dims = ("B", "S", w.pick(64, 128))
    x, residual = w.take(dims), w.take(dims, "r")
    total = w.let(w.pick(f"{x} + {residual}", f"{x} * 0.5"), "s")
    y = normed(w, total, dims[-1])
    w.fuses("encoded_norm", "add_norm", "rms_norm")
    q = w.pick(y, f"{y}.float()") + " / " + w.pick("0.03125", "0.0234375") + w.pick("", " + 3", " - 5")
    whole = w.pick(f"({q}).round().clamp(-128, 127)", f"torch.clamp(torch.round({q}), -128, 127)",
                   f"({q}).clamp(-128, 127).round()")  # fmt: skip
    w.kept += [total, w.let(f"{whole}.to(torch.int8)", "whole")]


BLOCKS = (dynamic_quant, dynamic_quant, behind_a_norm, static_quant, static_behind_a_norm, weight_only)
