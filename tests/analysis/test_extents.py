"""What is claimed of formulas holds at every position of the mask, and what the sizes decide is decided."""

from __future__ import annotations

import itertools
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.analysis.affine import Affine, Formula, conjunction, disjunction, negation, number
from fusion.analysis.formula_decisions import Extent
from fusion.graph import Algebra

SHAPE = 3, 4
EXTENT = Extent(SHAPE)
ROW, COLUMN = EXTENT.origin
POSITIONS = list(itertools.product(*map(range, SHAPE)))


def at_most(expression: Affine, bound: int) -> Formula:
    return ("le", expression.plus(-bound))


def holds(formula: Formula, at: tuple[int, ...]) -> bool:
    if isinstance(formula, bool):
        return formula
    op, content = formula
    if op in ("and", "or"):
        return (all if op == "and" else any)(holds(each, at) for each in content)
    assert op == "le"
    return content.constant + sum(factor * at[place] for place, factor in content.terms.items()) <= 0


numbers = st.integers(-4, 4)
comparisons = st.builds(
    lambda first, second, bound: at_most(ROW.times(first) + COLUMN.times(second), bound), numbers, numbers, numbers
)
formulas = st.recursive(
    st.booleans() | comparisons,
    lambda inner: st.builds(lambda join, parts: join(*parts), st.sampled_from((conjunction, disjunction)),
                            st.lists(inner, min_size=1, max_size=3)),
    max_leaves=4,
)  # fmt: skip


@given(formulas, formulas)
@settings(max_examples=300, deadline=None)
def test_what_is_implied_holds_wherever_the_other_does(formula: Formula, other: Formula):
    if EXTENT.implies(formula, other):
        assert all(holds(other, at) for at in POSITIONS if holds(formula, at))


def test_parts_imply_and_are_implied():
    small, large, other = at_most(ROW + COLUMN, 1), at_most(ROW + COLUMN, 3), at_most(COLUMN.times(-1), -2)
    assert EXTENT.implies(small, large)
    assert not EXTENT.implies(large, small)
    assert EXTENT.implies(conjunction(small, other), large)
    assert not EXTENT.implies(conjunction(large, other), small)
    assert EXTENT.implies(small, disjunction(other, large))
    assert not EXTENT.implies(large, disjunction(other, small))
    assert EXTENT.implies(disjunction(small, large), at_most(ROW + COLUMN, 4))
    assert not EXTENT.implies(disjunction(small, other), large)
    assert EXTENT.implies(small, conjunction(large, at_most(ROW + COLUMN, 2)))
    assert not EXTENT.implies(small, conjunction(large, other))


@given(comparisons)
@settings(max_examples=200, deadline=None)
def test_sizes_decide_what_holds_everywhere_or_nowhere(formula: Formula):
    decided = EXTENT.below_one(formula[1])
    truths = {holds(formula, at) for at in POSITIONS}
    assert (decided is True) == (truths == {True})
    assert (decided is False) == (truths == {False})


@given(st.lists(comparisons, min_size=1, max_size=4))
@settings(max_examples=100, deadline=None)
def test_the_tightest_parts_mean_the_same_and_none_implies_another(parts: list[Formula]):
    kept = EXTENT.tightest(parts)
    assert all(holds(("and", kept), at) == holds(("and", parts), at) for at in POSITIONS)
    assert not any(EXTENT.implies(one, other) for one, other in itertools.permutations(kept, 2))


@given(comparisons, formulas, formulas)
@settings(max_examples=300, deadline=None)
@pytest.mark.rotates(4)
def test_a_choice_is_what_it_chooses(condition: Formula, yes: Formula, no: Formula):
    chosen = EXTENT.choice(condition, yes, no)
    for at in POSITIONS:
        assert holds(chosen, at) == holds(yes if holds(condition, at) else no, at)


def test_a_choice_is_as_short_as_what_implies_it():
    near, far = at_most(COLUMN, 1), at_most(COLUMN, 2)
    assert EXTENT.choice(near, True, far) == far
    assert EXTENT.choice(near, far, False) == conjunction(near, far)
    assert EXTENT.choice(negation(near), far, True) == far
    assert EXTENT.choice(far, near, False) == near


def test_a_dim_of_one_place_has_no_positions_to_tell_apart():
    a = Algebra()
    mask = a.make("input", (), ("mask", 0), (1, 4), None)
    assert EXTENT.of(mask) == (number(0), COLUMN)
    assert Extent((1, 4)).axis(0) == number(0)
    assert Affine(MappingProxyType({1: 1})) == COLUMN
