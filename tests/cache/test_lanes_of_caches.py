"""Rows of which each lane group is written by itself: one write in place, whatever the spelling and the order."""

from __future__ import annotations

import pytest
import torch

from fusion.options import Options
from tests.engine.graphs import numbers

from .test_parts_of_caches import fused

pytestmark = pytest.mark.rotates(8)

NPU, HOST = Options(target="ascend910_93"), Options(target="host", lower="eager")
BLOCKS, SIZE, R, D = 6, 4, 16, 8
SLOTS, PLACES = torch.tensor([3, 17, 9, 22, 20]), torch.tensor([4, 6, 5])


def put(cache, latent, rope, slots):
    cache[slots // SIZE, slots % SIZE, :, :R] = latent
    cache[slots // SIZE, slots % SIZE, :, R:] = rope


def rope_first(cache, latent, rope, slots):
    place = slots // SIZE, slots % SIZE
    cache[..., R:].index_put_(place, rope)
    cache[..., :R].index_put_(place, latent)


def parts(cache, latent, rope, slots):
    of_latent, of_rope = cache.split([R, D], dim=-1)
    of_latent[slots // SIZE, slots % SIZE] = latent
    of_rope[slots // SIZE, slots % SIZE] = rope


def rows(cache, latent, rope, slots):
    cache.view(-1, R + D)[slots, :R] = latent.squeeze(1)
    cache.view(-1, R + D)[slots, R:] = rope.squeeze(1)


def copied_rows(cache, latent, rope, slots):
    flat = cache.flatten(0, 2)
    flat.narrow(1, 0, R).index_copy_(0, slots, latent.flatten(1))
    flat.narrow(1, R, D).index_copy_(0, slots, rope.flatten(1))


def scattered_rows(cache, latent, rope, slots):
    flat = cache.view(-1, R + D)
    flat[:, :R].scatter_(0, slots[:, None].expand(-1, R), latent.flatten(1))
    flat[:, R:].scatter_(0, slots[:, None].expand(-1, D), rope.flatten(1))


def three_groups(cache, latent, rope, slots):
    flat = cache.view(-1, 1, R + D)
    flat[slots, :, : R // 2] = latent[..., : R // 2]
    flat[slots, :, R:] = rope
    flat[slots, :, R // 2 : R] = latent[..., R // 2 :]


def positions(cache, latent, rope, places):
    cache[:, places, :R] = latent
    cache[:, places, R:] = rope


def copied_positions(cache, latent, rope, places):
    cache[..., :R].index_copy_(1, places, latent)
    cache[..., R:].index_copy_(1, places, rope)


def consecutive(cache, latent, rope, places):
    cache[..., :R].index_copy_(1, places[0] + torch.arange(3), latent)
    cache[..., R:].index_copy_(1, places[0] + torch.arange(3), rope)


def known(cache, latent, rope, places):
    cache[..., :R][:, 5:8] = latent
    cache[..., R:][:, 5:8] = rope


def of_each_sequence(cache, latent, rope, places):
    cache[torch.arange(2), places[:2], :R] = latent[:, 0]
    cache[torch.arange(2), places[:2], R:] = rope[:, 0]


def two_heads(cache, latent, rope, slots):
    """Lane groups that a number selects."""
    heads = cache.view(BLOCKS, SIZE, 3, D)
    heads[slots // SIZE, slots % SIZE, 0] = latent[:, 0, :D]
    heads[slots // SIZE, slots % SIZE, 1] = latent[:, 0, D:]
    heads[slots // SIZE, slots % SIZE, 2] = rope[:, 0]


PAGED = (put, rope_first, parts, rows, copied_rows, scattered_rows, three_groups, two_heads)
ROWS = (positions, copied_positions, consecutive, known, of_each_sequence)


def given(write):
    paged = write in PAGED
    cache, lead = ((BLOCKS, SIZE, 1, R + D), (5, 1)) if paged else ((2, 12, R + D), (2, 3))
    return [numbers(*cache), numbers(*lead, R, seed=1), numbers(*lead, D, seed=2), SLOTS if paged else PLACES]


@pytest.mark.parametrize("write", [*PAGED, *ROWS], ids=lambda write: write.__name__)
def test_lane_groups_are_one_write_in_place(write):
    def step(cache, latent, rope, at):
        write(cache, latent, rope, at)
        return cache * 2

    calls = fused(step, given(write), NPU)
    assert sum("scatter" in name for name in calls) == 1
    assert any(name.removesuffix(".default").endswith("update_") for name in calls)
    assert not any("copy" in name or "index_put" in name for name in calls)


def test_bytes_of_other_dtypes_are_lane_groups():
    """Packed rows: int8, the bytes of bfloat16 and those of a float32 scale."""

    def step(cache, latent, rope, scale, slots):
        cache[slots, :R] = latent
        cache[slots, R : R + 2 * D] = rope.view(torch.int8)
        cache[slots, R + 2 * D :] = scale.view(torch.int8)
        return cache * 2

    cache, latent = (torch.randint(-128, 128, size, dtype=torch.int8) for size in ((24, R + 2 * D + 4), (5, R)))
    calls = fused(step, [cache, latent, numbers(5, D).bfloat16(), numbers(5, 1), SLOTS], NPU)
    assert [name for name in calls if "scatter" in name] == ["npu.npu_scatter_nd_update_.default"]


def test_what_is_written_between_is_read_between():
    def step(cache, latent, rope, slots):
        cache[slots // SIZE, slots % SIZE, :, :R] = latent
        between = cache.sum(1)
        cache[slots // SIZE, slots % SIZE, :, R:] = rope + between[0, :, :D]
        return between, cache * 2

    fused(step, given(put), NPU)
    fused(step, given(put), HOST)


# what is no write of whole rows ---------------------------------------------------------------------------------------


def other_places(cache, latent, rope, slots):
    cache[slots // SIZE, slots % SIZE, :, :R] = latent
    cache[slots // SIZE, (slots + 1) % SIZE, :, R:] = rope


def other_axis(cache, latent, rope, slots):
    flat = cache.view(-1, R + D)
    flat[slots, :R] = latent.flatten(1)
    flat[5:10, R:] = rope.flatten(1)


def a_gap(cache, latent, rope, slots):
    cache[slots // SIZE, slots % SIZE, :, :D] = latent[..., :D]
    cache[slots // SIZE, slots % SIZE, :, R:] = rope


def overlapping(cache, latent, rope, slots):
    cache[slots // SIZE, slots % SIZE, :, :R] = latent
    cache[slots // SIZE, slots % SIZE, :, R - 2 :] = torch.cat([latent[..., :2], rope], -1)


def rows_of_the_first(cache, latent, rope, slots):
    """The second group takes what the first write left."""
    cache[slots // SIZE, slots % SIZE, :, :R] = latent
    cache[slots // SIZE, slots % SIZE, :, R:] = cache[SIZE - 1, :1, :, :D] * rope


def of_another_buffer(cache, latent, rope, slots):
    """The lanes behind come from a buffer of their own."""
    cache[slots // SIZE, slots % SIZE, :, :R] = latent
    cache[..., R:] = torch.zeros(BLOCKS, SIZE, 1, D).index_put((slots // SIZE, slots % SIZE), rope)


def fewer_positions(cache, latent, rope, places):
    """From one position on, three latents and two rotated keys."""
    cache[..., :R].index_copy_(1, places[0] + torch.arange(3), latent)
    cache[..., R:].index_copy_(1, places[0] + torch.arange(2), rope[:, :2])


def fewer_sequences(cache, latent, rope, places):
    cache[..., :R].index_copy_(1, places[0] + torch.arange(3), latent)
    cache[:1, :, R:].index_copy_(1, places[0] + torch.arange(3), rope[:1])


@pytest.mark.parametrize("write", [fewer_positions, fewer_sequences], ids=lambda write: write.__name__)
def test_groups_of_other_extents_keep_their_numbers(write):
    def step(cache, latent, rope, places):
        write(cache, latent, rope, places)
        return cache * 2

    fused(step, given(positions), NPU)


@pytest.mark.parametrize("options", [HOST, NPU], ids=["host", "npu"])
@pytest.mark.parametrize(
    "write",
    [other_places, other_axis, a_gap, overlapping, rows_of_the_first, of_another_buffer],
    ids=lambda write: write.__name__,
)
def test_other_writes_keep_their_numbers(write, options):
    def step(cache, latent, rope, slots):
        write(cache, latent, rope, slots)
        return cache * 2

    fused(step, given(put), options)
