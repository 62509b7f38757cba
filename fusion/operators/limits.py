"""Limits on the calls of an operator, per chip or for every machine: predicates over dims, dtypes and arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fusion.operators import limit_texts

CHIPS = ("ascend910b", "ascend910_93", "ascend950")
"""Chips with limits: Atlas A2, Atlas A3, Ascend 950."""
A2_A3 = CHIPS[:2]
HOST = "host"
"""CPU or GPU, where the decomposition runs; also the key of the limits that every machine has, chips included."""
LOWERINGS = ("eager", "torchair", "npugraph_ex")


@dataclass(frozen=True)
class Limit:
    """Predicate `text`, required of calls for which `when` holds ("": of all), if the graph is lowered by `lowering`
    (None: by any); `because` is the reason that users read."""

    text: str
    when: str = ""
    lowering: str | None = None
    because: str = ""

    def verdict(self, values: Mapping[str, Any]) -> bool | None:
        """Return True if a call with `values` satisfies the limit, False if not, None if that cannot be decided.

        A limit that is not proven for symbolic sizes, but holds for their hints, becomes a guard of the graph.
        """
        satisfied = self.evaluate(values, limit_texts.proven)
        if satisfied is None and self.evaluate(values, limit_texts.hinted):
            return self.evaluate(values, limit_texts.guarded)
        return satisfied

    def evaluate(self, values: Mapping[str, Any], decide: limit_texts.Decide) -> bool | None:
        """Evaluate the limit for `values`, comparing symbolic sizes by `decide`: True, False, or None if undecided."""
        applies = limit_texts.holds(self.when, values, decide) if self.when else True
        if applies is False:
            return True
        satisfied = limit_texts.holds(self.text, values, decide)
        return satisfied if applies or satisfied else None


def only(names: Iterable[str], when: str, because: str = "") -> tuple[Limit, ...]:
    """Return limits that require each of the arguments `names` in calls with the condition `when`, and forbid it in
    others.

    `because` is the reason for which it is forbidden.
    """
    required = (Limit(f"given({name})", when=when) for name in names)
    return *required, *(Limit(f"not given({name})", when=f"not ({when})", because=because) for name in names)
