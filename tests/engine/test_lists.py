"""What a list of places chooses has one form, and so has what stands at these places in one's own row."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from sympy import Symbol

from fusion.graph import Algebra, Value
from fusion.stages.canonicalise.comparisons import last_index

from .graphs import numbers, read_graph, traced

T, G, K = 6, 5, 2
S = Symbol("s", integer=True, positive=True)
X = numbers(T, G)
line = torch.arange


def value(form) -> Value:
    """What a function of X and of the places of its largest returns, as a value."""
    graph = read_graph(traced(lambda x: form(x, x.topk(K)[1]), X).graph)
    (result,) = [each for each in graph.source.output_node().args[0] if each is not None]
    return graph.value_of[result]  # type: ignore[return-value]


CHOSEN = {
    "any, entries last": lambda x, at: (at[:, None, :] == line(G)[:, None]).any(-1),
    "any, positions last": lambda x, at: (line(G) == at[..., None]).any(1),
    "any, kept": lambda x, at: (at[..., None] == line(G)).any(1, keepdim=True)[:, 0],
    "any in int32": lambda x, at: (at.int()[..., None] == line(G, dtype=torch.int32)).any(1),
    "expanded": lambda x, at: (at[:, None].expand(T, G, K) == line(G)[None, :, None].expand(T, G, K)).any(-1),
    "a sum": lambda x, at: (at[..., None] == line(G)).sum(1).bool(),
    "a sum of floats": lambda x, at: (at[..., None] == line(G)).float().sum(-2) > 0.5,
    "one_hot": lambda x, at: F.one_hot(at, G).sum(1) != 0,
    "the greatest of one_hot": lambda x, at: F.one_hot(at, G).amax(1) == 1,
    "the greatest and where": lambda x, at: F.one_hot(at, G).max(1).values.bool(),
    "any of one_hot": lambda x, at: F.one_hot(at, G).any(1),
    "put": lambda x, at: torch.zeros(T, G, dtype=torch.bool).index_put((line(T)[:, None], at), torch.tensor(True)),
    "fewer places than may be listed": lambda x, at: (at[..., None] == line(G - 1)).any(1),
    "entries that are not places": lambda x, at: ((at - 1)[..., None] == line(G)).any(1),
    "as many entries that are not places": lambda x, at: ((x.topk(G)[1] - 1)[..., None] == line(G)).any(1),
}
OTHERS = {
    "all": lambda x, at: (at[:, None, :] == line(G)[:, None]).all(-1),
    "from the second place on": lambda x, at: (at[..., None] == line(1, G + 1)).any(1),
    "every second place": lambda x, at: (at[..., None] == line(0, 2 * G, 2)).any(1),
    "against numbers": lambda x, at: (at[..., None] == at.flatten()[:G].clamp(0, 1)).any(1),
    "less": lambda x, at: (at[..., None] < line(G)).any(1),
    "over the places": lambda x, at: (at[..., None] == line(G)).any(2),
    "a sum over tokens": lambda x, at: (at[..., None] == line(G)).sum(0) == 1,
    "against each other": lambda x, at: (at[..., None] == at[:, None]).any(1),
    "a place for each token": lambda x, at: (at[..., None] == line(T)[:, None, None]).any(1),
    "a sum of lists that share places": lambda x, at: (torch.cat([at, at], -1)[..., None] == line(G)).sum(1) == 1,
    "a sum over two dims": lambda x, at: (at[..., None] == line(G)).sum((1, 0)) == 1,
    "a mean": lambda x, at: (at[..., None] == line(G)).float().mean(1),
    "several numbers that are put": lambda x, at: torch.zeros(T, G).index_put((line(T)[:, None], at), x.topk(K)[0]),
    "put in other rows": lambda x, at: torch.zeros(T, G).index_put(
        (line(T - 1, -1, -1)[:, None], at), torch.tensor(1.0)
    ),
}
TAKEN = {
    "a column of rows": lambda x, at: x.cos()[line(T)[:, None], at],
    "rows repeated": lambda x, at: x.cos()[line(T)[:, None].expand(T, K), at],
    "a list in int32": lambda x, at: x.cos()[line(T).view(T, 1), at.int()],
    "two dims of rows": lambda x, at: x.cos().view(2, 3, G)[line(2)[:, None, None], line(3)[:, None], at.view(2, 3, K)],
}
NOT_TAKEN = {
    "rows turned round": lambda x, at: x.cos()[line(T - 1, -1, -1)[:, None], at],
    "places that may count from the end": lambda x, at: x.cos()[line(T)[:, None], at - 1],
    "rows along the entries": lambda x, at: x.cos()[:K, :][line(K), at[:K]],
    "rows of another dim": lambda x, at: x.cos().view(2, 3, G)[
        line(2)[:, None, None], line(2)[:, None], at.view(2, 3, K)[:, :2]
    ],
    "one place of each row": lambda x, at: x.cos()[line(T), at[:, 0]],
    "rows alone": lambda x, at: x.cos().view(T, G, 1)[line(T)[:, None], at],
    "rows of two dims": lambda x, at: x.cos().view(2, 3, G)[line(2)[:, None, None], at.view(2, 3, K) % 3],
    "entries of a vector": lambda x, at: x.cos()[0][at[0]],
    "places that rows share": lambda x, at: x.cos()[line(T)[:, None], at[:1].expand(T, K)],
}


def chosen(x: Value) -> bool:
    return x.op == "chosen" or any(map(chosen, x.args))


def taken(x: Value) -> bool:
    return x.below("reshape").op == "take"


@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.rotates(4)
def test_what_a_list_chooses(name: str):
    assert chosen(value(CHOSEN[name]))


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.rotates(3)
def test_what_a_list_does_not_choose(name: str):
    assert not chosen(value(OTHERS[name]))


@pytest.mark.parametrize("name", TAKEN)
def test_what_stands_at_places_of_the_own_row(name: str):
    assert taken(value(TAKEN[name]))


@pytest.mark.parametrize("name", NOT_TAKEN)
@pytest.mark.rotates(3)
def test_what_stands_elsewhere(name: str):
    assert value(NOT_TAKEN[name]).below("reshape").op == "index"


def test_places_that_may_not_belong_together_are_none_of_the_own_row():
    a = Algebra()
    x, *indices = (a.make("input", (), (name,), shape, torch.int64) for name, shape in
                   (("x", (S, G)), ("i", (S,)), ("j", (Symbol("t", integer=True, positive=True),))))  # fmt: skip
    assert last_index(a, x, indices) is None


def test_a_cache_that_is_written_at_places_is_not_chosen():
    graph = read_graph(
        traced(lambda x, to: to.index_put((line(T)[:, None], x.topk(K)[1]), torch.tensor(1.0)), X, X + 1).graph
    )
    assert any(each.op == "write_rows" for each in graph.places)
    assert not any(map(chosen, graph.places))


SHARES = {
    "the absolute of a softmax": lambda x: x.softmax(-1).abs(),
    "the absolute of the largest": lambda x: x.softmax(-1).topk(2)[0].abs(),
    "the absolute of sigmoids at places": lambda x: x.sigmoid().gather(1, x.topk(2)[1]).abs(),
    "the absolute of exponentials": lambda x: x.exp().abs(),
    "the absolute of an absolute": lambda x: x.abs().abs(),
}


@pytest.mark.parametrize("name", SHARES)
def test_what_is_not_negative_is_its_absolute(name: str):
    graph = read_graph(traced(SHARES[name], X).graph)
    (result,) = graph.source.output_node().args[0]
    held = graph.value_of[result]
    assert isinstance(held, Value)
    assert held.op != "abs" or held.arg.op == "input"


def test_a_norm_of_order_1_is_the_sum_of_absolutes():
    def form(x):
        return x.norm(p=1, dim=-1, keepdim=True), x.abs().sum(-1, keepdim=True), x.norm(p=3, dim=-1, keepdim=True)

    graph = read_graph(traced(form, X).graph)
    norm, total, third = (graph.value_of[each] for each in graph.source.output_node().args[0])
    assert norm is total is not third
