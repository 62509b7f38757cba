"""What stands between the blocks: views, copies, in-place operations, escapes, parts that are put into others."""

from __future__ import annotations

from ..writer import Writer


def any_value(w: Writer) -> str:
    """A value of some rows, there or new."""
    return w.choose(list(w.dims)) if w.dims and w.maybe(1) else w.take(("B", "S", 64))


def escape(w: Writer) -> None:
    """A value is returned as well, or seen another way."""
    x = any_value(w)
    w.kept.append(w.let(w.pick(
        x, f"{x}.transpose(0, -1)", f"{x}[..., :1]", f"{x}.detach()", f"{x}.unsqueeze(0)", f"{x}.flatten(0, 1)",
        f"{x}.reshape(-1)", f"{x}.view({x}.shape)", f"{x}.expand_as({x})", f"{x}[0]", f"{x}.mT", f"{x}.contiguous()",
        f"{x}.sum()", f"{x}.amax(-1)", f"{x}.float()", f"{x}.to({x}.dtype)", f"{x}.clone()", f"{x} + 0", f"{x} * 1",
    ), "e"))  # fmt: skip


def change(w: Writer) -> None:
    """A value is changed in place after it was used."""
    x = any_value(w)
    part = w.pick("", "", "[..., :1]", "[:1]", "[..., ::2]", ".mT", "[0]", ".select(0, -1)")
    how = w.pick(".add_(1)", ".mul_(2)", ".zero_()", ".neg_()", ".fill_(0.5)", ".copy_(torch.ones(()))", ".clamp_(0)")
    w.do(f"{x}{part}{how}")
    w.kept.append(x)


def put(w: Writer) -> None:
    """A part is put into another tensor, by scatters of views."""
    dims = ("B", "S", 64)
    x = w.take(dims)
    if w.maybe():
        base = w.let(
            w.pick(f"torch.zeros_like({x})", f"{x}.clone()", f"torch.zeros({x}.shape, dtype={x}.dtype)"), "base"
        )
        w.do(w.pick(f"{base}[:, 0] = {x}[:, -1]", f"{base}[..., :32] = {x}[..., 32:]", f"{base}[:] = {x}",
                    f"{base}[:1].copy_({x}[:1] * 2)", f"{base}.select(1, 0).add_({x}[:, 0])"))  # fmt: skip
        w.give(base, dims)
        return
    w.give(w.let(w.pick(
        f"torch.select_scatter({x}, {x}[:, 0] * 2, 1, 0)", f"torch.slice_scatter({x}, {x}[:, :1], 1, 0, 1)",
        f"torch.select_scatter(torch.zeros_like({x}), {x}[0], 0, 0)", f"torch.slice_scatter(torch.ones_like({x}), {x})",
        f"torch.cat(({x}[..., 32:], {x}[..., :32]), -1)", f"torch.stack(({x}, {x}), 0).sum(0)",
        f"torch.cat(({x},), dim=0)", f"{x}.roll(1, -1)",
    ), "y"), dims)  # fmt: skip


def scale(w: Writer) -> None:
    """0-d tensors, numbers of other kinds and sizes as numbers."""
    dims = w.pick(("B", "S", 64), ("B", "S", 128))
    x, factor = w.take(dims), w.input((), dtype=w.pick("float32", "float32", "int64", ""), name="t")
    w.give(w.let(w.pick(
        f"({x} * {factor}).to({x}.dtype)", f"{x} * {factor}.to({x}.dtype)", f"{x} / {x}.shape[0]",
        f"{x} * torch.tensor(2.0)", f"{x} + {factor}[None, None, None].to({x}.dtype)", f"torch.mul({x}, 2) - {x}",
        f"({x} * {factor}[..., None]).to({x}.dtype)", f"torch.where({factor} > 0, {x}, -{x})",
        f"({x} * ({factor} * {x}.amax(-1, keepdim=True))).to({x}.dtype)",
    ), "y"), dims)  # fmt: skip


def turn(w: Writer) -> None:
    """Heads and tokens change places, with and without a copy."""
    n, first = w.pick(1, 2, 4), w.maybe()
    dims, there = ("B", n, "S", 64), ("B", "S", n, 64)
    x = w.take(dims if first else there)
    more = w.pick("", ".contiguous()", ".clone(memory_format=torch.contiguous_format)", " + 0")
    w.give(w.let(f"{x}.{w.pick('transpose(1, 2)', 'permute(0, 2, 1, 3)')}{more}", "t"), there if first else dims)


def rearrange(w: Writer) -> None:
    """A value is seen through views and copies, of each other, and any of them is returned."""
    x = any_value(w)
    ranks = {x: len(w.dims[x])}
    for _ in range(w.pick(2, 3, 4, 5)):
        x = w.choose(list(ranks))
        ways = [(".contiguous()", 0), (".clone()", 0), ("[:1]", 0), (" + 0", 0), (".unsqueeze(1)", 1)]
        if ranks[x] >= 2:
            ways += [(".mT", 0), (".flatten(0, 1)", -1), (f".reshape(-1, {x}.shape[-1])", 2 - ranks[x])]
        if ranks[x] >= 3:
            ways += [(".transpose(-3, -2)", 0), (".transpose(-3, -2).contiguous()", 0), (".transpose(0, 1)", 0)]
        how, more = w.choose(ways)
        ranks[w.let(f"{x}{how}", "r")] = ranks[x] + more
    w.kept += [each for each in list(ranks)[1:] if w.maybe()]


BLOCKS = (escape, escape, change, change, put, scale, turn, rearrange, rearrange)
