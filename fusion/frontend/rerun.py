"""The pass, to be run again over edited copies of a captured graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx

from fusion.facts import Facts
from fusion.frontend.library import library_for
from fusion.language import Library, Reader, Rule
from fusion.options import Options
from fusion.pipeline import fuse_graph
from fusion.report.outcome import Outcome, Rerun


def rerun(
    captured: fx.GraphModule,
    facts: Callable[[Mapping[str, str]], Facts],
    options: Options,
    rules: Library | Iterable[Rule | Reader] | None,
    in_place: bool = True,
) -> Rerun:
    """Return the pass over edited copies of `captured`; `facts` are those of its inputs under an option assume."""

    def fuse(gm: fx.GraphModule, **changed: Any) -> Outcome:
        chosen = replace(options, **changed)
        return fuse_graph(gm.graph, library_for(chosen, rules), chosen, facts(chosen.assume), in_place=in_place)

    named = facts(options.assume).arguments
    inputs = captured.graph.find_nodes(op="placeholder")
    masks = (named[each.name] for each in inputs if each.name in named and _may_mask(each.meta.get("val")))
    return Rerun(captured, fuse, tuple(masks))


def _may_mask(val: Any) -> bool:
    """Return True if an input `val` may be a mask: of keys [B, T], or of queries and keys [.., S, T]."""
    return isinstance(val, torch.Tensor) and val.dim() in (2, 3, 4)
