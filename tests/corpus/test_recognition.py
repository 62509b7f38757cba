"""Every spelling becomes the operators that it should at every level; no look-alike becomes what it must not."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from fusion import testing
from fusion.options import Options
from fusion.report.trace import emitted
from fusion.testing import DTYPES, LEVELS, Level, Trial, capture, trial_of

from .base import LookAlike, Spelling
from .entries import LOOKALIKES, SPELLINGS
from .test_corpus import SHAPES

pytestmark = pytest.mark.rotates(48)

HOST = Options(target="host", lower="eager")
LAWS = (
    testing.means_what_it_says, testing.emits_valid_calls, testing.idempotent, testing.saves_what_it_claims,
    testing.leaves_the_rest_alone,
)  # fmt: skip

F16 = (torch.float16,)
# Not recognised: entry -> the dtypes in which that may be (all, if there are none given), and why.
MISSED: dict[str, tuple[tuple[torch.dtype, ...], str]] = {
    "rope_half/partial_one_cat": ((), "two partial rotations of one cat each are not paired: two calls, not one"),
    **dict.fromkeys(
        [f"rope_half/{name}" for name in ("computed_in_float", "four_products_in_float", "complex_halves",
                                          "complex_tables_in_graph", "cast_in_parts")],
        (F16, "float16 is rotated in float32, whose results the operator does not give"),
    ),
    **dict.fromkeys(
        [f"rope_interleaved/{name}" for name in ("llama_reference", "deepseek_reference", "complex_heads_first",
                                                 "alone_one_head")],
        ((torch.float32,), "the calls that the operator takes for interleaved lanes cost as much as they save"),
    ),
    **dict.fromkeys(
        [f"dynamic_quant/{name}" for name in ("smooth_quant", "least_scale", "in_model_dtype", "magnitudes_of_both",
                                              "smallest_and_largest_around_zero", "zero_points_of_zeros")],
        (F16, "rows of float16 may lie below the bound of the scales"),
    ),
    **dict.fromkeys(
        [f"weight_only_linear/{name}" for name in ("WeightOnlyInt8Linear", "columns_behind", "flat_rows",
                                                   "scaled_twice", "PlainInt8")],
        (F16, "the weight times its scale is float32 in the model, float16 in the operator"),
    ),
    "encoded_norm/unrounded_sum": (F16, "the sum of the addends is float32 in the model, float16 in the operator"),
    "quant_matmul/by_einsum": ((torch.float32,), "a single row is a product of int8 weights alone"),
    "add_rms_norm/used_by_the_next_add": ((torch.bfloat16, torch.float16), "decomposed, its cast is a result too"),
    "expert_routing/plain_unsorted": ((torch.bfloat16, torch.float16), "a whole softmax to float32, topk unsorted"),
}  # fmt: skip
Setting = tuple[Any, Level, torch.dtype, tuple[int, int]]


def covering(entries: tuple[Any, ...]) -> Iterator[Setting]:
    """Two settings of each entry; over all entries, every two values of (level, dtype, shape) occur together."""
    for number, entry in enumerate(entries):
        for position in (number, number + 1):
            level = LEVELS[position % len(LEVELS)]
            dtype = DTYPES[position // len(LEVELS) % len(DTYPES)]
            yield entry, level, dtype, SHAPES[(position + number // len(SHAPES)) % len(SHAPES)]


def parameters(settings: Iterator[Setting], missing: dict[str, tuple[tuple[torch.dtype, ...], str]]) -> list[Any]:
    def one(entry: Any, level: Level, dtype: torch.dtype, shape: tuple[int, int]) -> Any:
        dtypes, reason = missing.get(entry.name, ((), ""))
        missed = bool(reason) and (not dtypes or dtype in dtypes)
        marks = [pytest.mark.xfail(strict=not dtypes, reason=reason)] if missed else []
        name = f"{entry.name}-{level}-{str(dtype).removeprefix('torch.')}-B{shape[0]}S{shape[1]}"
        return pytest.param(entry, level, dtype, shape, id=name, marks=marks)

    return [one(*setting) for setting in settings]


def fused(entry: Spelling | LookAlike, level: Level, dtype: torch.dtype, shape: tuple[int, int]) -> Trial:
    form, args = entry.make(dtype, *shape)
    return trial_of(capture(form, args, level), HOST)


def operators(t: Trial) -> Counter[str]:
    return Counter(name for name in map(emitted, t.fused.graph.nodes) if name)


def check_spelling(spelling: Spelling, level: Level, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    t = fused(spelling, level, dtype, shape)
    assert dict(operators(t)) in spelling.expected(dtype), "\n".join(map(str, t.outcome.refusals))
    for law in LAWS:
        law(t)


@pytest.mark.rotates
@pytest.mark.parametrize(
    ("spelling", "level", "dtype", "shape"), parameters(product(SPELLINGS, LEVELS, DTYPES, SHAPES), MISSED)
)
def test_spelling_is_recognised(spelling, level, dtype, shape):
    check_spelling(spelling, level, dtype, shape)


@pytest.mark.parametrize(
    ("look_alike", "level", "dtype", "shape"),
    parameters(
        (
            (entry, level, DTYPES[(number + position) % len(DTYPES)], (2, 3))
            for number, entry in enumerate(LOOKALIKES)
            for position, level in enumerate(LEVELS)
        ),
        {},
    ),
)
def test_look_alike_is_refused_with_its_reason(look_alike, level, dtype, shape):
    t = fused(look_alike, level, dtype, shape)
    assert not set(look_alike.forbid) & set(operators(t))
    reasons = [each.reason for each in t.outcome.refusals]
    assert not look_alike.reason or any(re.search(look_alike.reason, each, re.IGNORECASE) for each in reasons), reasons
    assert all(re.search(r"tests/\w+/\w+\.py:\d+$", each.where) for each in t.outcome.refusals)
    for law in LAWS:
        law(t)


@pytest.mark.rotates
@pytest.mark.parametrize(("look_alike", "level", "dtype", "shape"), parameters(covering(LOOKALIKES), {}))
def test_look_alike_keeps_its_numbers(look_alike, level, dtype, shape):
    testing.means_what_it_says(fused(look_alike, level, dtype, shape))


def test_settings_cover_every_pair():
    seen = [rest for _, *rest in covering(LOOKALIKES)]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        values = [sorted({str(each[axis]) for each in seen}) for axis in (first, second)]
        assert {(str(each[first]), str(each[second])) for each in seen} == set(product(*values))
        assert [len(each) for each in values] == [(3, 3, len(SHAPES))[axis] for axis in (first, second)]
