"""Selection: the disjoint set that saves most, the same one whatever the order, limited by fuel."""

from __future__ import annotations

from itertools import combinations, permutations
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.records import Made
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
        times=1,
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
    several.made = sure.made = {"tables": Made(2)}
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


@pytest.mark.parametrize("most", [1, stage.MOST])
def test_groups_too_large_for_every_cover_still_get_a_disjoint_one(most, monkeypatch):
    monkeypatch.setattr(stage, "MOST", most)
    chain = [candidate(1 + each % 3, {each % 8, (each + 1) % 8}) for each in range(24)]
    chosen = select(chain)
    assert chosen
    assert not any(overlap(*pair) for pair in combinations(chosen, 2))


def in_a_chain(layers: int) -> tuple[list[Any], Any]:
    """Candidates each of which overlaps those of the next layer, and their graph."""
    nodes = [object() for _ in range(4 * layers + 4)]
    graph = SimpleNamespace(order={node: place for place, node in enumerate(nodes)}, depends=lambda *_: False)
    found = [candidate(3 + layer % 3, {0}) for layer in range(layers) for _ in range(2)]
    for number, each in enumerate(found):
        own = tuple(nodes[4 * (number // 2) :][:5])
        each.match, each.dying = _match((own,)), frozenset(own)
    return found, graph


def test_a_chain_of_any_length_is_covered_at_the_same_cost_for_each_layer(monkeypatch):
    counted, way = [0], stage._Way

    def counting(*given: Any) -> Any:
        counted[0] += 1
        return way(*given)

    monkeypatch.setattr(stage, "_Way", counting)
    costs = []
    for layers in (50, 100, 1000):
        counted[0] = 0
        found, graph = in_a_chain(layers)
        chosen = select(found, graph=graph)
        costs.append(counted[0] / layers)
        best = [0, 0]  # so many saved at most by the layers so far, the last of them not covered, and covered or not
        for layer in range(layers):
            best = [best[1], max(best[1], best[0] + 3 + layer % 3)]
        assert sum(each.benefit for each in chosen) == best[1]
    assert max(costs) < 1.1 * min(costs)


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
