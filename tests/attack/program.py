"""What the attack runs: a frozen program of plain torch, as text, with a description of its inputs.

    program = Program(inputs=(Input("x", ("B", 64)),), lines=("y = x.square()",), results=("y",), sizes=(("B", 2),))
    program.function()(*program.tensors())

A program prints as the text that `Program.of` reads: a case that fails is kept in `kept.txt` as it was printed.
"""

from __future__ import annotations

import importlib
import linecache
import math
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .defined import Defined

Sizes = tuple[tuple[str, int], ...]
Dims = tuple[int | str, ...]
LAYOUTS = ("plain", "transposed", "reversed", "expanded", "offset", "strided")


@dataclass(frozen=True)
class Input:
    """One tensor that a program takes.

    Attributes:
        name: of the argument.
        dims: numbers, and names of sizes of the program.
        values: what it holds: "normal", "gain" and "matrix" (Parameters), "scale" and "scale n" (of int8 weights of n
            lanes, as large as a matrix once they are multiplied), "bool", "few bool" (perhaps none of a row), "int8",
            "left padded" and "right padded" (0 or 1), "below n" and "distinct n" (whole numbers under a number or a
            size), "rows" (no quotient by the largest of a row is halfway between whole numbers), "apart" (no two of a
            row are near).
        dtype: of its numbers; "" for the program's.
        layout: how it lies in memory, one of `LAYOUTS`.
        shares: the name of an earlier input in whose memory it lies, of the same dims.
        power: its numbers are multiplied by 2 to this power, which may bring them to an end of their range.
    """

    name: str
    dims: Dims
    values: str = "normal"
    dtype: str = ""
    layout: str = "plain"
    shares: str = ""
    power: int = 0


@dataclass(frozen=True)
class Program:
    """Lines of plain torch between inputs and results.

    Attributes:
        inputs: what it takes.
        lines: statements, one a line.
        results: names that it returns.
        sizes: what the names in dims stand for.
        again: other numbers for them, for a second call with dynamic sizes; () for none.
        dtype: of floating-point inputs.
        autocast: whether it runs under bfloat16 autocast.
        fusable: for each part that is built to be fused, how the name of a rule that must be applied may begin
            ("attention|latent"), with the target where it is not every one (" on host").
        mutations: how the lines were changed from what people write, for the reader.
        disabled: names of rules that take no part.
    """

    inputs: tuple[Input, ...]
    lines: tuple[str, ...]
    results: tuple[str, ...]
    sizes: Sizes = ()
    again: Sizes = ()
    dtype: str = "float32"
    autocast: bool = False
    fusable: tuple[str, ...] = ()
    mutations: tuple[str, ...] = ()
    disabled: tuple[str, ...] = ()

    @property
    def is_scaled(self) -> bool:
        """True if an input is brought to an end of its range: then nearness to float64 is the verdict."""
        return any(each.power for each in self.inputs)

    def source(self) -> str:
        """The program as a Python function."""
        names = ", ".join(each.name for each in self.inputs)
        body = [f"    {line}" for line in self.lines]
        if self.autocast:
            body = ["    with torch.autocast('cpu', torch.bfloat16):", *(f"    {line}" for line in body)]
        returned = f"    return ({', '.join(self.results)},)"
        return "\n".join([f"def program({names}):", *body, returned, ""])

    def function(self) -> Callable[..., tuple[Any, ...]]:
        """The program, compiled by Python; its lines are found where errors and reports look for them."""
        source = self.source()
        path = f"/attack/{crc32(source.encode()):08x}.py"
        linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
        if "ops.transformers" in source:
            importlib.import_module("transformers.integrations.moe")
        space: dict[str, Any] = {"torch": torch, "F": F, "math": math}
        exec(compile(source, path, "exec"), space)
        return space["program"]

    def tensors(self, again: bool = False) -> tuple[Tensor, ...]:
        """The inputs, the same at every call; with `again` those of the second call."""
        sizes = dict(self.again if again else self.sizes)
        made: dict[str, Tensor] = {}
        for each in self.inputs:
            made[each.name] = made[each.shares] if each.shares else _tensor(each, sizes, self.dtype)
        shared = {each.name: _view(made[each.name], each) for each in self.inputs if each.shares}
        return tuple({**made, **shared}.values())

    def largest(self, given: Input) -> float:
        """The largest magnitude in an input of numbers."""
        x = _tensor(given, dict(self.sizes), self.dtype)
        return float(x.double().abs().max()) if x.numel() else 0.0

    def runs(self) -> bool:
        """Whether plain Python runs it without an error, on both sets of sizes."""
        try:
            function = self.function()
            with torch.no_grad(), Defined(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for again in (False, True) if self.again else (False,):
                    function(*self.tensors(again))
        except Exception:
            return False
        return True

    def __repr__(self) -> str:
        """The text that `Program.of` reads."""
        notes = [f"# {kind}: {each}" for kind in _NOTES for each in getattr(self, kind)]
        body = [*notes, *self.lines, f"return {'; '.join(self.results)}"]
        again = ("again", *_sizes_text(self.again)) if self.again else ()
        dtype = () if self.dtype == "float32" else (self.dtype,)
        options = (*_sizes_text(self.sizes), *again, *dtype, *(("autocast",) if self.autocast else ()))
        inputs = [_input_text(each) for each in self.inputs]
        given = "; ".join(inputs) if sum(map(len, inputs)) <= 90 else ";\n        ".join(inputs)
        return "\n".join([f"{' '.join((f'program({given})', *options))}:", *(f"    {line}" for line in body)])

    @staticmethod
    def of(text: str) -> Program:
        """The program that a text describes: program(x[B 64]; n[B] below 12) B=2 float16: with its lines below."""
        match = re.fullmatch(r"program\((.*?)\)([^():]*):\n(.*)", text, re.DOTALL)
        assert match, text
        inputs, options, body = match.groups()
        *lines, last = (line.removeprefix("    ") for line in body.splitlines())
        notes = {kind: tuple(_after(lines, f"# {kind}: ")) for kind in _NOTES}
        return Program(
            inputs=tuple(_input_of(each.strip()) for each in inputs.split(";")),
            lines=tuple(line for line in lines if not line.startswith("# ")),
            results=tuple(last.removeprefix("return ").split("; ")),
            **_options_of(options.split()),
            **notes,
        )


_NOTES = ("fusable", "mutations", "disabled")


def _after(lines: Iterable[str], mark: str) -> Iterable[str]:
    return (line.removeprefix(mark) for line in lines if line.startswith(mark))


def _sizes_text(sizes: Sizes) -> Iterable[str]:
    return (f"{name}={size}" for name, size in sizes)


def _options_of(words: Sequence[str]) -> dict[str, Any]:
    before, after = (words[: words.index("again")], words[words.index("again") :]) if "again" in words else (words, [])
    sizes, again = (
        tuple((name, int(size)) for name, _, size in (word.partition("=") for word in part) if size)
        for part in (before, after)
    )
    plain = [word for word in words if "=" not in word and word != "again"]
    dtype = next((word for word in plain if word != "autocast"), "float32")
    return {"sizes": sizes, "again": again, "dtype": dtype, "autocast": "autocast" in plain}


def _input_text(given: Input) -> str:
    more = (each for each in fields(given)[3:] if getattr(given, each.name) != each.default)
    values = () if given.values == "normal" else (given.values,)
    words = (*values, *(f"{each.name}={getattr(given, each.name)}" for each in more))
    return " ".join((f"{given.name}[{' '.join(map(str, given.dims))}]", *words))


def _input_of(text: str) -> Input:
    match = re.fullmatch(r"(\w+)\[([^]]*)\](.*)", text)
    assert match, text
    name, dims, rest = match.groups()
    options = dict(word.split("=") for word in rest.split() if "=" in word)
    values = " ".join(word for word in rest.split() if "=" not in word) or "normal"
    power = int(options.pop("power", 0))
    sizes = tuple(int(each) if each.isdigit() else each for each in dims.split())
    return Input(name, sizes, values, power=power, **options)


def changed(what: Any, **values: Any) -> Any:
    """The same with other values."""
    return replace(what, **values)


# inputs --------------------------------------------------------------------------------------------------------------


def _tensor(given: Input, sizes: dict[str, int], floating: str) -> Tensor:
    shape = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in given.dims)
    random = torch.Generator().manual_seed(crc32(given.name.encode()))
    made = _numbers(given.values, shape, sizes, random)
    made = made * 2.0**given.power if given.power else made
    if given.dtype:
        made = made.to(getattr(torch, given.dtype))
    elif made.is_floating_point():
        made = made.to(torch.float32 if given.values.startswith("scale") else getattr(torch, floating))
    if given.values in ("gain", "matrix"):
        return nn.Parameter(made, requires_grad=False)
    return _laid(made, given.layout)


def _numbers(values: str, shape: tuple[int, ...], sizes: dict[str, int], random: torch.Generator) -> Tensor:
    """Float64, or whole numbers; multiples of powers of two that 16-bit dtypes hold."""
    kind, _, bound = values.partition(" ")
    if kind in ("below", "distinct"):
        limit = int(bound) if bound.lstrip("-").isdigit() else sizes[bound]
        if kind == "below":
            return torch.randint(0, max(limit, 1), shape, generator=random)
        rows = torch.rand(*shape[:-1], max(limit, *shape[-1:], 1), generator=random).argsort(-1)
        return rows[..., : shape[-1]].contiguous() if shape else rows[0]
    if kind == "few":
        return torch.rand(shape, generator=random) < 0.3
    if values == "bool":
        seen = torch.rand(shape, generator=random) < 0.7
        seen[..., :1] = True
        return seen
    if bound == "padded":
        return _padded(kind, shape)
    if values == "int8":
        return torch.randint(-127, 128, shape, generator=random, dtype=torch.int8)
    if kind == "scale":
        return torch.randint(16, 64, shape, generator=random).double() / 2**12 / _root(int(bound or 1))
    if values == "apart":
        rows = torch.rand(shape, generator=random).argsort(-1).double()
        return rows / 4 - shape[-1] / 8
    normal = (torch.randn(shape, generator=random, dtype=torch.float64) * 32).round().clamp(-120, 120) / 32
    if values == "gain":
        return 1 + normal / 8
    if values == "matrix":
        return normal / _root(shape[-1])
    if values == "rows":
        largest = (normal * 32).abs().amax(-1, keepdim=True)
        return normal.scatter(-1, normal.abs().argmax(-1, keepdim=True), (largest + 1 - largest % 2) / 32)
    return normal


def _root(lanes: int) -> float:
    """About the square root, a power of two."""
    return 2.0 ** math.ceil(math.log2(max(lanes, 1)) / 2)


def _padded(side: str, shape: tuple[int, ...]) -> Tensor:
    """1 for a token: of row b, b % S tokens are missing on one side."""
    count = shape[-1]
    missing = torch.arange(math.prod(shape[:-1])).reshape(*shape[:-1], 1) % max(count, 1)
    places = torch.arange(count)
    return (places >= missing).long() if side == "left" else (places < count - missing).long()


def _laid(x: Tensor, layout: str) -> Tensor:
    """The same numbers, lying in memory otherwise; expanded ones repeat the first of their first dim."""
    if layout == "transposed" and x.dim() > 1:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "reversed" and x.dim() > 1:
        order = tuple(range(x.dim()))[::-1]
        return x.permute(order).contiguous().permute(order)
    if layout == "expanded" and x.dim() > 1:
        return x[:1].expand(x.shape)
    if layout == "offset" and x.dim():
        return torch.cat((x[:1], x), 0)[x[:1].shape[0] :]
    if layout == "strided" and x.dim():
        return torch.stack((x, x), -1)[..., 0]
    return x


def _view(x: Tensor, given: Input) -> Tensor:
    """The same memory: as another tensor, or with its last two dims turned."""
    return x.detach().mT if given.layout == "transposed" and x.dim() > 1 else x.detach()
