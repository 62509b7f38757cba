"""Equal expressions have equal terms: what cancels leaves none."""

from __future__ import annotations

from types import MappingProxyType

from fusion.analysis.affine import Affine, conjunction, disjunction, negation, number

ROW, COLUMN = (Affine(MappingProxyType({place: 1})) for place in range(2))


def test_what_cancels_is_gone():
    assert ROW + COLUMN + ROW.times(-1) == COLUMN
    assert ROW.times(0).plus(3) == number(3)
    assert not (ROW + ROW.times(-1)).axes()


def test_what_excludes_itself_holds_nowhere_and_one_of_both_everywhere():
    causal, other = (("le", Affine(MappingProxyType({place: 1}))) for place in (0, 1))
    assert conjunction(causal, other, negation(causal)) is False
    assert disjunction(causal, other, negation(causal)) is True
    assert conjunction(causal, negation(other)) == ("and", (causal, negation(other)))
