"""What a piece is: a block or a function in the manner of a public repository, and what must become of it.

Pieces are written anew: of a repository they have the order of operations, the layouts of its caches and the way in
which its masks are made, none of its text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fusion.testing import Captured, Level, capture

Made = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclass(frozen=True)
class Piece:
    """One mode of one piece.

    Attributes:
        repository: the repository in whose manner it is written, "owner/name".
        what: what it is, and in which mode: "block, decode".
        make: gives the code in a dtype and its arguments, drawn from torch's own generator.
        attentions: how many softmax attentions it computes, those of a loop that is one call counted as one.
        assume: what is said of arguments, as the option `assume` says it: the place of each, and its kind.
        why: text of the reason that is given where one of them stays as it is written.
    """

    repository: str
    what: str
    make: Callable[[torch.dtype], Made]
    attentions: int = 1
    assume: tuple[tuple[int, str], ...] = ()
    why: str = ""

    @property
    def name(self) -> str:
        """How it is called among all pieces."""
        return f"{self.repository} {self.what}"

    @property
    def file(self) -> str:
        """The file in which it is kept what becomes of it."""
        return f"repository_{self.make.__module__.rpartition('.')[2]}"

    def made(self, dtype: torch.dtype) -> Made:
        """Its code and arguments, the same at every call."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            code, inputs = self.make(dtype)
        if isinstance(code, nn.Module):
            code.eval().requires_grad_(False)
        return code, inputs

    def captured(self, dtype: torch.dtype, level: Level = "composite") -> Captured:
        """Its graph, with what is assumed of it."""
        code, inputs = self.made(dtype)
        found = capture(code, inputs, level)
        names = [node.name for node in found.graph.graph.find_nodes(op="placeholder")]
        placed = dict(zip(names, found.inputs, strict=True))
        kinds = [(inputs[place], kind) for place, kind in self.assume]
        return replace(found, assumed={n: kind for n, x in placed.items() for mask, kind in kinds if x is mask})


def normal(dtype: torch.dtype, *shape: int) -> Tensor:
    """About normal numbers."""
    return torch.randn(*shape).to(dtype)


def angles(positions: int, lanes: int) -> Tensor:
    """Angles of rotation, float32 [positions, lanes / 2]."""
    return torch.outer(torch.arange(positions).float(), 10000.0 ** (-torch.arange(0, lanes, 2).float() / lanes))


def rotations(positions: int, lanes: int) -> Tensor:
    """Complex numbers of length 1, complex64 [positions, lanes / 2]."""
    turned = angles(positions, lanes)
    return torch.polar(torch.ones_like(turned), turned)


def of_experts(shares: Tensor, chosen: Tensor, experts: int) -> Tensor:
    """The share of every expert, [tokens, experts]: what was chosen in no order."""
    return torch.zeros(shares.shape[0], experts, dtype=shares.dtype).scatter(1, chosen.long(), shares)


def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    """A projection whose results have about the size of what it is given."""
    made = nn.Linear(inputs, outputs, bias=bias)
    nn.init.normal_(made.weight, std=inputs**-0.5)
    return made
