"""Small calls of the operators on int8: with and without factors, offsets and second results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Make = Callable[[torch.dtype], dict[str, Any]]
CODES = {torch.float16: 5}


def grid(*shape: int) -> Tensor:
    """Numbers n / 32 whose largest of a row is odd / 32: no quotient n · 127 / largest is halfway between two."""
    whole = (torch.randn(*shape, dtype=torch.float64) * 32).round().clamp(-120, 120)
    top = whole.abs().argmax(-1, keepdim=True)
    largest = whole.abs().amax(-1, keepdim=True)
    return whole.scatter(-1, top, largest + 1 - largest % 2) / 32


def quant(*shape: int, smooth: bool = False, swap: bool = False, zeros: bool = False) -> Make:
    def make(dtype: torch.dtype) -> dict[str, Any]:
        x = grid(*shape).to(dtype)
        if zeros:
            x[0] = 0
        factors = {"smooth_scales": 2.0 ** torch.randint(-1, 1, shape[-1:]).to(dtype)} if smooth else {}
        return {"input": x.transpose(0, 1) if swap else x} | factors

    return make


QUANT: tuple[tuple[str, Make], ...] = (
    ("tokens", quant(7, 48)),
    ("batch 1", quant(1, 5, 48)),
    ("a view", quant(5, 3, 48, swap=True)),
    ("rows of zeros", quant(4, 48, zeros=True)),
    ("with factors", quant(2, 3, 48, smooth=True)),
)


def gated(*shape: int, left: bool = True) -> Make:
    """Both halves, the gate first or last."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        return {"x": torch.randn(*shape, dtype=torch.float64).to(dtype), "activate_left": left, "quant_mode": 1}

    return make


GATED: tuple[tuple[str, Make], ...] = (
    ("the first half activated", gated(7, 48)),
    ("the second half activated, batch 1", gated(1, 5, 48, left=False)),
)


def fixed(
    *shape: int, one: bool = False, zero: torch.dtype | None = None, divided: bool = True, swap: bool = False
) -> Make:
    """By scales that are powers of two, which every dtype holds."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        x, size = grid(*shape).to(dtype), 1 if one else shape[-1]
        scales = 2.0 ** torch.randint(-6, -3, (size,)).to(dtype)
        zeros = None if zero is None else torch.randint(-9, 10, (size,)).to(zero)
        by = scales if divided else 1 / scales
        x = x.transpose(0, 1) if swap else x
        return {"input": x, "scales": by, "zero_points": zeros, "dtype": 12, "axis": -1, "div_mode": divided}

    return make


FIXED: tuple[tuple[str, Make], ...] = (
    ("channels", fixed(7, 48)),
    ("one scale, a zero point", fixed(2, 3, 48, one=True, zero=torch.int8)),
    ("zero points, multiplied", fixed(2, 3, 48, zero=torch.int32, divided=False)),
    ("batch 1, a view", fixed(1, 5, 48, swap=True)),
)


def whole(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def product(*rows: int, k: int = 48, n: int = 24, tokens: bool = True, bias: torch.dtype | None = None,
            one: bool = False, turned: bool = False) -> Make:  # fmt: skip
    """Scales are float32, or float64 where everything is."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        wide = torch.promote_types(dtype, torch.float32)
        weight = whole(n, k).t() if turned else whole(k, n)
        call: dict[str, Any] = {"x1": whole(*rows, k), "x2": weight, "scale": torch.rand(1 if one else n).to(wide) / 64}
        more: dict[str, Any] = {"pertoken_scale": torch.rand(rows[-1]).to(wide) / 64} if tokens else {}
        if bias is not None:
            numbers = torch.randint(-1000, 1000, (n,))
            more["bias"] = numbers.to(torch.int32) if bias == torch.int32 else (numbers / 64).to(wide)
        return call | more | {"output_dtype": CODES.get(dtype, 15)}

    return make


PRODUCTS: tuple[tuple[str, Make], ...] = (
    ("tokens", product(7)),
    ("one token", product(1)),
    ("no token", product(0)),
    ("batches", product(2, 5)),
    ("a turned weight", product(7, turned=True)),
    ("more products than float32 counts", product(3, k=2200)),
    ("no scale of tokens", product(7, tokens=False)),
    ("one scale for all", product(7, one=True)),
    ("whole bias", product(7, bias=torch.int32)),
    ("bias", product(7, bias=torch.float32)),
)


def normed(*shape: int, swap: bool = False, zeros: bool = False, **more: Any) -> Make:
    def make(dtype: torch.dtype) -> dict[str, Any]:
        x1, x2 = (torch.randn(*shape, dtype=torch.float64).to(dtype) for _ in range(2))
        if zeros:
            x2[0] = -x1[0]
        names = [name for name, value in more.items() if value is Tensor]
        given = {name: torch.rand(shape[-1], dtype=torch.float64).to(dtype) + 0.5 for name in ("gamma", *names)}
        turned = [each.transpose(0, 1) if swap else each for each in (x1, x2)]
        rest = {name: value for name, value in more.items() if value is not Tensor}
        return {"x1": turned[0], "x2": turned[1], "epsilon": 1e-5} | given | rest

    return make


NORMS: tuple[tuple[str, Make], ...] = (
    ("tokens", normed(7, 96)),
    ("batch 1", normed(1, 5, 64)),
    ("a view", normed(5, 3, 64, swap=True)),
    ("rows of zeros", normed(4, 64, zeros=True)),
    ("offset", normed(7, 64, beta=Tensor)),
    ("a factor", normed(7, 64, smooth_scale1=Tensor)),
    ("two factors", normed(7, 64, smooth_scale1=Tensor, smooth_scale2=Tensor)),
    ("both results", normed(7, 64, output_mask=[True, True])),
    ("the second result", normed(7, 64, output_mask=[False, True], smooth_scale2=Tensor)),
)


def constants(x: Tensor, *names: str, several: bool) -> dict[str, Tensor]:
    """A scale of each channel (or one), and whole zero points, in the dtypes that go with x."""
    shape = x.shape[-1:] if several else (1,)
    wide = torch.promote_types(x.dtype, torch.float32)
    scale = 2.0 ** torch.randint(-6, -3, shape, dtype=torch.float64)
    zero = torch.randint(-9, 10, shape)
    kinds = (torch.int8, x.dtype) if not several else (torch.bfloat16, torch.bfloat16)
    if several and x.dtype != torch.bfloat16:
        kinds = (torch.int32, wide)
    values = {"scale": scale.to(kinds[1]), "zero": zero.to(kinds[0])}
    return {name: values["scale" if "scale" in name else "zero"] for name in names}


def added_static(*shape: int, swap: bool = False, beta: bool = False, zero: bool = True) -> Make:
    def make(dtype: torch.dtype) -> dict[str, Any]:
        call = normed(*shape, swap=swap, **({"beta": Tensor} if beta else {}))(dtype)
        names = ("scales1", "zero_points1") if zero else ("scales1",)
        return {"zero_points1": None} | call | constants(call["x1"], *names, several=True)

    return make


ADDED_STATIC: tuple[tuple[str, Make], ...] = (
    ("tokens", added_static(7, 96)),
    ("one token", added_static(64)),
    ("batch 1", added_static(1, 5, 64)),
    ("a view", added_static(5, 3, 64, swap=True)),
    ("an offset", added_static(7, 64, beta=True)),
    ("no zero point", added_static(7, 64, zero=False)),
)


def static(*shape: int, swap: bool = False) -> Make:
    def make(dtype: torch.dtype) -> dict[str, Any]:
        call = normed(*shape, swap=swap, beta=Tensor)(dtype)
        del call["x2"]
        return {"x": call.pop("x1")} | call | constants(call["gamma"], "scale", "offset", several=False)

    return make


STATIC: tuple[tuple[str, Make], ...] = (
    ("tokens", static(7, 96)),
    ("one token", static(64)),
    ("batch 1", static(1, 5, 64)),
    ("a view", static(5, 3, 64, swap=True)),
)


def weighted(m: int, k: int = 96, n: int = 24, *, turned: bool = False, groups: int = 0, offset: bool = False,
             bias: bool = False, one: bool = False) -> Make:  # fmt: skip
    """Floats times a weight of int8; scales are powers of two, so that no product with them is rounded."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        shape = (-(-k // groups), n) if groups else (1 if one else n,)
        scale = (2.0 ** torch.randint(-9, -5, shape)).to(dtype)
        call: dict[str, Any] = {
            "x": (torch.randn(m, k, dtype=torch.float64) * 8).round().to(dtype) / 8,
            "weight": whole(n, k).t() if turned else whole(k, n), "antiquant_scale": scale,
        }  # fmt: skip
        more: dict[str, Any] = {"antiquant_offset": torch.randint(-100, 100, shape).to(dtype)} if offset else {}
        if bias:
            more["bias"] = torch.randn(n, dtype=torch.float64).to({torch.bfloat16: torch.float32}.get(dtype, dtype))
        return call | more | {"antiquant_group_size": groups}

    return make


WEIGHTED: tuple[tuple[str, Make], ...] = (
    ("tokens", weighted(7)),
    ("one token", weighted(1)),
    ("a turned weight", weighted(7, turned=True)),
    ("offsets", weighted(7, offset=True)),
    ("a bias", weighted(7, bias=True)),
    ("one scale for all", weighted(7, one=True)),
    ("one scale and offset for all", weighted(7, one=True, offset=True)),
    ("groups", weighted(7, groups=32)),
    ("groups, offsets, a bias", weighted(7, groups=64, offset=True, bias=True, turned=True)),
)


def turned(*shape: int, k: int, swap: bool = False, zeros: bool = False) -> Make:
    """Rows times a permutation with signs: their numbers stay those of a grid."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        x = grid(*shape).to(dtype)
        if zeros:
            x[0] = 0
        rotation = torch.eye(k, dtype=torch.float64)[torch.randperm(k)] * (torch.randint(0, 2, (k,)) * 2 - 1)
        rotation = rotation.to(dtype)
        return {"x": x, "rotation": rotation.t() if swap else rotation, "dst_dtype": 1}

    return make


TURNED: tuple[tuple[str, Make], ...] = (
    ("tokens", turned(7, 128, k=128)),
    ("one token", turned(1, 128, k=128)),
    ("blocks", turned(5, 192, k=64)),
    ("a turned rotation", turned(5, 128, k=128, swap=True)),
    ("rows of zeros", turned(4, 128, k=32, zeros=True)),
)
