"""Blocks are written with a `Writer`: it picks among spellings, names values, and remembers what may be reused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .program import Dims, Input, Program, Sizes

Pick = Callable[[Sequence[Any]], Any]


@dataclass(eq=False)
class Writer:
    """A program while it is written.

    Attributes:
        choose: picks one of a sequence.
        sizes: what the names of dims stand for.
        dtype: of floating-point inputs.
        dims: of the values that another block may read.
        kept: names that are returned.
        fusable: what each part must become.
    """

    choose: Pick
    sizes: dict[str, int]
    dtype: str
    inputs: list[Input] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    dims: dict[str, Dims] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    fusable: list[str] = field(default_factory=list)
    count: int = 0

    def pick(self, *options: Any) -> Any:
        """One of them."""
        return self.choose(options)

    def maybe(self, one_in: int = 2) -> bool:
        """True once in so many times."""
        return self.choose((True, *[False] * (one_in - 1)))

    @property
    def narrow(self) -> bool:
        """Whether floating-point inputs have 16 bits."""
        return self.dtype in ("bfloat16", "float16")

    def input(self, dims: Dims, values: str = "normal", dtype: str = "", name: str = "x") -> str:
        """A new input."""
        self.count += 1
        name = f"{name}{self.count}"
        self.inputs.append(Input(name, dims, values, dtype))
        return name

    def take(self, dims: Dims, name: str = "x") -> str:
        """A value of these dims that is there, or a new input."""
        there = [each for each, have in self.dims.items() if have == dims]
        if there and self.maybe(2):
            return self.choose(there)
        made = self.input(dims, name=name)
        self.dims[made] = dims
        return made

    def let(self, text: str, name: str = "h") -> str:
        """A line that gives this expression a name; names and constants stay as they are."""
        if text.isidentifier():
            return text
        self.count += 1
        name = f"{name}{self.count}"
        self.lines.append(f"{name} = {text}")
        return name

    def both(self, text: str, count: int, name: str = "h") -> list[str]:
        """A line that gives the items of this expression names."""
        names = []
        for _ in range(count):
            self.count += 1
            names.append(f"{name}{self.count}")
        self.lines.append(f"{', '.join(names)} = {text}")
        return names

    def do(self, text: str) -> None:
        """A statement."""
        self.lines.append(text)

    def give(self, name: str, dims: Dims) -> str:
        """A result that other blocks may read, and that is returned."""
        self.dims[name] = dims
        self.kept.append(name)
        return name

    def fuses(self, *rules: str, target: str = "") -> None:
        """This part must be fused by a rule whose name begins with one of these, on one target or on every one."""
        self.fusable.append("|".join(rules) + (f" on {target}" if target else ""))

    def program(self, again: Sizes, autocast: bool) -> Program:
        """What was written."""
        return Program(
            tuple(self.inputs), tuple(self.lines), tuple(dict.fromkeys(self.kept)), tuple(self.sizes.items()),
            again, self.dtype, autocast, () if autocast else tuple(self.fusable),
        )  # fmt: skip
