"""The parts of verification: float64 graphs, distances, choices, the calls in which graphs differ, and names."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusion.runtime import float64
from fusion.runtime.float64 import run_wide, widen, widened
from fusion.runtime.verification.choices import Recorded, Replayed, Steady
from fusion.runtime.verification.difference import difference
from fusion.runtime.verification.judge import Judge
from fusion.runtime.verification.numbers import distances, gross_rows, is_close, is_further, other_rows
from fusion.runtime.verification.runs import Call
from fusion.testing import capture

from .graphs import norm, numbers, traced
from .spoiled import without_gradients

__all__ = ["without_gradients"]  # a fixture that every test here takes

INF, NAN = torch.inf, torch.nan


# float64 -------------------------------------------------------------------------------------------------------------


def test_one_widened_weight_at_a_time_is_alive(monkeypatch: pytest.MonkeyPatch):
    def chain(x: Tensor, *weights: Tensor) -> Tensor:
        for each in weights:
            x = (x @ each).relu()
        return x

    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def tracked(x: Tensor, device: Any = None) -> Tensor:
        made.append(weakref.ref(wide := widened(x, device)))
        alive.append(sum(each() is not None for each in made))
        return wide

    inputs = [numbers(4, 64), *(numbers(64, 64, seed=seed) for seed in range(3))]
    gm = traced(chain, *inputs)
    monkeypatch.setattr(float64, "widened", tracked)
    have = run_wide(gm, inputs)
    assert (len(made), max(alive)) == (4, 2)  # the first reads two inputs
    assert torch.equal(have[0], widen(gm)(*widened(inputs))[0])


def test_bodies_are_widened_and_random_numbers_are_those_of_the_narrow_dtype():
    def body(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.float() / 3, lambda x: x.float(), (x,))

    x = numbers(4, 4, dtype=torch.bfloat16).abs()
    (wide,) = run_wide(traced(body, x), [x])
    assert torch.equal(wide, x.double() / 3)

    def noise(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.rand_like(x), torch.bernoulli(torch.full_like(x, 0.5))

    gm = traced(noise, x.float())
    torch.manual_seed(0)
    drawn = gm(x.float())
    torch.manual_seed(0)
    assert all(map(torch.equal, run_wide(gm, [x.float()]), widened(drawn)))


def test_a_graph_of_a_device_without_float64_is_judged_elsewhere():
    gm = traced(lambda x: x + torch.ones(4, device=x.device), torch.empty(4, device="meta"))
    (wide,) = run_wide(gm, [numbers(4)], torch.device("cpu"))
    assert torch.equal(wide, numbers(4).double() + 1)


# distances -----------------------------------------------------------------------------------------------------------


def test_distances_are_those_of_rows_and_infinite_where_one_side_is_not_finite_alone():
    exact = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, INF], [NAN, 1.0], [1e200, 1e200]], dtype=torch.float64)
    plain = exact.clone()
    fused = torch.tensor([[3.0, 5.0], [0.0, NAN], [1.0, INF], [NAN, 2.0], [1e200, 0.0]], dtype=torch.float64)
    measured = distances(fused, plain, exact)
    assert measured.plain.tolist() == [0.0] * 5
    want = [0.5**0.5, INF, 0.0, 0.5**0.5, 1e200 * 0.5**0.5]
    torch.testing.assert_close(measured.fused, torch.tensor(want, dtype=torch.float64))
    assert measured.size[1] == 0
    assert distances(*[torch.tensor(2.0)] * 3).size.tolist() == [2.0]
    assert distances(*[torch.empty(2, 0, 3)] * 3).fused.shape == (0,)


def test_what_the_plain_graph_cannot_hold_is_free():
    """exp overflows in float16; a fused graph may hold what the plain one does not, or not."""
    exact = torch.tensor([[1.0, 1e6], [1.0, 6.5504e4], [1.0, 2.0]], dtype=torch.float64)
    plain = torch.tensor([[1.0, INF], [1.0, 65504.0], [1.0, INF]]).half()
    for other in (INF, 65504.0, 7.0):
        fused = torch.tensor([[1.0, other], [1.0, other], [1.0, other]]).half()
        assert distances(fused, plain, exact).fused.tolist() == [0.0] * 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_rounding_is_close_and_a_wrong_row_is_neither_close_nor_near(dtype: torch.dtype):
    exact = numbers(64, 256)  # as numbers of float32, which float64 holds
    exact = exact.double() * (1 + 1e-3 * numbers(64, 256, seed=1).double())
    plain, eps = exact.to(dtype), torch.finfo(dtype).eps
    assert is_close((exact * (1 + eps / 16)).to(dtype), plain)
    assert not is_further(distances(plain, plain, exact), dtype)
    wrong = plain.clone()
    wrong[5] *= 1.5
    assert not is_close(wrong, plain)
    measured = distances(wrong, plain, exact)
    assert is_further(measured, dtype)
    wide = exact.clone()
    wide[5] *= 1.5
    assert other_rows(measured, wide, exact, eps).nonzero().tolist() == [[5]]
    assert gross_rows(measured.fused, measured, 0.05).nonzero().tolist() == [[5]]
    assert not other_rows(distances(plain, plain, exact), wide, exact, eps).any()  # float64 alone differs


# choices -------------------------------------------------------------------------------------------------------------


def chosen(function: Any, x: Tensor) -> list[Tensor]:
    gm = traced(function, x)
    with Steady(gm.graph) as steady:
        return list(run_wide(gm, [x], at=steady.at))


TIED = torch.tensor([[1.0, 3.0, 2.0, 3.0, -INF, -INF, 3.0, 0.0]])


@pytest.mark.parametrize(
    ("function", "want"),
    [
        (lambda x: x.topk(4)[1], [[1, 3, 6, 2]]),
        (lambda x: x.topk(2, largest=False)[1], [[4, 5]]),
        (lambda x: x.topk(3, dim=0)[1], [[0] * 8, [1] * 8, [2] * 8]),
        (lambda x: x.sort(descending=True)[1], [[1, 3, 6, 2, 0, 7, 4, 5]]),
        (lambda x: x.argsort()[:, :3], [[4, 5, 7]]),
        (lambda x: x.max(-1)[1], [1]),
        (lambda x: x.max(-1)[0], [3.0]),
        (lambda x: x.argmax(-1), [1]),
        (lambda x: x.argmin(), 4),
        (lambda x: x.kthvalue(2)[0], [-INF]),
    ],
)
def test_of_equal_numbers_the_first_is_chosen(function: Any, want: Any):
    x = TIED.expand(3, 8).contiguous() if "dim=0" in repr(function.__code__.co_consts) else TIED
    if isinstance(want, list) and len(want) == 3:
        x = TIED.expand(3, 8).contiguous()
    (have,) = chosen(function, x)
    assert have.tolist() == want


def test_numbers_that_rounding_tells_apart_in_one_run_alone_are_equal():
    def noisy(x: Tensor) -> Tensor:
        return ((x / 3) * 3).topk(3)[1]

    x = torch.tensor([[1.0, 3.0, 2.0, 3.0 + 1e-12, 3.0 - 1e-12]], dtype=torch.float64)
    assert chosen(lambda x: x.float().double().topk(3)[1], x)[0].tolist() == [[1, 3, 4]]  # a graph of float32
    assert chosen(lambda x: x.topk(3)[1], x)[0].tolist() == [[3, 1, 4]]  # one of float64


def test_halves_are_rounded_alike():
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, 3.2, 7.0])
    (have,) = chosen(lambda x: ((x / 3) * 3 + 1e-12).round(), x)
    assert have.tolist() == [0.0, 2.0, 2.0, 0.0, 3.0, 7.0]
    (have,) = chosen(lambda x: (x - 1e-12).floor(), torch.tensor([2.0, 2.5]))
    assert have.tolist() == [2.0, 2.0]
    (have,) = chosen(lambda x: (x - 1e-12).to(torch.int8), torch.tensor([2.0, -3.0]))
    assert have.tolist() == [2, -3]


def replayed(function: Any, x: Tensor, change: Any = None) -> tuple[list[Tensor], Replayed]:
    """Run a graph in float64 with the choices of its own dtype, which `change` may falsify."""
    gm = traced(function, x)
    call = Call.copying([gm.graph], [x])
    recorded = Recorded()
    call.run(gm, recorded)
    made = recorded.made if change is None else [change(each) for each in recorded.made]
    again = Replayed(gm.graph, made)
    return call.run_wide(gm, again), again


def test_choices_of_close_numbers_are_explained_and_others_are_not():
    def listed(x: Tensor) -> tuple[Tensor, Tensor]:
        values, indices = (x + x / 256).topk(2)
        return values, indices

    x = torch.tensor([[1.0, 1.0078125, 1.0, -4.0]]).bfloat16()
    _, again = replayed(listed, x, lambda made: (made[0], torch.tensor([[0, 1]])))
    assert [(each.is_explained, each.is_tie) for each in again.moved] == [(True, False)]
    _, again = replayed(listed, x, lambda made: (made[0], torch.tensor([[3, 1]])))
    assert [each.is_explained for each in again.moved] == [False]
    _, again = replayed(listed, x, lambda made: (made[0], torch.tensor([[1, 2]])))
    assert [(each.is_explained, each.is_tie) for each in again.moved] == [(True, True)]


@pytest.mark.parametrize(
    ("function", "change"),
    [
        (lambda x: (x * 10).round(), lambda made: made + 1),
        (lambda x: (x * 10).to(torch.int8), lambda made: made + 1),
        (lambda x: x > 0.5, lambda made: made.logical_not()),
        (lambda x: x.argmax(-1), lambda made: 1 - made),
        (lambda x: x.view(torch.int16), lambda made: made + 1),
    ],
    ids=["round", "cast", "comparison", "argmax", "bits"],
)
def test_a_choice_that_moves_by_a_step_is_explained_and_by_more_is_not(function: Any, change: Any):
    x = torch.tensor([[0.5, 0.5001]]).bfloat16()
    (have,), again = replayed(function, x, change)
    assert have.tolist() == change(function(x)).tolist()
    assert [each.is_explained for each in again.moved] == [True]
    far = torch.tensor([[0.5, 30.0]]).bfloat16()
    _, again = replayed(function, far, lambda made: made.flip(-1) if made.dim() > 1 else 1 - made)
    assert [each.is_explained for each in again.moved] == [False]


# graphs that differ --------------------------------------------------------------------------------------------------


def judge(function: Any, *inputs: Any) -> Judge:
    gm = traced(function, *inputs)
    call = Call.copying([gm.graph], inputs)
    plain = call.run(gm)
    return Judge(gm, call, plain, [f"result {place}" for place in range(len(plain))], is_compiled=False)


def test_a_list_that_breaks_ties_otherwise_is_followed(caplog: pytest.LogCaptureFixture):
    """Compare results of such a list with float64 of the same list."""

    def first(x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        ids = x.topk(2)[1]
        return ids, rows[ids].sum(1)

    def last(x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        ids = 7 - x.flip(-1).sort(descending=True, stable=True)[1][:, :2]
        return ids, rows[ids].sum(1)

    def wrong(x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        ids = 7 - x.flip(-1).sort(descending=True, stable=True)[1][:, :2]
        return ids, rows[ids].sum(1) * 1.01

    inputs = TIED.repeat(4, 1) + torch.arange(4.0)[:, None], numbers(8, 16)
    judged = judge(first, *inputs)
    assert judged.judged(traced(last, *inputs)) is None
    assert "a tie in topk" in caplog.text
    fault = judged.judged(traced(wrong, *inputs))
    assert fault is not None
    assert fault.message.startswith("result 1 ")


def test_the_calls_that_differ_are_cut_out_with_their_inputs():
    def plain(x: Tensor, w: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.sin(x)
        y = norm(h, w)
        cache[:, 1] = y[:, 0]
        return torch.cos(y), h + 1

    def fused(x: Tensor, w: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.sin(x)
        y = nn.functional.rms_norm(h, (64,), w, 1e-3)
        cache[:, 1] = y[:, 0]
        return torch.cos(y), h + 1

    inputs = numbers(2, 3, 64), numbers(64, seed=1), numbers(2, 4, 64, seed=2)
    one, other = traced(plain, *inputs), traced(fused, *inputs)
    found = difference(one, other, Call.copying([one.graph], inputs))
    assert found is not None
    assert [node.target for node in found.fused.graph.nodes if node.op == "call_function"] == [
        torch.ops.aten.rms_norm.default
    ]
    assert not {torch.ops.aten.sin.default, torch.ops.aten.cos.default} & {
        node.target for node in found.plain.graph.nodes
    }
    assert found.is_wrong
    assert any(torch.equal(each, torch.sin(inputs[0])) for each in found.call.inputs)
    assert difference(one, traced(plain, *inputs), Call.copying([one.graph], inputs)) is None


# names ---------------------------------------------------------------------------------------------------------------


@dataclass
class Annotation:
    logits: Tensor
    states: tuple[Tensor, ...]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4, bias=False)
        self.register_buffer("k_scale", torch.ones(4))

    def forward(self, x: Tensor, cache: dict[str, list[Tensor]]) -> Annotation:
        y = self.project(x) * self.k_scale
        cache["keys"][1].copy_(y)
        return Annotation(y + 1, (y + 2, y + 3))


def test_inputs_and_results_have_the_names_of_the_model():
    model = nn.Sequential(nn.Identity(), Attention()).requires_grad_(False)
    captured = capture(lambda *args: model[1](*args), (numbers(2, 4), {"keys": [numbers(2, 4), numbers(2, 4)]}))
    inputs, results = captured.known.named(captured.graph.graph)
    assert set(inputs) == {"args[0]", "args[1]['keys'][1]", "model.1.project.weight", "model.1.k_scale"}
    assert results == ("output.logits", "output.states[0]", "output.states[1]")
    captured = capture(model[1], (numbers(2, 4), {"keys": [numbers(2, 4), numbers(2, 4)]}))
    assert set(captured.known.named(captured.graph.graph)[0]) == {"x", "cache['keys'][1]", "project.weight", "k_scale"}


@pytest.mark.parametrize(
    ("function", "want"),
    [
        (lambda x: x + 1, ("output",)),
        (lambda x: (x + 1, [x + 2, 3]), ("output[0]", "output[1][0]")),
        (lambda x: {"a": x + 1, "b": {"c": x + 2}}, ("output['a']", "output['b']['c']")),
    ],
)
def test_results_are_named_by_the_code_that_reads_them(function: Any, want: tuple[str, ...]):
    captured = capture(function, (numbers(3),))
    assert captured.known.named(captured.graph.graph) == (("x",), want)
