"""Limits of operators as guards: one entry of one chip, or the dtypes of one argument, is dropped at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from fusion.operators import OPERATORS, Limit, Operator, legality
from tests.mutation import probe


@dataclass(frozen=True)
class _Probed(Limit):
    name: str = ""

    def verdict(self, values: Mapping[str, Any]) -> bool | None:
        kept = super().verdict(values)
        if kept is not True and self.name == probe.dropped:
            return True
        if kept is not True and probe.watching:
            probe.decided.add(self.name)
        return kept


def names() -> Iterator[str]:
    """A name for every entry of every operator's limits, and for the dtypes of each argument."""
    for op in OPERATORS.values():
        for chip in op.limits:
            yield from (limit.name for limit in _limits(op, chip))
        yield from (_dtypes_name(op, argument) for argument in op.dtypes)


def install() -> None:
    """From now on, limits ask the probe."""
    Operator.limits_on, legality._dtype_refusal = _limits, _dtype_refusal  # type: ignore[method-assign]


def _limits(op: Operator, chip: str, plain: Any = Operator.limits_on) -> tuple[_Probed, ...]:
    seen = Counter[str]()
    found: list[_Probed] = []
    for each in plain(op, chip):
        name = f"{op.name} on {chip}: {each.text}" + (f", when {each.when}" if each.when else "")
        seen[name] += 1
        name = name if seen[name] == 1 else f"{name} ({seen[name]})"
        found.append(_Probed(each.text, each.when, each.lowering, each.because, name))
    return tuple(found)


def _dtypes_name(op: Operator, argument: str) -> str:
    return f"{op.name}: dtypes of {argument}"


def _dtype_refusal(
    op: Operator, chip: str, values: Mapping[str, Any], plain: Any = legality._dtype_refusal
) -> str | None:
    for argument, accepted in op.dtypes.items():
        name = _dtypes_name(op, argument)
        said = (
            None
            if name == probe.dropped
            else plain(SimpleNamespace(short=op.short, dtypes={argument: accepted}), chip, values)
        )
        if said is not None:
            if probe.watching:
                probe.decided.add(name)
            return said
    return None
