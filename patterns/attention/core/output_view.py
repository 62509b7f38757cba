"""Steps from the output [B, N, S, E] to the value of the model: a reshape, a permute, a reshape and further views."""

from __future__ import annotations

from math import prod
from typing import Any

from fusion.analysis.row_layout import Step, named
from patterns.attention.core.divided_late import Finish
from patterns.attention.core.weights import Weights


def named_view(rows: tuple[Any, Any, Any], weights: Weights, width: Any, finish: Finish) -> Finish | None:
    """Return the steps from [B, N, S, E] to the value of the model, with symbolic sizes as "B", "S" or -1.

    Args:
        rows: B, N and S.
        weights: the softmax, with the layout of its rows.
        width: E.
        finish: the steps after the product with values.

    Returns:
        The steps; None if a reshape has several symbolic sizes besides B and S.
    """
    names = {rows[2]: "S", rows[0]: "B"}
    steps = named(view_steps(weights, width, finish), names)
    return steps[1:] if steps and steps[:1] == named([("reshape", (*rows, width))], names) else steps


def view_steps(weights: Weights, width: Any, finish: Finish) -> list[Step]:
    """Return the steps from the flat rows of [B, N, S, E] to the value of the model; the first is a reshape.

    `weights` have the layout of their rows, `width` is E, and `finish` are the steps after the product with values.
    """
    sizes, before, after = weights.rows.sizes, weights.rows.before, weights.rows.after
    order = [atom for run in before for atom in run]
    wanted = [atom for run in after for atom in run]
    wanted += [atom for atom in order if atom not in wanted]  # atoms of size 1, which a reshape dropped
    steps: tuple[Step, ...] = (
        ("reshape", (*(sizes[atom] for atom in order), width)),
        ("permute", (*(order.index(atom) for atom in wanted), len(order))),
        ("reshape", (*(prod(sizes[atom] for atom in run) for run in after), width)),
    )
    return [(op, how) for op, how in (*steps, *finish) if op != "permute" or how != tuple(range(len(how)))]
