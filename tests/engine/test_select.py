"""Selection: the disjoint set that saves most, the same one whatever the order, limited by fuel."""

from __future__ import annotations

from itertools import combinations, permutations
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.stages import select as stage

NODES = [object() for _ in range(8)]
GRAPH: Any = SimpleNamespace(order={node: place for place, node in enumerate(NODES)}, depends=lambda node, on: False)


PLAN: Any = SimpleNamespace(tensors=lambda match: {})


def select(candidates: list[Any], fuel: int | None = None, graph: Any = GRAPH) -> list[Any]:
    return stage.select(candidates, graph, fuel)


def _match(roots: tuple[tuple[Any, ...], ...]) -> Any:
    firsts = [makers[0] for makers in roots if makers]
    return SimpleNamespace(roots=roots, firsts=firsts, makers=[node for makers in roots for node in makers])


def candidate(benefit: float, roots: set[int], dying: set[int] | None = None) -> Any:
    own = tuple(NODES[each] for each in sorted(roots))
    below = frozenset(NODES[each] for each in roots | (dying or set()))
    return SimpleNamespace(
        benefit=benefit,
        dying=below,
        needs=None,
        match=_match((own,)),
        launches=1,
        surplus=0,
        further=0,
        made={},
        plan=PLAN,
    )


def overlap(left: Any, right: Any) -> bool:
    roots = [set(each.match.makers) for each in (left, right)]
    return bool(roots[0] & right.dying or roots[1] & left.dying)


@st.composite
def candidates(draw):
    sets = st.sets(st.integers(0, len(NODES) - 1), min_size=1, max_size=3)
    return [
        candidate(benefit, roots, dying)
        for benefit, roots, dying in draw(st.lists(st.tuples(st.integers(-2, 9), sets, sets), max_size=7))
    ]


@given(candidates())
@settings(max_examples=200, deadline=None)
def test_the_cover_is_disjoint_and_none_saves_more(given_):
    chosen = select(given_)
    assert not any(overlap(*pair) for pair in combinations(chosen, 2))
    assert all(each.benefit > 0 for each in chosen)
    best = max(
        sum(each.benefit for each in cover)
        for count in range(len(given_) + 1)
        for cover in combinations(given_, count)
        if not any(overlap(*pair) for pair in combinations(cover, 2))
    )
    assert sum(each.benefit for each in chosen) == best


def test_a_large_fusion_beats_small_ones_only_if_it_saves_more():
    small = [candidate(4, {0}), candidate(4, {1})]
    assert select([*small, candidate(9, {0, 1})])[0].benefit == 9
    assert select([*small, candidate(7, {0, 1})]) == small


def test_more_calls_than_the_model_makes_are_chosen_only_where_they_are_worth_it_without_the_surplus():
    several, sure = candidate(4, {0}), candidate(3, {1})
    several.launches, several.surplus = -2, 5
    assert select([several]) == []
    sure.launches = 1
    assert select([several, sure]) == [sure]
    sure.launches = 2
    assert select([several, sure]) == [several, sure]
    several.surplus, sure.launches = 3, 0
    assert select([several, sure]) == [several, sure]
    several.further = 2
    assert select([several, sure]) == [sure]
    several.made = sure.made = {"tables": 2}
    assert select([several, sure]) == [several, sure]


def test_calls_that_would_wait_for_each_other_are_not_made_together():
    """Results (0, 3) and (1, 2): 2 needs 0, and 3 needs 1."""

    def pair(benefit: float, *results: int) -> Any:
        whole = candidate(benefit, set(results))
        whole.match = _match(tuple((NODES[each],) for each in results))
        return whole

    needed = {(2, 0), (3, 1)}
    graph = SimpleNamespace(order=GRAPH.order, depends=lambda node, on: (NODES.index(node), NODES.index(on)) in needed)
    first, second, alone = pair(5, 0, 3), pair(4, 1, 2), candidate(1, {2})
    assert select([first, second, alone], graph=graph) == [first, alone]
    assert select([first, second, alone]) == [first, second]


def test_what_saves_nothing_or_only_rounding_is_left_alone():
    assert select([candidate(0, {0}), candidate(-1, {1}), candidate(1e-15, {2})]) == []


def test_fuel_takes_the_first_ones():
    many = [candidate(1, {each}) for each in range(5)]
    assert [select(many, fuel) for fuel in range(3)] == [many[:fuel] for fuel in range(3)]
    assert select(many, None) == many


@pytest.mark.parametrize("order", permutations(range(3)))
def test_the_same_whatever_comes_first(order):
    pool = [candidate(5, {0}, {1}), candidate(5, {1}, {2}), candidate(5, {2})]
    chosen = select([pool[each] for each in order])
    assert sum(each.benefit for each in chosen) == 10


@pytest.mark.parametrize("exact", [0, stage.EXACT])
def test_groups_too_large_for_every_cover_still_get_a_disjoint_one(exact, monkeypatch):
    monkeypatch.setattr(stage, "EXACT", exact)
    chain = [candidate(1 + each % 3, {each % 8, (each + 1) % 8}) for each in range(24)]
    chosen = select(chain)
    assert chosen
    assert not any(overlap(*pair) for pair in combinations(chosen, 2))


def test_what_needs_another_is_chosen_with_it_or_not_at_all():
    """A small fusion beside one that only pays with it, against what pays alone."""
    first, rival = candidate(3, {0}), candidate(5, {1})
    beside = candidate(4, {1})
    beside.needs = first
    assert select([first, beside, rival]) == [first, rival]
    beside.benefit = 6
    assert select([first, beside, rival]) == [first, beside]
    assert select([first, beside], fuel=1) == [first]
    other = candidate(9, {0})
    assert select([first, beside, rival, other]) == [rival, other]
