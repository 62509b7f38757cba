"""Trials: a captured function before and after the pass, by one rule and its dependencies or by a complete library."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from fusion._torch.memory import copied
from fusion._torch.nested import tree_map_only
from fusion.frontend.library import installed
from fusion.language import Example, Library, Rule
from fusion.operators import PACKAGES
from fusion.options import Options
from fusion.pipeline import Outcome, fuse_graph
from fusion.runtime.float64 import widen, widened
from fusion.testing.capturing import Captured, Level, captured


@dataclass(frozen=True)
class Trial:
    """A captured function before and after the pass.

    Attributes:
        library: the rules that were used: the rule under test first, then its dependencies.
        captured: the original graph and its inputs.
        fused: a copy of the graph after the pass.
        outcome: the outcome of the pass.
    """

    library: Library
    captured: Captured
    fused: fx.GraphModule
    outcome: Outcome

    @property
    def rule(self) -> Rule:
        """The rule under test."""
        return self.library.rules[0]

    def inputs(self, wide: bool = False) -> list[Any]:
        """Return inputs for the fused graph: copies of the captured ones, in float64 if `wide`, and prepared ones."""
        given = list(self.captured.inputs)
        copies = widened(given) if wide else tree_map_only(Tensor, copied, given)
        names = [node.name for node in self.captured.graph.graph.find_nodes(op="placeholder")]
        named = dict(zip(names, copies, strict=True))
        for each in self.outcome.prepared:
            module = widen(each.module) if wide else each.module
            copies.append(module(*(named[name] for name in each.sources)))
        return copies


def trial(
    rule: Rule,
    example: Example,
    dtype: torch.dtype,
    level: Level = "composite",
    options: Options = Options(target="host", lower="eager"),
    library: Library | None = None,
) -> Trial:
    """Capture `example` and fuse it by `rule` and its dependencies in `library` (by default the installed one).

    Dependencies are the rules whose readings its patterns use, and the rules that are offered jointly with it. An
    opt-in rule is enabled, and all packages are named.
    """
    known = installed() if library is None else library
    needed = replace(known, rules=_closure(rule, known.rules))
    return trial_of(captured(example, dtype, level), switched_on(rule, options), needed)


def switched_on(rule: Rule, options: Options) -> Options:
    """Return `options` with all packages named, and an opt-in rule enabled."""
    opt_in = options.opt_in | ({rule.name} if rule.opt_in else frozenset[str]())
    return replace(options, opt_in=opt_in, packages=frozenset(PACKAGES))


def trial_of(
    source: Captured, options: Options = Options(target="host", lower="eager"), library: Library | None = None
) -> Trial:
    """Fuse a captured function by all of `library` (by default the installed one)."""
    known = installed() if library is None else library
    fused = fx.GraphModule(source.graph, copy.deepcopy(source.graph.graph))
    outcome = fuse_graph(fused.graph, known, options, source.facts)
    fused.recompile()
    return Trial(known, source, fused, outcome)


def _closure(rule: Rule, library: Iterable[Rule]) -> tuple[Rule, ...]:
    by_name = {each.name: each for each in library}
    closure = {rule.name: rule}
    waiting = [rule]
    while waiting:
        each = waiting.pop()
        for name in sorted(each.uses() | each.readers_of_results()):
            if name in by_name and name not in closure:
                closure[name] = by_name[name]
                waiting.append(by_name[name])
    return tuple(closure.values())
