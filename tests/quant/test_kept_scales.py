"""What a model keeps of the scale of rows in int8 is what the operator's scale becomes: in which shape, times what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fusion
from fusion.testing import capture
from patterns.quant.read_dynamic_scales import FLOATS, UNSCALED
from tests.engine.graphs import read_graph
from tests.examples.inputs import in_dtype
from tests.examples.quantisation import by_row, grid, int8, signs

T, D = 6, 64
X = in_dtype(grid(5, T, D), torch.bfloat16)
Rows = Callable[[Tensor], Any]


def largest(x: Tensor) -> Tensor:
    """max|x| [T, 1]."""
    return x.float().abs().amax(-1, keepdim=True)


def kept(rows: Rows, x: Tensor = X) -> list[tuple[tuple[int, ...], torch.dtype, float]]:
    """Shape and dtype of each scale that is read, and by what it is multiplied."""
    found = read_graph(capture(rows, (x,)).graph.graph).readings.all("token_scale")
    return [(value.shape, each.captures["dtype"], each.captures.get("times", 1.0)) for value, each in found]


def reasons(rows: Rows, x: Tensor = X) -> list[str]:
    graph = read_graph(capture(rows, (x,)).graph.graph)
    assert not graph.readings.all("token_scale")
    return [each.reason for _, each in graph.readings.missed("quantisation")]


def divided(x: Tensor, scale: Tensor) -> Tensor:
    return int8(x.float() / scale)


def both(x: Tensor) -> tuple[Tensor, ...]:
    """The scale, and the largest magnitudes besides."""
    return divided(x, by_row(x)), largest(x), by_row(x)


def bounded(x: Tensor, least: float) -> tuple[Tensor, ...]:
    """The scale itself divides; what is kept has a bound."""
    scale = by_row(x)
    return divided(x, scale), scale.clamp(min=least)


def for_values(x: Tensor) -> tuple[Tensor, ...]:
    """The scale [T] behind two casts, beside its view that divides."""
    scale = by_row(x).squeeze(-1)
    return divided(x, scale.unsqueeze(-1)), scale.bfloat16()


def twice_seen(x: Tensor) -> tuple[Tensor, ...]:
    """One view divides, another is kept."""
    scale = x.float().abs().amax(-1) / 127
    return divided(x, scale.unsqueeze(-1)), scale[..., None] + 1


def in_16_bits(x: Tensor) -> tuple[Tensor, ...]:
    """The largest magnitudes as x has them; the scale in float32."""
    most = x.abs().amax(-1)
    return divided(x, most.float().unsqueeze(-1) / 127), most


def in_other_rows(x: Tensor) -> tuple[Tensor, ...]:
    """The scale is computed in other rows than those that it divides."""
    scale = x.float().abs().amax(-1).view(2, -1) / 127
    return divided(x, scale.view(T, 1)), scale


def shifted(x: Tensor) -> tuple[Tensor, ...]:
    """A bound divides; what is kept is added to something."""
    scale = by_row(x)
    return divided(x, scale.clamp(min=1e-8)), scale + 1


KEPT: dict[str, tuple[Rows, tuple[int, ...], torch.dtype, float]] = {
    "as it divides": (lambda x: (divided(x, by_row(x)), by_row(x)), (T, 1), torch.float32, 1),
    "without its last dim": (
        lambda x: (divided(x, by_row(x)), by_row(x).squeeze(-1)), (T, 1), torch.float32, 1,
    ),
    "before it is cast": (lambda x: (divided(x, by_row(x)), by_row(x).bfloat16()), (T, 1), torch.float32, 1),
    "without its last dim, before it is cast": (for_values, (T, 1), torch.float32, 1),
    "seen twice": (twice_seen, (T,), torch.float32, 1),
    "the largest magnitudes": (lambda x: (divided(x, by_row(x)), largest(x)), (T, 1), torch.float32, 127),
    "the largest magnitudes, in bfloat16": (in_16_bits, (T,), torch.bfloat16, 127),
    "in a sum": (shifted, (T, 1), torch.float32, 1),
    "twice the scale": (lambda x: (divided(x, by_row(x)), by_row(x) * 2), (T, 1), torch.float32, 2),
    "both": (both, (T, 1), torch.float32, 1),
    "faintly bounded": (lambda x: bounded(x, 1e-6), (T, 1), torch.float32, 1),
    "nothing": (lambda x: divided(x, by_row(x)), (T, 1), torch.float32, 1),
}  # fmt: skip


@pytest.mark.rotates(6)
@pytest.mark.parametrize("case", KEPT.values(), ids=KEPT)
def test_what_is_kept_of_a_scale_is_given(case: tuple[Rows, tuple[int, ...], torch.dtype, float]):
    rows, *expected = case
    assert kept(rows) == [tuple(expected)]


def is_other(rows: Rows, x: Tensor = X) -> bool:
    """Whether the scale that is given is the one that divides, not what is kept of it."""
    graph = read_graph(capture(rows, (x,)).graph.graph)
    [(value, _)] = graph.readings.all("token_scale")
    returned = {graph.value_of[node] for node in graph.source.output_node().all_input_nodes}
    return value not in returned


OTHERS: dict[str, Rows] = {
    "bounded far above zeros": lambda x: bounded(x, 0.02),
    "bounded above": lambda x: (divided(x, by_row(x)), by_row(x).clamp(max=0.02)),
    "shifted": lambda x: (divided(x, by_row(x)), by_row(x) + 1),
    "in other rows": lambda x: (divided(x, by_row(x)), by_row(x).view(2, 3)),
    "in other rows before": in_other_rows,
    "a largest of all": lambda x: (divided(x, by_row(x)), by_row(x).amax()),
}


@pytest.mark.parametrize("rows", OTHERS.values(), ids=OTHERS)
def test_what_is_no_multiple_of_a_scale_stays_as_it_is(rows: Rows):
    assert is_other(rows)


ZEROS: dict[str, Rows] = {
    "where it is 0": lambda x, s, n: torch.where(s == 0, n, s),
    "where it is not 0": lambda x, s, n: torch.where(s != 0, s, n),
    "where it is positive": lambda x, s, n: torch.where(s > 0, s, n),
    "an inverse where it is 0": lambda x, s, n: 1 / torch.where(s == 0, n, 1 / s),
}
NOT_ZEROS: dict[str, Rows] = {
    "where it is negative": lambda x, s, n: torch.where(s < 0, s, n),
    "where its negative is positive": lambda x, s, n: torch.where(-s > 0, s, n),
    "where it is at most 1": lambda x, s, n: torch.where(s <= 1, n, s),
    "where it is above 1": lambda x, s, n: torch.where(s > 1, s, n),
    "in place of others": lambda x, s, n: torch.where(s == 0, s, n),
    "where it is no NaN": lambda x, s, n: torch.where(~s.isnan(), s, n),
    "where that of other lanes is positive": lambda x, s, n: torch.where(by_row(x[:, :8]) > 0, s, n),
}


def replaced(change: Callable[..., Tensor]) -> Rows:
    return lambda x: divided(x, change(x, by_row(x), 1.0))


@pytest.mark.parametrize("change", list(ZEROS.values())[:3], ids=list(ZEROS)[:3])
def test_a_scale_may_be_another_where_it_is_0(change: Callable[..., Tensor]):
    assert len(kept(replaced(change))) == 1


@pytest.mark.parametrize("change", NOT_ZEROS.values(), ids=NOT_ZEROS)
def test_a_scale_that_is_another_elsewhere_is_none(change: Callable[..., Tensor]):
    assert reasons(replaced(change)) == [UNSCALED]


INVERSES: dict[str, tuple[Rows, bool]] = {
    "where it is 0": (lambda x: torch.where(largest(x) == 0, 1.0, 127 / largest(x)), True),
    "of a scale, where that is positive": (lambda x: torch.where(by_row(x) > 0, by_row(x).reciprocal(), 0.0), True),
    "where other lanes are 0": (lambda x: torch.where(largest(x[:, :8]) == 0, 1.0, 127 / largest(x)), False),
    "of a sum": (lambda x: torch.where(largest(x) == 0, 1.0, 127 / x.float().sum(-1, keepdim=True)), False),
    "that is none": (lambda x: torch.where(largest(x) == 0, 1.0, 127 * largest(x)), False),
    "in place of others": (lambda x: torch.where(largest(x) == 0, 127 / largest(x), 1.0), False),
}


@pytest.mark.parametrize(("inverse", "found"), INVERSES.values(), ids=INVERSES)
@pytest.mark.rotates(3)
def test_an_inverse_may_be_another_where_a_scale_is_0(inverse: Callable[[Tensor], Tensor], found: bool):
    def rows(x: Tensor) -> Tensor:
        return int8(x.float() * inverse(x))

    assert bool(kept(rows)) == found
    assert found or reasons(rows) == [UNSCALED]


def test_an_inverse_of_each_number_is_none_of_each_row():
    def rows(x: Tensor) -> Tensor:
        inverse = torch.where(by_row(x).squeeze(-1) == 0, 1.0, 1 / by_row(x))
        return int8(x.float() * inverse)

    assert reasons(rows, X[:, :T]) == [UNSCALED]


def test_rows_that_become_int8_are_told_nothing_of_floats():
    graph = read_graph(capture(lambda x: divided(x, by_row(x)), (X,)).graph.graph)
    assert not graph.readings.missed()


FLOAT: dict[str, tuple[Rows, bool]] = {
    "bounded": (lambda x: (x / by_row(x)).clamp(-127, 127).round() * by_row(x), True),
    "behind their bounds": (lambda x: (x / by_row(x)).round().clamp(-127, 127) * by_row(x), True),
    "of one number": (lambda x: (x / 0.5).round() * 0.5, False),
    "by the scale of a mean": (lambda x: (x / x.mean(-1, keepdim=True)).round(), False),
    "beside the inverse of their scale": (lambda x: (x + 1 / by_row(x)).round(), False),
    "themselves": (lambda x: x.round(), False),
    "not rounded": (lambda x: (x / by_row(x)) * by_row(x), False),
}


@pytest.mark.parametrize(("rows", "told"), FLOAT.values(), ids=FLOAT)
def test_rows_that_are_rounded_by_their_scale_in_floats_are_told_so(rows: Rows, told: bool):
    assert reasons(rows) == [FLOATS] * told


def test_rows_that_never_become_int8_are_told_so():
    assert reasons(lambda x: (x / by_row(x)).round()) == [FLOATS]


def test_rows_times_their_largest_have_no_scale():
    assert reasons(lambda x: int8(x * by_row(x))) == [UNSCALED]


def test_the_scale_of_joined_rows_is_not_proven():
    def rows(x: Tensor) -> Tensor:
        return divided(torch.cat((x, x.flip(0))), by_row(x).repeat(2, 1))

    assert "joined, or repeated" in reasons(rows)[0]


OPTIONS = {"target": "ascend910_93", "lower": "eager"}


def flat(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = by_row(x).squeeze(-1)
    return divided(x, scale.unsqueeze(-1)), scale


def normed(x: Tensor, y: Tensor, gamma: Tensor) -> tuple[Tensor, ...]:
    total = x + y
    wide = total.float()
    norm = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * gamma
    return *flat(norm), total


def turned(x: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    return flat(x @ matrix)


@pytest.mark.parametrize(
    ("function", "inputs", "operator", "launches"),
    [
        (flat, (X,), "npu_dynamic_quant", 1),
        (lambda x: (divided(x, by_row(x)), largest(x)), (X,), "npu_dynamic_quant", 2),
        (normed, (X, X.flip(0), X[0]), "npu_add_rms_norm_dynamic_quant", 1),
        (turned, (in_dtype(grid(5, 32, 128), torch.bfloat16), signs(128).bfloat16()), "npu_rotate_quant", None),
    ],
    ids=["rows", "largest", "norm", "turned"],
)
def test_a_scale_in_another_shape_costs_nothing(
    function: Callable[..., Any], inputs: tuple[Tensor, ...], operator: str, launches: int | None
):
    with torch.no_grad():
        report = fusion.explain(function, *inputs, options=OPTIONS)
    assert f"npu::{operator}" in report.ops
    assert report.launches[1] == (launches or report.launches[1]) <= 2


def test_16_bit_scales_are_nearer_to_float64_than_the_models():
    def narrow(x: Tensor) -> tuple[Tensor, Tensor]:
        scale = (x.abs().amax(-1) / 127).clamp(min=1e-5)
        return torch.clamp(torch.round(x * (1.0 / scale.unsqueeze(-1))), -127, 127).to(torch.int8), scale

    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(7)).bfloat16()
    truth = x.double().abs().amax(-1, keepdim=True) / 127
    exact = (x.double() / truth).round() * truth
    torch._dynamo.reset()
    fused = torch.compile(narrow, backend="cann_fusion", options={"target": "host", "lower": "eager"})
    plain, ours = (
        (numbers.double() * scale.double().unsqueeze(-1) - exact).norm() for numbers, scale in (narrow(x), fused(x))
    )
    assert ours <= plain
