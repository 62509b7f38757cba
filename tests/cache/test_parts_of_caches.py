"""Keys and values of one tensor, and layers of one cache: a write into a part is in place, nothing else is copied."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusion.options import Options
from fusion.testing import capture, trial_of
from tests.engine.graphs import names, numbers

pytestmark = pytest.mark.rotates(8)

NPU = Options(target="ascend910_93")
BLOCKS, SIZE, N, D = 6, 4, 2, 8
SLOTS = torch.tensor([3, 17, 9, -1, 20])
PLACES = torch.tensor([4, 6, 5])


def step(write: Callable[..., None]) -> Callable[..., Tensor]:
    def form(cache: Tensor, keys: Tensor, values: Tensor, places: Tensor) -> Tensor:
        write(cache, keys, values, places)
        return cache * 2

    return form


def unbound(cache, keys, values, slots):
    key_cache, value_cache = cache.unbind(0)
    key_cache.view(-1, N, D)[slots] = keys
    value_cache.view(-1, N, D)[slots] = values


def copied_to_slots(cache, keys, values, slots):
    for part, rows in zip(cache, (keys, values), strict=True):
        part.flatten(0, 1).index_copy_(0, slots % (BLOCKS * SIZE), rows)


def places_of_pages(cache, keys, values, slots):
    cache[0][slots // SIZE, slots % SIZE] = keys
    cache[1, slots // SIZE, slots % SIZE] = values


def sliced_pages(cache, keys, values, slots):
    cache[1:2].view(-1, N, D)[slots] = values
    cache[:1].view(-1, N, D)[slots] = keys


def beside_in_a_page(cache, keys, values, slots):
    cache[:, 0][slots // SIZE, slots % SIZE] = keys
    cache[slots // SIZE, 1, slots % SIZE] = values


def unbound_in_a_page(cache, keys, values, slots):
    key_cache, value_cache = cache.unbind(1)
    place = slots // SIZE, slots % SIZE
    key_cache.index_put_(place, keys)
    value_cache.index_put_(place, values)


PAGED = {
    (2, BLOCKS, SIZE, N, D): (unbound, copied_to_slots, places_of_pages, sliced_pages),
    (BLOCKS, 2, SIZE, N, D): (beside_in_a_page, unbound_in_a_page),
}


def of_a_layer(cache, keys, values, places):
    cache[1, 0][:, :, places] = keys
    cache[1, 1][:, :, places] = values


def of_a_layer_at_once(cache, keys, values, places):
    cache[1, 0, :, :, places] = keys
    cache[1, 1, :, :, places] = values


def of_two_layers(cache, keys, values, places):
    for layer in (0, 2):
        key_cache, value_cache = cache[layer]
        key_cache.index_copy_(2, places, keys)
        value_cache.index_copy_(2, places, values)


def from_a_place(cache, keys, values, places):
    cache[2, 1, :, :, 7:10] = values


def from_a_number(cache, keys, values, places):
    cache[1, 0].index_copy_(2, places[0] + torch.arange(3), keys)


LAYERED = (of_a_layer, of_a_layer_at_once, of_two_layers, from_a_place, from_a_number)
CASES = [
    *((form, (shape, (5, N, D)), SLOTS) for shape, forms in PAGED.items() for form in forms),
    *((form, ((3, 2, 4, N, 12, D), (4, N, 3, D)), PLACES) for form in LAYERED),
]


@pytest.mark.parametrize("options", [Options(target="host", lower="eager"), NPU], ids=["host", "npu"])
@pytest.mark.parametrize(("write", "shapes", "places"), CASES, ids=[form.__name__ for form, *_ in CASES])
def test_a_part_is_written_in_place(write, shapes, places, options):
    calls = fused(step(write), inputs(*shapes, places), options)
    assert sum("scatter" in name for name in calls) == calls.count("npu.npu_scatter_nd_update_.default")
    assert not any("copy" in name or "index_put" in name for name in calls)


def inputs(cache, rows, places) -> list[Tensor]:
    return [numbers(*cache), numbers(*rows, seed=1), numbers(*rows, seed=2), places]


def fused(form: Callable[..., Any], given: list[Tensor], options: Options = NPU, **how: Any) -> list[str]:
    """The calls of the fused graph, after its results and caches have been compared with those of the plain one."""
    trial = trial_of(capture(form, given, **how), options)
    ours = trial.inputs()
    plain = copy.deepcopy(trial.captured.inputs)
    expected, got = trial.captured.graph(*plain), trial.fused(*ours)
    for have, want in zip((*got, *ours), (*expected, *plain), strict=False):
        assert have == want if isinstance(want, int) else torch.equal(have, want)
    assert not trial.outcome.failures
    return names(trial.fused)


# what reads it -----------------------------------------------------------------------------------------------------


def between(cache, keys, values, slots):
    """Each read stands before or behind a write."""
    first = cache[1].sum(1)
    cache[0].view(-1, N, D)[slots] = keys
    second = cache[0] * 2
    cache[1].view(-1, N, D)[slots] = values
    cache[0].view(-1, N, D)[slots.flip(0)] = values
    return first, second, cache[0] * 3


def from_the_other(cache, keys, values, slots):
    """What is put into one part is the other after a write."""
    cache[0] = cache[1].view(-1, N, D).index_copy(0, slots % (BLOCKS * SIZE), keys).view(BLOCKS, SIZE, N, D)
    return cache * 2


def of_turned_pages(cache, keys, values, slots):
    cache.transpose(0, 1)[:, 0][slots // SIZE, slots % SIZE] = keys
    return cache * 2


def of_wide_parts(cache, keys, values, slots):
    """Two of three parts at once."""
    cache[1:3].view(-1, N, D)[slots] = keys
    return cache * 2


def of_some_sequences(cache, keys, values, places):
    """Fewer sequences than the part has."""
    cache[1, 0][:2].index_copy_(2, places, keys[:2])
    return cache * 2


def of_joined_places(cache, keys, values, slots):
    """Places in two of the three parts that a page has."""
    cache[:, :2].view(BLOCKS, 2 * SIZE, N, D)[slots // SIZE, slots % (2 * SIZE)] = keys
    return cache * 2


def of_a_copy(cache, keys, values, slots):
    """A copy of a part of each page, in rows, which is put back."""
    rows = cache[:, 1].reshape(-1, N, D).index_copy(0, slots % (BLOCKS * SIZE), keys)
    cache[:, 1] = rows.view(BLOCKS, SIZE, N, D)
    return cache * 2


def of_pages_in_turn(cache, keys, values, slots):
    """Neighbours of the pages that stand beside others."""
    cache[:, 1].index_copy_(0, slots[0] + torch.arange(2), keys[:4].view(2, 2, N, D).repeat(1, 2, 1, 1))
    return cache * 2


def of_known_pages(cache, keys, values, slots):
    cache[1][2:4] = keys[:4].view(2, 2, N, D).repeat(1, 2, 1, 1)
    return cache * 2


def of_layers_in_turn(cache, keys, values, places):
    """Sequences of the parts that stand beside others."""
    cache[:, 1].index_copy_(3, places, keys.expand(3, -1, -1, -1, -1))
    return cache * 2


def of_every_second_place(cache, keys, values, places):
    cache[1, 0][:, :, 1:6:2] = keys
    return cache * 2


def of_rows_between_parts(cache, keys, values, slots):
    """Rows of which one begins in the part before, and the last ends behind it."""
    cache[1:3].view(-1, 32)[slots % 3] = keys.view(5, -1).repeat(1, 2)
    return cache * 2


PAGES, LAYERS = ((2, BLOCKS, SIZE, N, D), (5, N, D), SLOTS), ((3, 2, 4, N, 12, D), (4, N, 3, D), PLACES)
BESIDE = ((BLOCKS, 2, SIZE, N, D), *PAGES[1:])


@pytest.mark.parametrize(
    ("form", "given"),
    [
        (between, PAGES), (from_the_other, PAGES), (of_turned_pages, PAGES), (of_some_sequences, LAYERS),
        (of_wide_parts, ((3, *PAGES[0][1:]), *PAGES[1:])), (of_joined_places, ((BLOCKS, 3, SIZE, N, D), *PAGES[1:])),
        (of_a_copy, BESIDE), (of_pages_in_turn, BESIDE), (of_known_pages, PAGES), (of_layers_in_turn, LAYERS),
        (of_every_second_place, LAYERS),
        (of_rows_between_parts, ((4, 3, 2, D), *PAGES[1:])), (of_rows_between_parts, ((3, 3, 2, D), *PAGES[1:])),
    ],
)  # fmt: skip
def test_what_else_reads_or_writes_a_part_gets_what_it_did(form, given):
    fused(form, inputs(*given))


@pytest.mark.parametrize("axis", [0, 1])
def test_parts_of_a_size_that_changes_are_left_as_they_are(axis):
    """How many rows stand before a part is a number alone."""
    cache, *given = inputs(*(PAGES if axis else BESIDE))
    torch._dynamo.mark_dynamic(cache, axis)

    def form(cache, keys, values, slots):
        cache.select(1 - axis, 1)[slots // SIZE, slots % SIZE] = keys
        return cache * 2

    fused(form, [cache, *given], dynamic=None)


def test_pages_of_one_tensor_are_attended_to_as_they_lie():
    """Slots and a block table: the write and the attention of a step, beside views alone."""
    table, lengths = torch.tensor([[2, 0], [5, 3]]), torch.tensor([17, 30])
    slots = torch.tensor([2 * 16 + 17 - 16, 3 * 16 + 13])
    cache = numbers(2, 7, 16, 2, 128, dtype=torch.bfloat16)

    def form(q, keys, values, cache, slots, table, lengths):
        key_cache, value_cache = cache.unbind(0)
        key_cache.view(-1, 2, 128)[slots] = keys
        value_cache.view(-1, 2, 128)[slots] = values
        k, v = (each[table].flatten(1, 2).transpose(1, 2) for each in (key_cache, value_cache))
        seen = torch.arange(k.shape[2]) < lengths[:, None, None, None]
        return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)

    q = numbers(2, 8, 1, 128, dtype=torch.bfloat16)
    rows = [numbers(2, 2, 128, seed=seed, dtype=torch.bfloat16) for seed in (3, 4)]
    trial = trial_of(capture(form, [q, *rows, cache, slots, table, lengths]), NPU)
    calls = names(trial.fused)
    assert calls.count("npu.npu_scatter_nd_update_.default") == 2
    assert sum(name.startswith("npu.npu_fused_infer_attention_score_v2") for name in calls) == 1
    assert not any(name.startswith(("aten.index", "aten.copy", "aten.clone", "aten.select_scatter")) for name in calls)
    ours, plain = trial.inputs(), [each.clone() for each in trial.captured.inputs]
    (expected,), (got,) = trial.captured.graph(*plain), trial.fused(*ours)
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
    assert all(map(torch.equal, ours, plain))
