"""Sizes of pages, and how a function of them is fused by one rule and compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fusion import Example
from fusion.frontend.library import installed
from fusion.options import Options
from fusion.testing import Trial, means_what_it_says, trial
from tests.examples.inputs import Inputs

RULES = {rule.name: rule for rule in installed().rules}
HOST = Options(target="host", lower="eager")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Sizes:
    """Of pages: sequences, heads of keys, queries of each, pages of a sequence, rows and lanes, lanes of a line."""

    batch: int = 2
    heads: int = 3
    groups: int = 2
    queries: int = 1
    blocks: int = 7
    pages: int = 3
    size: int = 8
    width: int = 80
    line: int = 16

    @property
    def lines(self) -> int:
        return self.width // self.line

    @property
    def keys(self) -> int:
        return self.pages * self.size


def tried(
    rule: str,
    function: Callable[..., object],
    inputs: Inputs,
    options: Options = HOST,
    dtype: torch.dtype = torch.float32,
) -> Trial:
    """The function fused by one rule, and shown to mean the same."""
    t = trial(RULES[rule], Example(rule, function, inputs), dtype, options=options)
    means_what_it_says(t)
    return t


def applied(t: Trial) -> bool:
    return t.rule.name in [each.match.rule.name for each in t.outcome.chosen]


def calls(t: Trial, name: str) -> list[torch.fx.Node]:
    return [node for node in t.fused.graph.nodes if str(node.target).startswith(name)]


UNEQUAL = Sizes()
