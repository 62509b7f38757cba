"""Whose memory a tensor is, who sees what is written to it, and what a verified graph may not change."""

from __future__ import annotations

import pytest
import torch

from fusion.errors import VerificationError
from fusion.graph.aliasing import aliased, closing_writes, is_copy_unseen, is_returned, is_written, outputs, shown, sort
from fusion.stages.capture import is_training
from fusion.stages.rewrite.layout import is_redundant
from fusion.stages.verify import contract, result_strides, verify

from .graphs import Build, numbers

aten = torch.ops.aten


def returned(build, *results):
    build.graph.output((results,))
    return build.graph


def a_copy(build, source):
    return build(aten.clone.default, source, memory_format=torch.contiguous_format)


def kept(build):
    """A copy that nobody returns."""
    source = build(aten.cos.default, build.input(4, 4))
    return a_copy(build, source), source, ()


def written(build):
    copy, source, _ = kept(build)
    build(aten.add_.Tensor, copy, 1)
    return copy, source, ()


def of_what_is_written(build):
    copy, source, _ = kept(build)
    build(aten.add_.Tensor, source, 1)
    return copy, source, ()


def of_an_input(build):
    source = build.input(4, 4)
    copy = a_copy(build, source)
    return copy, source, (copy,)


def given(build):
    copy, source, _ = kept(build)
    return copy, source, (copy,)


def given_with_its_source(build):
    copy, source, _ = kept(build)
    return copy, source, (copy, build(aten.t.default, source))


def of_a_part(build):
    source = build(aten.slice.Tensor, build(aten.cos.default, build.input(4, 4)), 0, 0, 2)
    copy = a_copy(build, source)
    return copy, source, (copy,)


@pytest.mark.parametrize(
    ("form", "unseen"),
    [
        (kept, True), (written, False), (of_what_is_written, False), (of_an_input, False), (given, True),
        (given_with_its_source, False), (of_a_part, False),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)  # fmt: skip
def test_a_copy_is_needed_where_somebody_can_tell(form, unseen):
    build = Build()
    copy, source, results = form(build)
    returned(build, *results)
    assert is_copy_unseen(copy, source) == is_redundant(copy) == unseen


def test_what_gives_nothing_and_what_is_no_node_is_passed_over():
    build = Build()
    x = build.input(4)
    asked = build(aten.cos.default, x)
    build(aten._assert_async.msg, asked, "some are 0")
    assert outputs(returned(build, x, None, 3)) == [x]
    assert is_returned(x)
    assert not is_returned(asked)


def test_what_calls_return_may_be_nobodys_memory():
    build = Build()
    x, mean = build.input(2, 4, 3), build.input(4)
    assert aliased(aten._foreach_add_.Scalar, ([x], 1), {}) is None
    assert aliased(aten._native_batch_norm_legit.default, (x, None, None, mean, mean, True, 0.1, 1e-5), {}) is None
    largest, place = build.input(4, 3), build.input(4, 3, dtype=torch.int64)
    outs = {"max": largest, "max_values": place}
    assert [aliased(aten.max.dim_max, (x, 0), outs, number) for number in range(2)] == [largest, place]
    assert shown(build(aten.t.default, build.input(4, 4))) is not None
    assert shown(build(aten.cos.default, x)) is None


def test_only_views_show_what_is_returned_or_written():
    build = Build()
    x, y = build.input(4), build.input(4)
    computed = build(aten.cos.default, x)
    built = build(aten.add.Tensor, computed, 1)
    build(aten.copy_.default, y, built)
    returned(build, built)
    assert not is_returned(computed)
    assert not is_written(computed)
    assert is_written(y)


def test_the_writes_that_close_a_graph():
    build = Build()
    x, y = build.input(4), build.input(4)
    build(aten.copy_.default, x, build(aten.cos.default, y))
    closing = [build(aten.copy_.default, each, build(aten.sin.default, y)) for each in (x,)]
    assert closing_writes(returned(build, y)) == set(closing)


def test_nodes_are_sorted_behind_what_they_read_and_writes_keep_their_order():
    build = Build()
    x, y = build.input(4), build.input(4)
    cos, sin = build(aten.cos.default, y), build(aten.sin.default, y)
    first = build(aten.copy_.default, x, cos)
    second = build(aten.copy_.default, x, sin)
    graph = returned(build, y)
    second.append(cos)  # which the first write reads
    sort(graph)
    graph.lint()
    places = {node: place for place, node in enumerate(graph.nodes)}
    assert places[cos] < places[first] < places[second]


# what is verified --------------------------------------------------------------------------------------------------


def turned(*shape, back=False):
    """A graph that gives a tensor, or one that lies otherwise and else looks the same."""
    build = Build()
    made = build(aten.cos.default, build.input(*shape))
    if back:
        made = build(aten.t.default, build(aten.cos.default, build(aten.t.default, made)))
        made = build(
            aten.t.default,
            build(aten.clone.default, build(aten.t.default, made), memory_format=torch.contiguous_format),
        )
    return returned(build, made), made


def test_a_result_that_lies_otherwise_is_told_from_one_without_elements():
    with pytest.raises(VerificationError):
        verify(turned(4, 4, back=True)[0], contract(turned(4, 4)[0]), [])
    verify(turned(0, 4, back=True)[0], contract(turned(0, 4)[0]), [])


def test_only_strides_that_say_something_are_compared():
    assert result_strides(torch.empty_strided((1, 4, 2), (99, 2, 1)), None) == {(2, 1)}
    assert result_strides(torch.empty(0, 4), None) == {()}
    assert result_strides(3, None) == frozenset()


def test_the_inputs_that_are_written_to_are_told():
    build = Build()
    x, y = build.input(4), build.input(4)
    build(aten.copy_.default, y, build(aten.cos.default, x))
    before = contract(returned(build, x))
    assert before.written == (y.name,)
    build.graph.erase_node(next(iter(y.users)))
    with pytest.raises(VerificationError):
        verify(build.graph, before, [])


def test_a_new_node_has_a_shape():
    graph, made = turned(4, 4)
    before = contract(graph)
    verify(graph, before, [made])
    with graph.inserting_before(made):
        new = graph.call_function(aten.sin.default, (made.args[0],))
    with pytest.raises(VerificationError, match="has no shape"):
        verify(graph, before, [new])


# what is trained ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("learns", [True, False])
def test_a_backward_graph_is_built_where_gradients_are_on_and_something_learns(grad, learns):
    graph = torch.fx.Graph()
    graph.output((graph.placeholder("size"), graph.placeholder("x")))  # of which nothing is known
    with torch.set_grad_enabled(grad):
        assert is_training(torch.fx.GraphModule({}, graph), [3, numbers(4).requires_grad_(learns)]) == (grad and learns)
