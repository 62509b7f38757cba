"""Linters over fused graphs: places that a change of the model makes cheaper. One more is a function in `LINTERS`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import torch.fx as fx

from fusion.graph.subgraphs import bodies
from fusion.records import Refusal
from fusion.report.lint.casts import casts_around, float32_islands
from fusion.report.lint.copies import functional_writes, layout_copies
from fusion.report.lint.finding import Finding, Linter, folded
from fusion.report.lint.near_misses import close_sizes, unfused_norms
from fusion.report.lint.repeats import rebuilt_masks
from fusion.report.report import Report

__all__ = ["LINTERS", "Finding", "Linter", "findings", "lint"]

_LINTERS: tuple[Linter, ...] = (
    casts_around,
    float32_islands,
    layout_copies,
    unfused_norms,
    rebuilt_masks,
    functional_writes,
    close_sizes,
)
LINTERS: Mapping[str, Linter] = MappingProxyType({each.__name__: each for each in _LINTERS})
"""The linters by name."""


def lint(report: Report) -> list[Finding]:
    """Run every linter over the fused graphs of `report`; equal findings of several layers are one.

    The findings that save most launches come first.
    """
    every = [each for part in report.parts for each in findings(part.graph.graph, part.refusals)]
    return sorted(folded(every), key=lambda each: -each.saves * each.times)


def findings(source: fx.Graph, refusals: Sequence[Refusal]) -> Iterator[Finding]:
    """Yield the findings of every linter in the fused graph `source` and in the bodies that its calls run."""
    for linter in LINTERS.values():
        yield from linter(source, refusals)
    for body in bodies(source):
        if body.code is not None:
            yield from findings(body.code.graph, ())
