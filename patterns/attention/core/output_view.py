"""How [B, N, S, E] becomes the value that a model has: a reshape, a permute, a reshape, and what follows these."""

from __future__ import annotations

from math import prod
from typing import Any

from fusion.analysis.row_layout import Step, named
from patterns.attention.core.divided_late import Finish
from patterns.attention.core.weights import Weights


def named_view(rows: tuple[Any, Any, Any], weights: Weights, width: Any, finish: Finish) -> Finish | None:
    """How [B, N, S, E] becomes the result; a symbolic size is "B", "S" or -1, and the dtype a cast."""
    names = {rows[2]: "S", rows[0]: "B"}
    said = named(view_steps(weights, width, finish), names)
    return said[1:] if said and said[:1] == named([("reshape", (*rows, width))], names) else said


def view_steps(weights: Weights, width: Any, finish: Finish) -> list[Step]:
    """The same with all sizes as they are, from a reshape on."""
    sizes, before, after = weights.rows.sizes, weights.rows.before, weights.rows.after
    order = [atom for run in before for atom in run]
    wanted = [atom for run in after for atom in run]
    wanted += [atom for atom in order if atom not in wanted]  # those of size 1
    steps: tuple[Step, ...] = (
        ("reshape", (*(sizes[atom] for atom in order), width)),
        ("permute", (*(order.index(atom) for atom in wanted), len(order))),
        ("reshape", (*(prod(sizes[atom] for atom in run) for run in after), width)),
    )
    return [(op, how) for op, how in (*steps, *finish) if op != "permute" or how != tuple(range(len(how)))]
