"""What no node holds is built from what nodes hold: from which values, and what cannot be built."""

from __future__ import annotations

import pytest
import torch

from fusion.graph import Algebra, Graph, Value
from fusion.language.rule import Refused
from fusion.planning.fake_execution import Fakes
from fusion.stages.canonicalise import canonicalise

from .graphs import numbers, traced

X, Y = numbers(2, 1, 4), numbers(2, 1, 4, seed=1)


def graph_of(function) -> tuple[Graph, Value]:
    """The canonical graph of a function of X, and the value of X."""
    graph = canonicalise(traced(function, X).graph)
    return graph, next(value for value in graph.places if value.op == "input")


def test_a_value_without_dims_of_size_1_is_made_first_unless_that_is_later():
    graph, x = graph_of(lambda x: x.sin())
    tripled = graph.algebra.scale(x, 3)
    recipe = graph.recipe(tripled)
    assert (recipe.op, recipe.arg) == ("reshape", graph.algebra.reshape(tripled, (2, 4)))
    graph, x = graph_of(lambda x: (x.sin(), x.squeeze(1) @ x.squeeze(1).t()))
    tripled = graph.algebra.scale(x, 3)
    assert graph.recipe(tripled) is tripled


def test_what_only_shows_another_is_no_view_of_what_a_later_node_copies():
    graph, x = graph_of(lambda x: x.expand(2, 3, 4).reshape(6, 4).sin())
    wide = graph.algebra.expand(x, (2, 3, 4))
    assert graph.node(graph.algebra.reshape(wide, (6, 4)))
    assert graph.recipe(wide) is wide


def test_a_product_that_a_node_holds_in_another_order_is_not_made_again():
    turned = traced(lambda x: torch.einsum("nsd,ned->sne", x, x).sin(), numbers(2, 3, 4))
    graph = canonicalise(turned.graph)
    held = next(value for value in graph.places if value.op == "permute" and value.arg.op == "matmul")
    recipe = graph.recipe(held.arg)
    assert (recipe.op, recipe.args, recipe.shape) == ("permute", (held,), held.arg.shape)


def test_what_is_read_through_a_reshape_where_it_is_made_is_read_there():
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin().view(8).unsqueeze(0).squeeze(0).view(2, 1, 4).exp()

    graph, x = graph_of(function)
    made = graph.algebra.unary("sin", x)
    assert len(graph.places[made]) == 2
    assert graph.recipe(graph.algebra.reshape(made, (4, 2))).arg is graph.algebra.reshape(made, (8,))


@pytest.mark.parametrize("swapped", [False, True], ids=["where it holds", "where it does not"])
def test_a_choice_fills_in_a_number_alone_and_where_the_rest_has_its_shape(swapped):
    graph, x = graph_of(lambda x: x.sin())
    a = graph.algebra
    lowest = a.make("full", (), (-1.0,), (), torch.float32)
    wide = a.make("full", (), (-1.0,), (2, 1, 4), torch.float32)
    condition = a.make("below", (x,), (0.0,), x.shape, torch.bool)
    of_rows = a.make("below", (a.cut(x, -1, 0, 1),), (0.0,), (2, 1, 1), torch.bool)

    def chosen(condition: Value, number: Value, other: Value) -> Value:
        sides = (other, number) if swapped else (number, other)
        return a.make("where", (condition, *sides), (), x.shape, torch.float32)

    filled = chosen(condition, lowest, x)
    assert (graph.recipe(filled).op, graph.recipe(filled).attrs) == ("filled", (-1.0,))
    for choice in (chosen(condition, a.unary("sin", x), x), chosen(of_rows, wide, a.cut(x, -1, 0, 1))):
        assert graph.recipe(choice) is choice


def test_which_of_two_numbers_was_chosen_is_told_by_the_condition_that_a_node_holds():
    graph, x = graph_of(lambda x: x < 0)
    a = graph.algebra
    held = next(value for value in graph.places if value.dtype is torch.bool)
    other = a.make("below", (a.unary("sin", x),), (0.0,), x.shape, torch.bool)

    def below(condition: Value, *numbers: float, like: tuple[int, ...] = (2, 1, 4), bound: float = -1.0) -> Value:
        sides = [a.make("full", (), (number,), (), torch.float32) for number in numbers]
        choice = a.make("where", (condition, *sides), (), condition.shape, torch.float32)
        return a.make("below", (a.reshape(choice, like),), (bound,), like, torch.bool)

    chosen, contrary = (graph.recipe(below(held, *numbers)) for numbers in ((-2.0, 0.0), (0.0, -2.0)))
    assert [(each.op, each.args) for each in (chosen, contrary)] == [("reshape", (held,)), ("not", (held,))]
    assert graph.recipe(below(held, -2.0, 0.0, like=(8,))) is a.reshape(held, (8,))
    for each in (below(held, -2.0, -3.0), below(held, 0.0, 1.0), below(held, -1.0, 0.0), below(other, -2.0, 0.0)):
        assert graph.recipe(each) is each


def test_which_number_was_chosen_is_told_by_the_condition_where_both_are_rounded():
    """-1.0005 is -1 in bfloat16, and what lies below its range -inf."""
    graph, _ = graph_of(lambda x: x < 0)
    a = graph.algebra
    held = next(value for value in graph.places if value.dtype is torch.bool)

    def below(*numbers: float, like: tuple[int, ...] = (2, 1, 4), bound: float = -1.0) -> Value:
        sides = [a.make("full", (), (number,), (), torch.float32) for number in numbers]
        choice = a.reshape(a.make("where", (held, *sides), (), held.shape, torch.float32), like)
        return a.make("below", (a.cast(choice, torch.bfloat16),), (bound,), like, torch.bool)

    lowest = torch.finfo(torch.float32).min
    chosen, contrary = (graph.recipe(below(*numbers)) for numbers in ((lowest, 0.0), (0.0, lowest)))
    assert [(each.op, each.args) for each in (chosen, contrary)] == [("reshape", (held,)), ("not", (held,))]
    assert graph.recipe(below(lowest, 0.0, like=(8,))) is a.reshape(held, (8,))
    for each in (below(-1.0005, 0.0), below(0.0, -1.0005, like=(8,))):
        assert graph.recipe(each) is each


def test_the_mean_of_whole_numbers_is_not_built():
    """Torch has none; a sum of them is one that is scaled."""
    graph, x = graph_of(lambda x: x.sin())
    a, fakes = graph.algebra, Fakes(graph)
    assert fakes.of(a.mean(x, (-1,))).shape == (2, 1, 1)
    with pytest.raises(Refused, match="the rewrite reads this value, which the"):
        fakes.of(a.mean(a.cast(x, torch.int64), (-1,)))


def test_what_a_value_is_computed_from_is_named_once():
    a = Algebra()
    x = a.make("input", (), ("x",), (4, 4), torch.float32)
    root, tail = a.unary("cos", x), a.unary("exp", x)
    both = a.make("matmul", (a.make("matmul", (root, root), (), x.shape, x.dtype), tail), (), x.shape, x.dtype)
    assert list(both.sources()) == [both, both.arg, root, x, tail]


def test_the_factors_of_a_nested_product_are_listed_below_the_ops_that_are_passed():
    a = Algebra()
    x, y, z = (a.make("input", (), (name,), (4, 4), torch.float32) for name in "xyz")
    inner = a.mul(x, y)
    product = a.make("mul", (a.scale(inner, 2.0), z), (), x.shape, x.dtype)
    assert product.factors() == [a.scale(inner, 2.0), z]
    assert product.factors("scale") == [x, y, z]
    assert z.factors("scale") == [z]
