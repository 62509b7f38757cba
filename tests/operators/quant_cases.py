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


INT8, INT4 = 1, 16
"""torch's numbers of int8 and quint4x2."""


def quant(
    *shape: int, smooth: bool = False, swap: bool = False, zeros: bool = False, mode: str = "pertoken",
    ends: tuple[int, ...] = (), dst_type: int | None = None,
) -> Make:  # fmt: skip
    """With factors of lanes, of groups of rows, which end at `ends`, or of rows where columns have scales."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        x = grid(*shape).to(dtype)
        if mode == "perchannel":
            x = grid(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2).contiguous().to(dtype)
        if zeros:
            x[0] = 0
        sizes = (len(ends), shape[-1]) if ends else shape[-2:-1] if mode == "perchannel" else shape[-1:]
        factors = {"smooth_scales": 2.0 ** torch.randint(-1, 1, sizes).to(dtype)} if smooth or ends else {}
        groups = {"group_index": torch.tensor(ends, dtype=torch.int32)} if ends else {}
        how = ({} if mode == "pertoken" else {"quant_mode": mode}) | (
            {} if dst_type is None else {"dst_type": dst_type}
        )
        return {"input": x.transpose(0, 1) if swap else x} | factors | groups | how

    return make


QUANT: tuple[tuple[str, Make], ...] = (
    ("tokens", quant(7, 48)),
    ("batch 1", quant(1, 5, 48)),
    ("a view", quant(5, 3, 48, swap=True)),
    ("rows of zeros", quant(4, 48, zeros=True)),
    ("with factors", quant(2, 3, 48, smooth=True)),
    ("factors of groups, rows behind them", quant(2, 4, 48, ends=(3, 3, 7))),
    ("columns", quant(2, 5, 48, mode="perchannel")),
    ("columns, with factors", quant(5, 7, 16, mode="perchannel", smooth=True)),
    ("columns, a view", quant(5, 7, 16, mode="perchannel", swap=True)),
    ("all numbers", quant(3, 5, 16, mode="pertensor")),
    ("all numbers, with factors", quant(2, 3, 48, mode="pertensor", smooth=True)),
    ("int8 by name", quant(3, 16, dst_type=INT8)),
    ("float8", quant(3, 16, dst_type=24)),
    ("float8, rows of zeros", quant(3, 16, zeros=True, dst_type=24)),
    ("int4", quant(2, 3, 48, dst_type=INT4)),
    ("int4, factors of groups", quant(6, 16, ends=(2, 6), dst_type=INT4)),
    ("int4 of all numbers", quant(5, 16, mode="pertensor", dst_type=INT4)),
)


def gated(
    *shape: int, left: bool = True, static: bool = False, lanes: bool = True, smooth: bool = False,
    ends: tuple[int, ...] = (), counts: bool = False, shift: bool = False, dst_type: int | None = None,
) -> Make:  # fmt: skip
    """Both halves, the gate first or last; factors of lanes or one of all, of groups of rows where these end.

    `counts` gives how long groups are in place of where they end. Only `static` scales have a `shift`.
    """

    def make(dtype: torch.dtype) -> dict[str, Any]:
        call: dict[str, Any] = {
            "x": torch.randn(*shape, dtype=torch.float64).to(dtype), "activate_left": left,
            "quant_mode": 0 if static else 1,
        }  # fmt: skip
        wide, sizes = torch.promote_types(dtype, torch.float32), (max(1, len(ends)), *((shape[-1] // 2,) * lanes))
        if smooth or static or ends:
            call["smooth_scales"] = ((torch.rand(sizes, dtype=torch.float64) + 0.5) * (9 if static else 1)).to(wide)
        if shift:
            call["offsets"] = torch.randn(sizes, dtype=torch.float64).to(wide)
        if ends:
            lengths = [end - start for start, end in zip((0, *ends), ends, strict=False)]
            call["group_index"] = torch.tensor(lengths if counts else ends, dtype=torch.int32)
            call["group_list_type"] = int(counts)
        return call | ({} if dst_type is None else {"dst_type": dst_type})

    return make


GATED: tuple[tuple[str, Make], ...] = (
    ("the first half activated", gated(7, 48)),
    ("the second half activated, batch 1", gated(1, 5, 48, left=False)),
    ("factors of lanes", gated(5, 48, smooth=True)),
    ("one factor", gated(5, 48, smooth=True, lanes=False)),
    ("factors of groups", gated(2, 4, 48, ends=(3, 3, 8))),
    ("one factor of each group, by lengths, rows behind them", gated(7, 48, ends=(2, 5), counts=True, lanes=False)),
    ("static scales", gated(5, 48, static=True, left=False)),
    ("static scales, offsets", gated(2, 3, 48, static=True, shift=True)),
    ("static scales and offsets of groups", gated(6, 48, static=True, shift=True, ends=(1, 4, 6), lanes=False)),
    ("static scales of groups, by lengths", gated(6, 48, static=True, ends=(1, 5), counts=True, shift=True)),
    ("int8 by name", gated(3, 16, dst_type=INT8)),
)


def fixed(
    *shape: int, one: bool = False, zero: torch.dtype | None = None, divided: bool = True, swap: bool = False,
    axis: int = -1, of: int = 12, dims: bool = False, one_zero: bool = False,
) -> Make:  # fmt: skip
    """By scales that are powers of two, which every dtype holds; with as many `dims` as the input, or with one."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        x = grid(*shape).to(dtype)
        x = x.transpose(0, 1) if swap else x
        sizes = [1] * x.ndim if dims else [1]
        along = axis if divided or axis == -2 else -1
        sizes[along if dims else 0] = 1 if one else x.shape[along]
        scales = 2.0 ** torch.randint(-6, -3, sizes).to(dtype)
        zeros = None if zero is None else torch.randint(-9, 10, [1] if one_zero else sizes).to(zero)
        by = scales if divided else 1 / scales
        return {"input": x, "scales": by, "zero_points": zeros, "dtype": of, "axis": axis, "div_mode": divided}

    return make


FIXED: tuple[tuple[str, Make], ...] = (
    ("channels", fixed(7, 48)),
    ("one scale, a zero point", fixed(2, 3, 48, one=True, zero=torch.int8)),
    ("zero points, multiplied", fixed(2, 3, 48, zero=torch.int32, divided=False)),
    ("batch 1, a view", fixed(1, 5, 48, swap=True)),
    ("rows", fixed(5, 16, axis=0, zero=torch.int32)),
    ("the dim between", fixed(2, 5, 16, axis=1)),
    ("all dims written", fixed(2, 5, 16, axis=-2, dims=True, zero=torch.int8)),
    ("one zero point for all", fixed(2, 16, zero=torch.int32, one_zero=True)),
    ("multiplied, an axis that counts as the last", fixed(2, 5, 16, axis=0, divided=False)),
    ("multiplied, the last dim but one", fixed(2, 5, 16, axis=-2, divided=False, zero=torch.int32)),
    ("multiplied, all dims written", fixed(2, 5, 16, axis=-2, divided=False, dims=True)),
    *((f"dtype {of}", fixed(3, 16, of=of, zero=torch.int32)) for of in (0, 1, 3, 13, 14)),
    ("multiplied, int8", fixed(3, 16, of=INT8, divided=False)),
    ("multiplied, int4", fixed(3, 16, of=INT4, divided=False)),
)


def whole(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def product(*rows: int, k: int = 48, n: int = 24, tokens: bool = True, bias: torch.dtype | None = None,
            one: bool = False, turned: bool = False, batches: int = 0, narrow: str = "") -> Make:  # fmt: skip
    """Scales are float32, or float64 where everything is; `batches` of weights, with a bias each.

    A result in int8, which is `narrow`: "scaled", or "shifted" as well, or "named" by its dtype; "sums" in int32.
    """

    def make(dtype: torch.dtype) -> dict[str, Any]:
        wide = torch.promote_types(dtype, torch.float32)
        weight = whole(n, k).t() if turned else whole(*((batches,) if batches else ()), k, n)
        call: dict[str, Any] = {"x1": whole(*rows, k), "x2": weight, "scale": torch.rand(1 if one else n).to(wide) / 64}
        more: dict[str, Any] = {"pertoken_scale": torch.rand(rows[-1]).to(wide) / 64} if tokens else {}
        if bias is not None:
            numbers = torch.randint(-1000, 1000, (batches, 1, n) if batches else (n,))
            more["bias"] = numbers.to(torch.int32) if bias == torch.int32 else (numbers / 64).to(wide)
        if narrow == "shifted":
            more["offset"] = torch.randint(-9, 10, (1 if one else n,)).to(wide)
        if narrow:
            call["scale"] = call["scale"] / 9
        kind = {
            "": {"output_dtype": CODES.get(dtype, 15)},
            "named": {"output_dtype": INT8},
            "sums": {"output_dtype": 3},
        }
        return call | more | kind.get(narrow, {})

    return make


def in_half(make: Make) -> Make:
    """The same with a result in float16 (float64 where everything is)."""
    return lambda dtype: make(dtype) | {"output_dtype": CODES[torch.float16]}


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
    ("several weights, a bias of each", product(3, bias=torch.int32, batches=2)),
    ("float16", in_half(product(7))),
    ("int8", product(7, tokens=False, narrow="scaled")),
    ("int8 by name, a bias", product(2, 5, tokens=False, narrow="named", bias=torch.int32)),
    ("int8, offsets", product(7, tokens=False, narrow="shifted")),
    ("int32", product(7, tokens=False, narrow="sums")),
    ("int32, a bias", product(7, tokens=False, narrow="sums", bias=torch.int32)),
    ("int8, one scale and offset", product(7, tokens=False, narrow="shifted", one=True)),
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
    ("the first result", normed(7, 64, output_mask=[True, False])),
    ("the second result", normed(7, 64, output_mask=[False, True], smooth_scale2=Tensor)),
    ("int8 by name", normed(7, 64, y_dtype=INT8)),
    ("int4, two factors", normed(7, 64, y_dtype=INT4, smooth_scale1=Tensor, smooth_scale2=Tensor)),
    ("another epsilon", normed(7, 64, epsilon=0.5)),
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


def added_static(
    *shape: int, swap: bool = False, beta: bool = False, zero: bool = True, second: tuple[str, ...] = (),
    divides: bool = True, epsilon: float = 1e-5,
) -> Make:  # fmt: skip
    """By one scale of each channel, or two; without `divides` the scales multiply."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        call = normed(*shape, swap=swap, **({"beta": Tensor} if beta else {}))(dtype)
        names = ("scales1", "zero_points1") if zero else ("scales1",)
        by = constants(call["x1"], *names, several=True) | constants(call["x1"], *second, several=True)
        if not divides:
            by = {name: 1 / each if "scale" in name else each for name, each in by.items()}
        how = {} if divides else {"div_mode": False}
        return {"zero_points1": None} | call | by | how | {"epsilon": epsilon}

    return make


ADDED_STATIC: tuple[tuple[str, Make], ...] = (
    ("tokens", added_static(7, 96)),
    ("one token", added_static(64)),
    ("batch 1", added_static(1, 5, 64)),
    ("a view", added_static(5, 3, 64, swap=True)),
    ("an offset", added_static(7, 64, beta=True)),
    ("no zero point", added_static(7, 64, zero=False)),
    ("two results", added_static(7, 64, second=("scales2", "zero_points2"))),
    ("two results, no zero points", added_static(5, 3, 64, second=("scales2",), zero=False, swap=True)),
    ("multiplied, two results", added_static(7, 64, divides=False, second=("scales2", "zero_points2"))),
    ("another epsilon", added_static(7, 64, epsilon=0.5)),
)


def static(*shape: int, swap: bool = False, epsilon: float = 1e-5) -> Make:
    def make(dtype: torch.dtype) -> dict[str, Any]:
        call = normed(*shape, swap=swap, beta=Tensor)(dtype) | {"epsilon": epsilon}
        del call["x2"]
        return {"x": call.pop("x1")} | call | constants(call["gamma"], "scale", "offset", several=False)

    return make


STATIC: tuple[tuple[str, Make], ...] = (
    ("tokens", static(7, 96)),
    ("one token", static(64)),
    ("batch 1", static(1, 5, 64)),
    ("a view", static(5, 3, 64, swap=True)),
    ("another epsilon", static(7, 64, epsilon=0.5)),
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


def turned(*shape: int, k: int, swap: bool = False, zeros: bool = False, dst_dtype: int | None = INT8) -> Make:
    """Rows times a permutation with signs: their numbers stay those of a grid."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        x = grid(*shape).to(dtype)
        if zeros:
            x[0] = 0
        rotation = torch.eye(k, dtype=torch.float64)[torch.randperm(k)] * (torch.randint(0, 2, (k,)) * 2 - 1)
        rotation = rotation.to(dtype)
        return {"x": x, "rotation": rotation.t() if swap else rotation, "dst_dtype": dst_dtype}

    return make


TURNED: tuple[tuple[str, Make], ...] = (
    ("tokens", turned(7, 128, k=128)),
    ("one token", turned(1, 128, k=128)),
    ("blocks", turned(5, 192, k=64)),
    ("a turned rotation", turned(5, 128, k=128, swap=True)),
    ("rows of zeros", turned(4, 128, k=32, zeros=True)),
    ("int8 by default", turned(5, 128, k=32, dst_dtype=None)),
    ("int4", turned(5, 128, k=32, dst_dtype=INT4)),
)
