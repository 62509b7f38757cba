"""The pass, to be run again over edited copies of a captured graph."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch.fx as fx

from fusion.facts import Facts
from fusion.frontend.library import library_for
from fusion.language import Library, Reader, Rule
from fusion.options import Options
from fusion.pipeline import fuse_graph
from fusion.report.outcome import Outcome, Rerun


def rerun(
    captured: fx.GraphModule,
    facts: Facts,
    options: Options,
    rules: Library | Iterable[Rule | Reader] | None,
    in_place: bool = True,
) -> Rerun:
    """Return the pass over edited copies of the graph `captured`, with the same `facts` about its inputs."""

    def fuse(gm: fx.GraphModule, **changed: Any) -> Outcome:
        chosen = replace(options, **changed)
        return fuse_graph(gm.graph, library_for(chosen, rules), chosen, facts, in_place=in_place)

    return Rerun(captured, fuse)
