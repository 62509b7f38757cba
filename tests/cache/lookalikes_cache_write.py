"""Writes that resemble rows of a cache being replaced, and must be refused or stay as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.corpus.base import PAGED_WRITE, SCATTER_ND, SCATTER_RUN, Form, LookAlike, look_alike

from .cache_write import FIRST, SIZE, page_pairs, step, token, written

_FUNCTIONAL = ("npu::scatter_update", "npu::npu_scatter_nd_update")
_ALL = (SCATTER_RUN, SCATTER_ND, PAGED_WRITE, *_FUNCTIONAL)


def added(cache, rows, start):
    cache.transpose(0, 2).index_put_((start + torch.arange(rows.shape[2]),), rows.transpose(0, 2), accumulate=True)
    return cache * 2


def index_added(cache, rows, start):
    cache.index_add_(2, start + torch.arange(rows.shape[2]), rows)
    return cache * 2


def masked(cache, rows, start):
    cache[cache > 0] = rows[0, 0, 0, 0]
    return cache * 2


def every_second(cache, rows, start):
    cache[:, :, FIRST : FIRST + 2 * rows.shape[2] : 2] = rows
    return cache * 2


def from_there_on(cache, rows, start):
    cache.copy_(torch.where(torch.arange(cache.shape[2])[:, None] >= start, rows, cache))
    return cache * 2


def all_but_there(cache, rows, start):
    cache.copy_(torch.where(torch.arange(cache.shape[2])[:, None] == start, cache, rows))
    return cache * 2


def whole_rows(cache, rows, start):
    cache.copy_(torch.where(torch.arange(cache.shape[2])[:, None] == start, cache.flip(2), cache))
    return cache * 2


def blended(cache, rows, start):
    here = (torch.arange(cache.shape[2]) == start).to(cache.dtype)[:, None]
    cache.copy_(cache * (1 - here) + rows * here)
    return cache * 2


def a_place_per_head(cache, rows, start):
    places = start + torch.arange(rows.shape[1])[:, None, None] + torch.arange(rows.shape[2])[:, None]
    cache.scatter_(2, places.expand_as(rows), rows)
    return cache * 2


def a_part_of_each_row(cache, rows, start):
    places = (start + torch.arange(rows.shape[2]))[:, None].expand_as(rows[..., :4])
    cache.scatter_(2, places, rows[..., :4])
    return cache * 2


def old_value_needed_after(cache, rows, start):
    new = cache.index_copy(2, start + torch.arange(rows.shape[2]), rows)
    change = new - cache
    cache.copy_(new)
    return change


def another_tensor(cache, rows, start):
    return cache.index_copy(2, start + torch.arange(rows.shape[2]), rows) * 2


def pages_of_unknown_size(keys, values, key, value, slots):
    block, place = slots // SIZE, slots - slots // SIZE * SIZE
    keys[block, place] = key
    values[block, place] = value
    return keys * 2, values * 2


def slots_of_their_own(keys, values, key, value, slots):
    keys.flatten(0, 1)[slots] = key
    values.flatten(0, 1)[(slots + 1) % values[..., 0, 0].numel()] = value
    return keys * 2, values * 2


def _as_written(cache: Tensor, rows: Tensor, start: Tensor) -> Tensor:
    return written(cache, rows)


def _not_write(
    form: Form, reason: str, inputs=step, meaning=_as_written, forbid: tuple[str, ...] = _ALL, note: str = ""
) -> LookAlike:
    return look_alike("cache_write", form, reason, forbid, inputs, meaning, note)


LOOKALIKES = (
    _not_write(added, "they are added to the cache, or chosen by a"),
    _not_write(index_added, "not proven to be distinct|added to what"),
    _not_write(masked, "chosen by a mask|not proven to go"),
    _not_write(every_second, "neighbours", token, None, note="one row at every second position is one row"),
    _not_write(from_there_on, "scatter_update requires torch.arange(T) ==", token),
    _not_write(all_but_there, "scatter_update requires torch.arange(T) ==", token),
    _not_write(whole_rows, "rows for every position", token),
    _not_write(blended, "multiplied by 0", token, None, note="as long as all numbers are finite"),
    _not_write(a_place_per_head, "they are not proven to be distinct along"),
    _not_write(a_part_of_each_row, "they are not proven to be distinct along"),
    _not_write(
        old_value_needed_after,
        "",
        forbid=(SCATTER_RUN, SCATTER_ND),
        note="the old cache is read with the new one: no write in place can give both",
    ),
    _not_write(another_tensor, "", meaning=None, note="a new tensor: the operator would copy the cache as well"),
    _not_write(
        pages_of_unknown_size,
        "",
        page_pairs,
        None,
        (PAGED_WRITE,),
        note="two writes by block and place: that the place lies in its page is not proven",
    ),
    _not_write(
        slots_of_their_own, "", page_pairs, None, (PAGED_WRITE,), note="two writes: keys and values go elsewhere"
    ),
)
