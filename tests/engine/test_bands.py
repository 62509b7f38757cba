"""Masks that lie in buffers: read when a model is compiled, checked at every call."""

from __future__ import annotations

import math
import warnings
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fusion
from fusion.facts import Band
from fusion.inputs.mask_buffers import band_of

from .graphs import numbers

pytestmark = pytest.mark.usefixtures("fresh")

N, H, D, T = 64, 2, 64, 24
ONES = torch.ones(N, N)
NPU, HOST = {"target": "ascend910_93"}, {"target": "host", "lower": "eager"}
FIA = "npu::npu_fused_infer_attention_score_v2"


def changed(x: Tensor, number: float, *place: int) -> Tensor:
    x = x.clone()
    x[place] = number
    return x


# -- what a tensor holds --


@pytest.mark.parametrize(
    ("held", "band"),
    [
        (ONES.tril(), Band(None, 0, 1.0, 0.0)),
        (ONES.bool().tril(), Band(None, 0, True, False)),
        (ONES.triu(1).to(torch.uint8), Band(1, None, 1, 0)),
        (torch.full((N, N), -math.inf).triu(1), Band(None, 0, 0.0, -math.inf)),
        (torch.full((8, 12), -1e4, dtype=torch.bfloat16).triu(5), Band(None, 4, 0.0, -9984.0)),
        (ONES.tril() - ONES.tril(-16), Band(-15, 0, 1.0, 0.0)),
        (torch.eye(3)[None, None], Band(0, 0, 1.0, 0.0)),
    ],
)
def test_a_band_is_read(held: Tensor, band: Band):
    assert band_of(held) == band


@pytest.mark.parametrize(
    "held",
    [
        ONES,  # a cache that is empty yet
        changed(ONES.tril(), 0, 40, 3),
        changed(ONES.tril(), 2, 40, 3),
        changed(ONES.tril(), math.nan, 40, 3),
        changed(ONES.tril(), math.nan, 0, 0),
        ONES.tril().expand(2, N, N),
        ONES.tril().fliplr(),
        changed(0 * ONES, 1, N - 1, N - 1),
        changed(0 * ONES, 1, N - 1, 5),
        torch.arange(N * N).view(N, N),
        torch.ones(1, N),
        torch.ones(()),
        ONES.tril().to(torch.complex64),
        FakeTensorMode().from_tensor(ONES.tril()),
        ONES.tril().to("meta"),
        ONES.tril().to(torch.float8_e4m3fn),
        None,
    ],
)
def test_what_is_no_band(held: Tensor | None):
    assert band_of(held) is None


def test_writes_to_what_was_made_in_inference_mode_are_not_counted():
    with torch.inference_mode():
        assert band_of(ONES.tril()) is None


# -- spellings --


def masked_where_zero(scores: Tensor, held: Tensor) -> Tensor:
    return scores.masked_fill(held[:, :, :T, :T] == 0, -math.inf)


def masked_where_true(scores: Tensor, held: Tensor) -> Tensor:
    return scores.masked_fill(held.bool()[:T, :T], -torch.inf)


def added(scores: Tensor, held: Tensor) -> Tensor:
    return scores + held[:T, :T]


def chosen(scores: Tensor, held: Tensor) -> Tensor:
    return torch.where(held[:T, :T], scores, torch.finfo(scores.dtype).min)


def multiplied(scores: Tensor, held: Tensor) -> Tensor:
    seen = held[:, :, :T, :T]
    return scores * seen + -1e4 * (1 - seen)


class Attention(nn.Module):
    """Heads of their own mask, which is registered for more positions than are used."""

    def __init__(self, how, held: Tensor) -> None:
        super().__init__()
        self.how = how
        self.qkv = nn.Linear(H * D, 3 * H * D, bias=False)
        self.register_buffer("mask", held, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.view(*x.shape[:2], H, D).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        scores = self.how(q @ k.transpose(-2, -1) * D**-0.5, self.mask)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def of(how, held: Tensor) -> nn.Module:
    torch.manual_seed(0)
    return Attention(how, held.clone()).eval().requires_grad_(False)


FORMS = {
    "zero": (masked_where_zero, ONES.tril()[None, None]),
    "true": (masked_where_true, ONES.triu(1)),
    "added": (added, torch.full((N, N), -math.inf).triu(1)),
    "chosen": (chosen, ONES.bool().tril()),
    "multiplied": (multiplied, ONES.tril()[None, None]),
    "window": (masked_where_zero, (ONES.tril() - ONES.tril(-8))[None, None]),
}


def words(report: fusion.Report) -> list[tuple[int, bool]]:
    """The sparse mode of each attention, and whether it reads a mask of the model's own."""
    calls = [node for part in report.graphs for node in part.graph.nodes if "fused_infer" in str(node.target)]
    return [(each.kwargs.get("sparse_mode", 0), str(each.kwargs.get("atten_mask")).startswith("arg")) for each in calls]


@pytest.mark.rotates(8)
@pytest.mark.parametrize("name", FORMS)
def test_a_mask_in_a_buffer_is_told_in_words(name: str):
    model, x = of(*FORMS[name]).to(torch.bfloat16), numbers(2, T, H * D).to(torch.bfloat16)
    report = fusion.explain(model, x, options=NPU)
    assert report.ops == Counter({FIA: 1}), report.refusals
    ((mode, _),) = words(report)
    assert mode == (4 if name == "window" else 2)
    assert list(report.assumptions) == ["mask"]
    assert "column - row" in report.assumptions["mask"]
    with torch.no_grad():
        exact = model.double()(x.double())
        got = torch.compile(model.to(torch.bfloat16), backend="cann_fusion", options=HOST)(x)
    torch.testing.assert_close(got.double(), exact, atol=0.02, rtol=0.02)


def test_a_hole_in_the_mask_is_seen():
    held = changed(ONES.tril(), 0, 9, 4)[None, None]
    model, x = of(masked_where_zero, held), numbers(2, T, H * D)
    report = fusion.explain(model.to(torch.bfloat16), x.to(torch.bfloat16), options=NPU)
    assert not report.assumptions
    assert [mode for mode, _ in words(report)] == [1]  # the mask as it is
    with torch.no_grad():
        got = torch.compile(model.float(), backend="cann_fusion", options=HOST)(x)
    torch.testing.assert_close(got.double(), model.double()(x.double()).detach(), atol=1e-5, rtol=1e-5)


# -- what may change --


def test_a_buffer_that_changes_is_noticed():
    model, x = of(*FORMS["zero"]), numbers(2, T, H * D)
    compiled = torch.compile(model, backend="cann_fusion", options=HOST)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), atol=1e-5, rtol=1e-5)
        model.mask[..., 5, 2] = 0
        with pytest.warns(UserWarning, match="what the buffer 'mask' held then"):
            torch.testing.assert_close(compiled(x), model(x), atol=1e-5, rtol=1e-5)
        model.mask.copy_(ONES.tril())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.testing.assert_close(compiled(x), model(x), atol=1e-5, rtol=1e-5)


def test_a_mask_that_is_passed_in_is_nothing_known():
    def attention(x: Tensor, mask: Tensor) -> Tensor:
        q = x.view(2, T, H, D).transpose(1, 2)
        return masked_where_zero(q @ q.transpose(-2, -1) * D**-0.5, mask).softmax(-1) @ q

    x = numbers(2, T, H * D).to(torch.bfloat16)
    assert not fusion.explain(attention, x, ONES.tril()[None, None], options=NPU).assumptions


class Closing(nn.Module):
    """A model that hides one more key of its mask at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", ONES.tril()[None, None].clone())

    def forward(self, x: Tensor, row: Tensor) -> Tensor:
        self.mask.index_fill_(3, row, 0.0)
        q = x.view(2, T, H, D).transpose(1, 2)
        return masked_where_zero(q @ q.transpose(-2, -1) * D**-0.5, self.mask).softmax(-1) @ q


def test_a_buffer_that_the_model_writes_to_is_nothing_known():
    x, row = numbers(2, T, H * D), torch.tensor([3])
    assert not fusion.explain(Closing(), x.to(torch.bfloat16), row, options=NPU).assumptions
    model, other = Closing(), Closing()
    compiled = torch.compile(model, backend="cann_fusion", options=HOST)
    with torch.no_grad():
        for place in (3, 1):
            row = torch.tensor([place])
            torch.testing.assert_close(compiled(x, row), other(x, row), atol=1e-5, rtol=1e-5, equal_nan=True)


def test_equal_graphs_of_other_buffers_are_not_confused():
    x = numbers(2, T, H * D)
    for name in ("zero", "window", "zero"):
        model = of(*FORMS[name])
        torch.compiler.reset()
        with torch.no_grad():
            got = torch.compile(model, backend="cann_fusion", options=HOST)(x)
            torch.testing.assert_close(got, model(x), atol=1e-5, rtol=1e-5)


@pytest.mark.rotates(3)
def test_layers_with_masks_of_their_own_in_turn():
    names = ["zero", "window"] * 4
    model, x = nn.Sequential(*(of(*FORMS[name]) for name in names)), numbers(2, T, H * D)
    report = fusion.explain(model.to(torch.bfloat16), x.to(torch.bfloat16), options=NPU)
    assert [mode for mode, _ in words(report)] == [2, 4] * 4
    assert sorted(report.assumptions) == [f"{place}.mask" for place in range(8)]
    with torch.no_grad():
        got = torch.compile(model.float(), backend="cann_fusion", options=HOST)(x)
        torch.testing.assert_close(got, model(x), atol=1e-5, rtol=1e-5)


def one_step(x: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
    q = x.view(2, 1, H, D).transpose(1, 2)
    scores = torch.where(mask[T - 1 : T, :T], q @ keys.transpose(-2, -1), torch.finfo(q.dtype).min)
    return scores.softmax(-1) @ keys


class Step(nn.Module):
    """One query behind a cache, of which it sees a window."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", (ONES.tril() - ONES.tril(-8)).bool())

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        return one_step(x, keys, self.mask)


def test_the_last_query_sees_a_key_of_its_window():
    x, keys = numbers(2, 1, H * D), numbers(2, H, T, D, seed=3)
    report = fusion.explain(Step(), x.to(torch.bfloat16), keys.to(torch.bfloat16), options=NPU)
    assert report.ops == Counter({FIA: 1}), report.refusals
    names = Counter(str(node.target) for part in report.graphs for node in part.graph.nodes)
    assert not names["aten.masked_fill.Scalar"]  # no query is without a key
    with torch.no_grad():
        got = torch.compile(Step(), backend="cann_fusion", options=HOST)(x, keys)
    torch.testing.assert_close(got, Step()(x, keys), atol=1e-5, rtol=1e-5)
