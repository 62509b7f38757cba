"""Findings of linters: places of a fused graph that a change of the model makes cheaper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch.fx as fx

from fusion.graph.origin import described, location, module_path
from fusion.records import Refusal
from fusion.report.folding import template
from fusion.report.trace import displayed_place


@dataclass(frozen=True)
class Finding:
    """A place of a fused graph that a change of the model makes cheaper.

    Attributes:
        linter: name of the linter.
        module: path of the module; with `*` in place of numbers for several modules.
        where: `file:line` in the model's code.
        what: the operator or tensor, and its fault.
        cure: the change of the model, in one sentence.
        saves: launches that the change saves at each place; 0 where it makes calls cheaper, or lets others fuse.
        times: number of places.
    """

    linter: str
    module: str
    where: str
    what: str
    cure: str
    saves: int = 0
    times: int = 1

    @property
    def place(self) -> str:
        """Module and line, as "in layers.*.attn at model.py:12", the file relative to its package."""
        return described(self.module, displayed_place(self.where))

    def __str__(self) -> str:
        times = f" (× {self.times})" if self.times > 1 else ""
        return f"{self.linter}: {self.what}; {self.cure} [{self.place}]{times}"


Linter = Callable[[fx.Graph, Sequence[Refusal]], Iterable[Finding]]
"""Function of a fused graph, with real operator names, and of the refusals in it."""


def at(node: fx.Node, linter: str, what: str, cure: str, saves: int = 0) -> Finding:
    """Build a `Finding` at the place of `node`."""
    return Finding(linter, module_path(node), location(node), what, cure, saves)


def folded(findings: Iterable[Finding]) -> list[Finding]:
    """Fold findings that differ by the numbers in their module paths alone, and count them in `times`."""
    alike: Counter[Finding] = Counter()
    paths: dict[Finding, set[str]] = {}
    for each in findings:
        kind = replace(each, module=template(each.module))
        alike[kind] += each.times
        paths.setdefault(kind, set()).add(each.module)
    return [replace(kind, module=_path(kind, paths[kind]), times=count) for kind, count in alike.items()]


def _path(kind: Finding, paths: set[str]) -> str:
    """Return the path of the one module in `paths`, or that of `kind` for several."""
    return next(iter(paths)) if len(paths) == 1 else kind.module
