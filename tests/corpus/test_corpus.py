"""The corpus means what it says: spellings equal their family's formula, look-alikes do not."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from .base import LookAlike, Spelling
from .entries import LOOKALIKES, SPELLINGS

pytestmark = pytest.mark.rotates(12)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = ((2, 3), (1, 1), (4, 1), (1, 7))
# Several roundings to the dtype; the statistics of some spellings are in the dtype, too.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}
WIDER = {
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
MINIMUM = {
    "rms_norm": 18,
    "layer_norm": 8,
    "add_rms_norm": 8,
    "add_layer_norm": 8,
    "encoded_norm": 8,
    "rope_half": 13,
    "rope_interleaved": 11,
    "rope_interleaved_to_half": 5,
    "swiglu": 6,
    "swiglu_projections": 8,
    "geglu": 8,
    "expert_routing": 8,
    "clipped_swiglu": 7,
    "clipped_swiglu_projections": 4,
    "expert_gating": 12,
    "cache_write": 20,
    "dynamic_quant": 10,
    "quant_matmul": 8,
    "weight_only_linear": 14,
}

every_spelling = pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda s: s.name)
every_entry = pytest.mark.parametrize("entry", SPELLINGS + LOOKALIKES, ids=lambda e: e.name)
every_different = pytest.mark.parametrize(
    "look_alike", [e for e in LOOKALIKES if e.reference is not None], ids=lambda e: e.name
)


class Widened(TorchDispatchMode):
    """Computes every cast to a floating dtype in float64, so that only the algebra is left to compare."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        def widen(value):
            return WIDER.get(value, value) if isinstance(value, torch.dtype) else value

        return func(*tree_map(widen, args), **tree_map(widen, kwargs or {}))


def outputs(entry: Spelling | LookAlike, dtype: torch.dtype, B: int, S: int) -> list[Tensor]:
    form, args = entry.make(dtype, B, S)
    with torch.no_grad():
        return tree_flatten(form(*args))[0]


def distance(actual: list[Tensor], expected: tuple[Tensor, ...]) -> float:
    """The largest rms error of an output, relative to the rms of what is expected."""
    assert [a.shape for a in actual] == [e.shape for e in expected]
    errors = [(a.double() - e).norm() / e.norm() for a, e in zip(actual, expected, strict=True)]
    return max(float(e) for e in errors)


def test_names_are_unique_and_begin_with_the_family():
    names = [e.name for e in SPELLINGS + LOOKALIKES]
    assert len(set(names)) == len(names)
    assert all(e.name.startswith(f"{e.family}/") for e in SPELLINGS + LOOKALIKES)


def test_every_family_is_covered():
    counts = Counter(s.family for s in SPELLINGS)
    assert set(counts) == set(MINIMUM)
    assert all(counts[family] >= n for family, n in MINIMUM.items())
    assert len(LOOKALIKES) >= 25
    assert {e.family for e in LOOKALIKES} == set(MINIMUM)


def test_every_look_alike_states_a_reason_or_says_what_is_right():
    assert all(re.compile(e.reason) and (e.reason or e.note) for e in LOOKALIKES)


@every_entry
def test_make_is_deterministic(entry):
    (_, first), (_, second) = entry.make(torch.bfloat16, 2, 3), entry.make(torch.bfloat16, 2, 3)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@every_spelling
def test_spelling_is_its_formula(spelling):
    for shape in SHAPES:
        with Widened():
            actual = outputs(spelling, torch.float64, *shape)
        assert distance(actual, spelling.reference(torch.float64, *shape)) < 1e-12


@every_spelling
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_spelling_runs_in_every_dtype_and_shape(spelling, dtype):
    for shape in SHAPES:
        form, args = spelling.make(dtype, *shape)
        before = [a.clone() for a in args]
        with torch.no_grad():
            actual = tree_flatten(form(*args))[0]
        kept = {torch.float32} if spelling.family == "expert_routing" else set()  # in which a router may leave shares
        assert {a.dtype for a in actual} <= {dtype} | kept
        assert distance(actual, spelling.reference(dtype, *shape)) < TOLERANCE[dtype]
        same = all(torch.equal(a, b) for a, b in zip(args, before, strict=True))
        assert same or spelling.writes, "an argument was changed"


@every_different
def test_look_alike_is_not_its_formula(look_alike):
    actual = outputs(look_alike, torch.float32, 2, 3)
    assert distance(actual, look_alike.reference(torch.float32, 2, 3)) > 1e-3


@pytest.mark.parametrize("entry", LOOKALIKES, ids=lambda e: e.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_look_alike_runs_in_every_dtype_and_shape(entry, dtype):
    for shape in SHAPES:
        assert all(torch.isfinite(o).all() for o in outputs(entry, dtype, *shape))


@every_entry
def test_traces_to_one_graph(entry):
    torch._dynamo.reset()
    form, args = entry.make(torch.bfloat16, 2, 3)
    with torch.no_grad():
        compiled = torch.compile(form, backend="aot_eager", fullgraph=True)
        actual = tree_flatten(compiled(*args))[0]
    expected = outputs(entry, torch.bfloat16, 2, 3)
    assert distance(actual, tuple(e.double() for e in expected)) < TOLERANCE[torch.bfloat16]
