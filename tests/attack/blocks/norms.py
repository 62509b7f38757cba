"""Norms, residuals and gates in the ways that people write them."""

from __future__ import annotations

from ..program import Dims
from ..writer import Writer

HIDDEN = (64, 128, 256)


def rows(w: Writer) -> Dims:
    """Dims of hidden states."""
    return w.pick(("B", "S", w.pick(*HIDDEN)), ("T", w.pick(*HIDDEN)), ("B", "S", 128))


def square(w: Writer, h: str) -> str:
    return w.pick(f"{h}.pow(2)", f"{h} * {h}", f"{h}.square()", f"{h} ** 2", f"torch.pow({h}, 2)")


def inverse_root(w: Writer, h: str, mean: str, eps: str) -> str:
    """The normalised rows."""
    return w.pick(
        f"{h} * torch.rsqrt({mean} + {eps})",
        f"{h} / torch.sqrt({mean} + {eps})",
        f"torch.rsqrt({eps} + {mean}) * {h}",
        f"{h} * ({mean} + {eps}).pow(-0.5)",
        f"{h} * ({mean} + {eps}).sqrt().reciprocal()",
        f"{h}.div(({mean} + {eps}).sqrt())",
    )


def mean_square(w: Writer, h: str, dim: int) -> str:
    squares = square(w, h)
    return w.pick(
        f"({squares}).mean(-1, keepdim=True)",
        f"({squares}).mean(dim=-1, keepdim=True)",
        f"torch.mean({squares}, dim=-1, keepdim=True)",
        f"({squares}).sum(-1, keepdim=True) / {dim}",
        f"({squares}).mean(-1).unsqueeze(-1)",
        f"({squares}).mean(-1)[..., None]",
    )


def normed(w: Writer, x: str, dim: int, eps: str = "") -> str:
    """RMS norm of `x` [..., dim], with a gain, 1 + gain or none."""
    eps = eps or w.pick("1e-6", "1e-5")
    h = w.let(w.pick(f"{x}.float()", f"{x}.to(torch.float32)", f"{x}.to(dtype=torch.float32)"))
    how = w.pick("gain", "gain in float", "one plus", "none", "whole")
    if how == "whole":
        gain = w.input((dim,), "gain", name="w")
        return w.let(f"F.rms_norm({x}, ({dim},), {gain}, {eps})", "y")
    y = w.let(inverse_root(w, h, mean_square(w, h, dim), eps))
    back = w.pick(f"{y}.to({x}.dtype)", f"{y}.type_as({x})")
    if how == "none":
        return w.let(back, "y")
    gain = w.input((dim,), "gain", name="w")
    if how == "gain":
        return w.let(w.pick(f"{gain} * {back}", f"{back} * {gain}"), "y")
    if how == "gain in float":
        return w.let(f"({y} * {gain}.float()).to({x}.dtype)", "y")
    return w.let(f"({y} * (1.0 + {gain}.float())).type_as({x})", "y")


def rms_norm(w: Writer) -> None:
    dims = rows(w)
    x = w.take(dims)
    w.fuses("rms_norm", "add_norm", "kv_rmsnorm", "mla_")
    w.give(normed(w, x, dims[-1]), dims)


def add_rms_norm(w: Writer) -> None:
    dims = rows(w)
    x, residual = w.take(dims), w.take(dims, "r")
    total = w.let(w.pick(f"{x} + {residual}", f"{residual} + {x}", f"torch.add({x}, {residual})"), "s")
    w.fuses("add_norm", "rms_norm")
    w.give(normed(w, total, dims[-1]), dims)
    w.give(total, dims)


def add_in_float32(w: Writer) -> None:
    """The residual stream has more range than the model."""
    dims = rows(w)
    x, residual = w.take(dims), w.input(dims, dtype="float32", name="r")
    total = w.let(w.pick(f"{x}.float() + {residual}", f"{residual} + {x}", f"{residual} + {x}.to(torch.float32)"), "s")
    gain = w.input(dims[-1:], "gain", name="w")
    y = w.let(inverse_root(w, total, mean_square(w, total, dims[-1]), "1e-6"), "y")
    w.give(w.let(w.pick(f"{y}.to({x}.dtype) * {gain}", f"({y} * {gain}.float()).to({x}.dtype)"), "y"), dims)
    w.kept.append(w.let(w.pick(total, f"{total}.to({x}.dtype)"), "s"))


def add_rms_norm_in_place(w: Writer) -> None:
    """The residual stream is kept in one tensor."""
    dims = rows(w)
    x, residual = w.input(dims), w.input(dims, name="r")
    w.do(w.pick(f"{residual}.add_({x})", f"{residual} += {x}"))
    w.fuses("add_norm", "rms_norm")
    w.give(normed(w, residual, dims[-1]), dims)


def layer_norm(w: Writer) -> None:
    dims = rows(w)
    x, gain, bias = w.take(dims), w.input(dims[-1:], "gain", name="w"), w.input(dims[-1:], "gain", name="b")
    if w.maybe():
        residual = w.take(dims, "r")
        x = w.let(f"{x} + {residual}", "s")
        w.kept += [x] if w.maybe() else []
    h = w.let(f"{x}.float()")
    c = w.let(w.pick(f"{h} - {h}.mean(-1, keepdim=True)", f"{h} - torch.mean({h}, -1, keepdim=True)"), "c")
    variance = w.pick(mean_square(w, c, dims[-1]), f"{h}.var(-1, keepdim=True, correction=0)")
    y = w.let(inverse_root(w, c, variance, "1e-5"))
    w.fuses("layer_norm", "add_norm")
    w.give(w.let(f"({y} * {gain}.float() + {bias}.float()).to({x}.dtype)", "y"), dims)


def gate(w: Writer, gate: str, up: str) -> str:
    return w.pick(
        f"F.silu({gate}) * {up}", f"{up} * F.silu({gate})", f"{gate} * torch.sigmoid({gate}) * {up}",
        f"({gate} * {gate}.sigmoid()) * {up}", f"{gate} / (1 + torch.exp(-{gate})) * {up}",
    )  # fmt: skip


def swiglu(w: Writer) -> None:
    """Over one merged projection."""
    first = w.pick(("B", "S"), ("T",))
    dim = w.pick(64, 128)
    x = w.take((*first, 2 * dim))
    halves = w.pick(
        f"{x}.chunk(2, dim=-1)", f"{x}.split({dim}, dim=-1)", f"({x}[..., :{dim}], {x}[..., {dim}:])",
        f"{x}.unflatten(-1, (2, {dim})).unbind(-2)", f"torch.chunk({x}, 2, -1)", f"{x}.tensor_split(2, -1)",
    )  # fmt: skip
    left, right = w.both(halves, 2, "g")
    w.fuses("activation")
    w.give(w.let(gate(w, left, right), "y"), (*first, dim))


def gated_projections(w: Writer) -> None:
    """Two projections of one input by Parameters, the gate, and the way back."""
    dims = ("B", "S", w.pick(64, 128))
    x = w.take(dims)
    wide = w.pick(64, 128)
    g, u = (w.input((wide, dims[-1]), "matrix", name="w") for _ in range(2))
    left, right = w.let(f"F.linear({x}, {g})", "g"), w.let(f"F.linear({x}, {u})", "u")
    w.fuses("activation")
    y = w.let(gate(w, left, right), "y")
    down = w.input((dims[-1], wide), "matrix", name="w")
    w.give(w.let(f"F.linear({y}, {down})", "y"), dims)


def projections(w: Writer) -> None:
    """Queries, keys and values of one input by Parameters."""
    dims = ("B", "S", w.pick(64, 128))
    x, heads, shared = w.take(dims), w.pick(1, 2, 4), w.pick(1, 2)
    w.fuses("joined_projections", "mla_")
    for count in (heads, shared, shared):
        weight = w.input((count * 64, dims[-1]), "matrix", name="w")
        y = w.let(w.pick(f"F.linear({x}, {weight})", f"{x} @ {weight}.t()", f"torch.matmul({x}, {weight}.T)"), "y")
        if w.maybe():
            w.give(w.let(f"{y}.view({x}.shape[0], -1, {count}, 64).transpose(1, 2)"), ("B", count, "S", 64))
        else:
            w.give(y, ("B", "S", count * 64))


BLOCKS = (
    rms_norm, rms_norm, add_rms_norm, add_rms_norm, add_rms_norm_in_place, layer_norm, swiglu, gated_projections,
    projections, add_in_float32,
)  # fmt: skip
