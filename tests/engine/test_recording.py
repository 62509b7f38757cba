"""What is recorded of an operator is found again for equal inputs alone."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.functional import pad

from fusion._torch.fakes import fake_like, run_on_fakes
from fusion._torch.tensors import shares_memory
from fusion.graph import dim_of, dims_of
from fusion.language import Refused
from fusion.planning.fake_execution import Fakes
from fusion.planning.plan_json import frozen
from fusion.testing import capture
from tests.engine.graphs import numbers, read_graph, traced


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.0, -0.0),
        (1, 1.0),
        (1, True),
        (complex(0.0, 0.0), complex(0.0, -0.0)),
        (slice(0, 4), slice(0, 4, 2)),
        (slice(0.0), slice(-0.0)),
        (torch.zeros(2, 3), torch.zeros(3, 2).t()),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        ([1, [2]], [1, [2.0]]),
        ({"alpha": 1}, {"beta": 1}),
    ],
)
def test_calls_that_may_differ_are_told_apart(one: Any, other: Any):
    assert frozen(one) != frozen(other)


@pytest.mark.parametrize(
    "given",
    [float("nan"), [slice(None, 2), 1.5], {"b": torch.zeros(2, 3), "a": None}, (torch.float32, torch.device("cpu"))],
)
def test_equal_calls_are_equal(given: Any):
    again = {name: given[name] for name in reversed(given)} if isinstance(given, dict) else given
    assert frozen(again) == frozen(given)
    assert hash(frozen(again)) == hash(frozen(given))


def fakes_of_a_graph() -> tuple[Fakes, torch.Tensor]:
    """The fakes of a graph, and one of its inputs [2, 6]."""
    source = traced(lambda x: x + 1, numbers(2, 6)).graph
    return Fakes(read_graph(source)), next(iter(source.nodes)).meta["val"]


def test_an_equal_call_on_the_same_fakes_is_run_once():
    fakes, x = fakes_of_a_graph()
    (first, _), (again, _) = (fakes.record(lambda given: given["x"].view(-1).exp(), {"x": x}) for _ in range(2))
    assert [each.result for each in first.steps] == [each.result for each in again.steps]
    assert all(one.result is other.result for one, other in zip(first.steps, again.steps, strict=True))
    other, _ = fakes.record(lambda given: given["x"].view(4, -1).exp(), {"x": x})
    assert other.steps[-1].result is not first.steps[-1].result


def test_two_equal_calls_of_one_recording_give_two_tensors():
    fakes, x = fakes_of_a_graph()
    for _ in range(2):
        recorder, (one, other) = fakes.record(lambda given: [torch.empty_like(given["x"]) for _ in range(2)], {"x": x})
        assert one is not other
        assert recorder.name(one) != recorder.name(other)


def test_what_is_written_is_not_known_from_before():
    fakes, x = fakes_of_a_graph()
    recordings = [fakes.record(lambda given: given["x"].clone().add_(1), {"x": x})[0] for _ in range(2)]
    assert [len(each.steps) for each in recordings] == [2, 2]


@pytest.mark.parametrize("weights", [(0, None), (None, 0), (0, 0), (None, None)])
@pytest.mark.parametrize("wide", [False, True])
def test_a_layer_norm_says_the_dtype_of_its_statistics(weights: tuple[int | None, ...], wide: bool):
    norm, dtype = torch.ops.aten.native_layer_norm.default, torch.float32 if wide else torch.bfloat16
    x, line = torch.ones(3, 8, dtype=torch.bfloat16), torch.ones(8, dtype=dtype)
    gains = [None if each is None else line for each in weights]
    mode = FakeTensorMode()
    fakes = [None if each is None else mode.from_tensor(each) for each in (x, *gains)]
    said = run_on_fakes(norm, (fakes[0], [8], *fakes[1:], 1e-5), {})
    assert [each.dtype for each in said] == [each.dtype for each in norm(x, [8], *gains, 1e-5)]


def test_symbolic_sizes_are_not_taken_for_those_of_the_call():
    captured = capture(lambda x: x + 1, (numbers(4, 6, 8),), dynamic=True).graph.graph
    x = next(node.meta["val"] for node in captured.nodes if node.op == "call_function")
    recording, _ = Fakes(read_graph(captured)).record(lambda given: pad(given["x"], (0, 2)), {"x": x})
    (padded,) = (each.result for each in recording.steps)
    assert all(isinstance(size, torch.SymInt) for size in padded.shape)
    assert not x.shape[0].node.expr.is_number


OF_THIS_CALL = {
    "rows of a list": lambda x: x.new_zeros(len([0] * x.shape[0]), 8),
    "argument": lambda x: torch.ops.aten.cumsum.default(x, x.shape[0] - 3),
    "decision": lambda x: x.cos() if x.shape[0] < 5 else x.sin(),
}
"""What a lowering may not do with a symbolic size: it would be right for the call that is traced."""


@pytest.mark.parametrize("how", OF_THIS_CALL)
def test_what_takes_a_symbolic_size_for_a_number_is_refused(how: str, caplog: pytest.LogCaptureFixture):
    captured = capture(lambda x: x + 1, (numbers(4, 6, 8),), dynamic=True).graph.graph
    x = next(node.meta["val"] for node in captured.nodes if node.op == "call_function")
    env = x.fake_mode.shape_env
    before = list(env.guards), dict(env.replacements)
    with pytest.raises(Refused) as refused:
        Fakes(read_graph(captured)).record(lambda given: OF_THIS_CALL[how](given["x"]), {"x": x})
    assert "the rewrite is right for some symbolic" in str(refused.value)
    assert (list(env.guards), dict(env.replacements)) == before
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("name", "given", "kwargs"),
    [
        ("ones", ([2, 3],), {"dtype": torch.bfloat16}),
        ("zeros", ([2, 3],), {}),
        ("full", ([2], 1.5), {}),
        ("full", ([2], 3), {}),
        ("arange", (5,), {}),
        ("scalar_tensor", (1.0,), {}),
    ],
)
def test_what_is_made_of_numbers_is_made_as_a_fake_mode_makes_it(name: str, given: Any, kwargs: dict[str, Any]):
    target = getattr(torch.ops.aten, name).default
    with FakeTensorMode():
        one, other = (call(target, given, {**kwargs, "device": torch.device("cpu")}) for call in (run_on_fakes, called))
    assert isinstance(one, FakeTensor)
    assert frozen(one) == frozen(other)
    assert vars(one) == vars(other)


def called(target: Any, given: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """What a call gives."""
    return target(*given, **kwargs)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_fresh_fakes_remember_what_those_of_a_fake_mode_do(device: str):
    mode = FakeTensorMode()
    mode.allow_meta = True
    with mode:
        other = torch.empty_strided([2, 3], [1, 2], dtype=torch.float16, device=device)
    one = fake_like(other)
    assert frozen(one) == frozen(other)
    assert vars(one) == vars(other)
    assert (one.fake_device, one.is_leaf) == (other.fake_device, other.is_leaf)
    assert torch._C._dispatch_keys(one) == torch._C._dispatch_keys(other)  # pyright: ignore[reportPrivateUsage]
    assert not shares_memory(one, other)
    assert shares_memory(one, run_on_fakes(torch.ops.aten.view.default, (one.t(), [-1]), {}))


def test_the_last_row_of_a_symbolic_number_is_made_by_its_place():
    captured = capture(lambda x: x + 1, (numbers(4, 6),), dynamic=True).graph.graph
    graph = read_graph(captured)
    x = next(value for value in graph.places if value.op == "input")
    last = graph.algebra.narrow(x, 0, x.shape[0] - 1, 1)
    fakes = Fakes(graph)
    assert dims_of(fakes.of(last).shape) == (1, x.shape[1])
    (step,) = fakes.recipe(last).steps
    assert [dim_of(each) for each in step.args[2:4]] == [x.shape[0] - 1, x.shape[0]]
