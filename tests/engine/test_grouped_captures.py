"""Groups of captures, groups of groups, and match records: the arguments of forms, guards and lowerings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fusion import Captures, Group, Library, Rule, lowering, pattern, require, scalar, tensor, testing
from fusion.language import Refused, ask_guard
from fusion.options import Options
from tests.engine.graphs import numbers


@dataclass(frozen=True)
class Line(Group):
    """A slope and an offset."""

    slope: Any = scalar()
    offset: Any = tensor("D")


@dataclass(frozen=True)
class Curve(Group):
    """Two lines, of which the second is taken of the square of the first."""

    inner: Any = Line
    outer: Any = Line


@dataclass(frozen=True)
class Curved(Rule):
    """A rule over a group of groups."""

    def reference(self, x: Tensor, offset: Tensor) -> Tensor:
        """With slopes of one."""
        return torch.square(x + offset) + offset

    @pattern
    def written(self, p, x=tensor("*B D"), curve: Any = Curve):
        """Both lines."""
        inner = p.scale(x, curve.inner.slope) + curve.inner.offset
        return p.scale(p.square(inner), curve.outer.slope) + curve.outer.offset

    def guard(self, curve: Curve):
        """One slope is enough."""
        require(curve.inner.slope != curve.outer.slope, "both slopes are {slope}", slope=curve.inner.slope)

    @lowering
    def run(self, x: Tensor, curve: Curve) -> Tensor:
        """In one call of each."""
        inner, outer = curve.inner, curve.outer
        return torch.addcmul(outer.offset, torch.square(x * inner.slope + inner.offset), torch.tensor(outer.slope))


@dataclass(frozen=True)
class CurveMatch(Captures):
    """All captures of a curve."""

    x: Tensor
    curve: Curve

    def inner(self) -> Tensor:
        """The first line of x."""
        return self.x * self.curve.inner.slope + self.curve.inner.offset


@dataclass(frozen=True)
class CurvedByMatch(Curved):
    """The same, with the captures as one record."""

    def guard(self, match: CurveMatch):
        """Refuse equal slopes."""
        require(match.curve.inner.slope != match.curve.outer.slope, "both slopes are equal")

    @lowering
    def run(self, match: CurveMatch) -> Tensor:
        """In one call of each."""
        outer = match.curve.outer
        return torch.square(match.inner()) * outer.slope + outer.offset


def test_a_match_record_holds_what_was_captured():
    x, a, b = numbers(2, 4), numbers(4, seed=1), numbers(4, seed=2)
    slopes = {"curve.inner.slope": 3.0, "curve.outer.slope": 2.0}
    captures = {"x": x, "curve": Curve, "curve.inner.offset": a, "curve.outer.offset": b, **slopes}
    way = CurvedByMatch().lowerings()[0]
    torch.testing.assert_close(way.run(CurvedByMatch(), captures), torch.square(x * 3.0 + a) * 2.0 + b)
    ask_guard(CurvedByMatch(), captures)
    with pytest.raises(Refused, match="both slopes are equal"):
        ask_guard(CurvedByMatch(), captures | {"curve.outer.slope": 3.0})


def test_a_group_may_hold_groups():
    form = Curved().patterns()[0]
    assert list(form.captures) == [
        "x",
        "curve.inner.slope",
        "curve.inner.offset",
        "curve.outer.slope",
        "curve.outer.offset",
    ]


def test_a_guard_is_given_groups_of_what_was_captured():
    def code(x, a, b):
        return torch.square(x * 3.0 + a) * 3.0 + b

    inputs = [numbers(2, 4), numbers(4, seed=1), numbers(4, seed=2)]
    graph = testing.capture(code, inputs, "core")
    t = testing.trial_of(graph, Options(target="host", lower="eager"), Library((Curved(),)))
    assert [each.reason for each in t.outcome.refusals] == ["both slopes are 3.0"]
