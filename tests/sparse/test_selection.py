"""Buffers of listed rows are kept by one opt-in operator; what only resembles that is refused with its reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusion import Example
from fusion.frontend.library import installed
from fusion.options import Options
from fusion.pipeline import Outcome
from fusion.testing import Level, capture, emits_valid_calls, means_what_it_says, trial, trial_of
from tests.examples.selection import (
    SETTING,
    Model,
    Setting,
    Tables,
    by_table,
    entries_first,
    kept,
    next_free,
    sorted_slots,
    told,
)  # fmt: skip
from tests.support.fused import launches, targets
from tests.support.grids import grid

from . import listed_rows

NAME = "gather_selection_kv_cache"
RULE = next(each for each in installed().rules if each.name == NAME)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
A3 = {"target": "ascend910_93", "lower": "eager", "plan_lower": "eager", "opt_in": {NAME}}


def fused(function: Any, inputs: tuple[Tensor, ...], **options: Any) -> tuple[torch.fx.GraphModule, Outcome, int]:
    t = trial_of(capture(function, inputs, dynamic=options.pop("dynamic", False)), Options(plan_cache="off", **options))
    assert not t.outcome.failures
    return t.fused, t.outcome, launches(t.captured.graph)


def reasons(outcome: Outcome) -> list[str]:
    return [each.reason for each in outcome.refusals if each.rule == NAME]


# spellings ---------------------------------------------------------------------------------------------------------


def any_by_sums(ids: Tensor, held: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    same = ids.unsqueeze(-1) == held.unsqueeze(1)
    return same.sum(-1) > 0, same.int().argmax(-1), same.sum(1) > 0


def any_by_greatest(ids: Tensor, held: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    same = (ids.unsqueeze(-1) == held.unsqueeze(1)).to(torch.uint8)
    return same.amax(-1).bool(), same.argmax(-1), same.amax(1).bool()


def in_int32(ids: Tensor, held: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    same = torch.eq(held[:, None, :], ids[:, :, None].int())
    return torch.any(same, dim=2), torch.argmax(same.float(), dim=2), torch.any(same, dim=1)


def by_topk(used: Tensor) -> Tensor:
    return (~used).int().topk(used.shape[1], dim=-1).indices


def by_sort(used: Tensor) -> Tensor:
    return torch.sort(used.float(), dim=-1, stable=True)[1]


def by_unstable_sort(used: Tensor) -> Tensor:
    return used.int().sort(dim=-1)[1]


def by_descending(used: Tensor) -> Tensor:
    return (~used).int().argsort(dim=-1, descending=True)


def between(found: Tensor, free: Tensor) -> Tensor:
    return free.gather(1, torch.clamp(torch.cumsum((~found).int(), 1) - 1, 0, found.shape[1] - 1))


def by_relu(found: Tensor, free: Tensor) -> Tensor:
    return free.gather(1, torch.relu(torch.logical_not(found).long().cumsum(1) - 1))


def into_rows(buffer: Tensor, at: Tables, found: Tensor, rows: Tensor) -> None:
    flat, slots = buffer.view(-1, buffer.shape[-1]), at[0] * buffer.shape[1] + at[1]
    flat[slots] = torch.where(found[..., None], flat[slots], rows)


def by_copy(buffer: Tensor, at: Tables, found: Tensor, rows: Tensor) -> None:
    flat, slots = buffer.view(-1, buffer.shape[-1]), (at[0] * buffer.shape[1] + at[1]).flatten()
    flat.index_copy_(0, slots, torch.where(found.reshape(-1, 1), flat[slots], rows.flatten(0, 1)))


def missing_first(buffer: Tensor, at: Tables, found: Tensor, rows: Tensor) -> None:
    buffer.index_put_(at, torch.where(~found[..., None], rows, buffer[at]))


def in_place(status: Tensor, new: Tensor, ids: Tensor) -> None:
    status[:, :-1].scatter_(1, new, ids.to(status.dtype))
    status[:, -1].fill_(ids.shape[1])


def length_first(status: Tensor, new: Tensor, ids: Tensor) -> None:
    held = status[:, :-1].scatter(1, new, ids.to(status.dtype))
    status[:, -1:] = ids.shape[1]
    status[:, :-1] = held


SPELLINGS: dict[str, dict[str, Any]] = {
    each.__name__: {part: each}
    for part, several in {
        "compared": (any_by_sums, any_by_greatest, in_int32), "slots": (by_sort,),
        "placed": (between, by_relu), "write": (into_rows, by_copy, missing_first), "tell": (in_place, length_first),
    }.items()
    for each in several
}  # fmt: skip


@pytest.mark.rotates(9)
@pytest.mark.parametrize(("parts", "level", "dtype"), grid(SPELLINGS))
def test_every_spelling_is_one_call(parts: dict[str, Any], level: Level, dtype: torch.dtype):
    t = trial(RULE, Example("", Model(**parts), SETTING), dtype, level, Options(target="host", lower="eager"))
    assert [each.match.rule.name for each in t.outcome.chosen] == [NAME]
    assert not t.outcome.failures
    means_what_it_says(t)
    emits_valid_calls(t)


@pytest.mark.parametrize("slots", [by_topk, by_descending, by_unstable_sort], ids=lambda each: each.__name__)
@pytest.mark.rotates(3)
def test_an_order_that_torch_leaves_open_is_told_by_the_status(slots: Any):
    """Other slots may be free first: the status names the same keys, and every key has the same rows."""
    model, plain, ours = Model(slots=slots), SETTING(torch.float64), SETTING(torch.float64)
    options = {"target": "host", "lower": "eager", "opt_in": {NAME}}
    torch.compiler.reset()
    compiled = torch.compile(model, backend="cann_fusion", fullgraph=True, options=options)
    gm, *_ = fused(model, plain, target="host", lower="eager", opt_in={NAME})
    assert targets(gm, "npu_") == {"custom.npu_gather_selection_kv_cache.in_place": 1}
    with torch.no_grad():
        torch.testing.assert_close(compiled(*ours), model(*plain))
    assert torch.equal(ours[1].sort(-1)[0], plain[1].sort(-1)[0])
    for buffer in (4, 5):
        mine, theirs = (_by_key(each, buffer) for each in (ours, plain))
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def _by_key(inputs: tuple[Tensor, ...], buffer: int) -> dict[tuple[int, int], Tensor]:
    """The list and the key -> a row of a buffer."""
    rows, status, table = inputs[buffer], inputs[1], inputs[2]
    size = rows.shape[1]
    return {
        (line, key): rows[table[line, slot // size], slot % size]
        for line, keys in enumerate(status[:, :-1].tolist())
        for slot, key in enumerate(keys)
    }


# steps -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("int8", [False, True])
def test_steps_leave_buffers_and_status_as_the_model_does(int8: bool):
    """As `torch.compile` runs it, over lists that have entries in common with the ones before."""
    model, setting = Model(rope=not int8), replace(SETTING, held=0, int8=int8)
    options = {"target": "host", "lower": "eager", "opt_in": {NAME}}
    torch.compiler.reset()
    compiled = torch.compile(model, backend="cann_fusion", fullgraph=True, options=options)
    plain, ours, drawn = setting(torch.float64), setting(torch.float64), torch.Generator().manual_seed(2)
    hits = 0
    for _ in range(6):
        before = set(_held(plain[1]))
        moved = plain[0] * 0.7 + torch.randn(plain[0].shape, generator=drawn, dtype=torch.float64)
        for each in (plain, ours):
            each[0].copy_(moved)
        with torch.no_grad():
            torch.testing.assert_close(compiled(*ours), model(*plain))
        assert all(map(torch.equal, ours, plain))
        hits += len(before & set(_held(plain[1])))
    assert 20 < hits < 6 * setting.lists * setting.listed


def _held(status: Tensor) -> list[tuple[int, int]]:
    return [(row, each) for row, line in enumerate(status[:, :-1].tolist()) for each in line if each >= 0]


@pytest.mark.rotates(8)
def test_other_batches_are_the_same_graph():
    def inputs(lists: int) -> tuple[Tensor, ...]:
        return replace(SETTING, lists=lists)(torch.float64)

    options = {"target": "host", "lower": "eager", "opt_in": {NAME}}
    torch.compiler.reset()
    compiled = torch.compile(Model(), backend="cann_fusion", fullgraph=True, dynamic=True, options=options)
    for lists in (3, 5):
        plain, ours = inputs(lists), inputs(lists)
        with torch.no_grad():
            torch.testing.assert_close(compiled(*ours), Model()(*plain))
        assert all(map(torch.equal, ours, plain))


# on a chip ---------------------------------------------------------------------------------------------------------

CHIP = replace(SETTING, lists=2, keys=512, listed=256, size=128, c=512, dr=64, held=100)


def decoded(query: Tensor, query_rope: Tensor, *step: Tensor) -> Tensor:
    """Attention of one token of each list to what its buffer holds then, queries absorbed [L, N, C]."""
    table, rope, kv = step[2], step[4], step[5]
    Model()(*step)
    keys, turned = (each[table].flatten(1, 2)[:, : step[1].shape[1] - 1] for each in (kv, rope))
    scores = torch.einsum("bnc,btc->bnt", query, keys) + torch.einsum("bnd,btd->bnt", query_rope, turned)
    weights = (scores.float() * 192**-0.5).softmax(-1).to(keys.dtype)
    return torch.einsum("bnt,btc->bnc", weights, keys)


def test_attention_reads_the_pages_of_the_buffer():
    queries = (torch.zeros(2, 64, width).bfloat16() for width in (512, 64))
    gm, outcome, before = fused(decoded, (*queries, *CHIP(torch.bfloat16)), **A3)
    found = targets(gm, "npu_")
    assert found.pop("custom.npu_gather_selection_kv_cache.in_place") == 1
    assert found.total() == 1
    (node,) = (each for each in gm.graph.nodes if "npu_fused_infer_attention_score" in str(each.target))
    assert "block_table" in str(dict(node.kwargs))
    assert len(outcome.in_place) == 3
    after = launches(gm)
    assert after <= 5 < before


@pytest.mark.parametrize("setting", [CHIP, replace(CHIP, int8=True, c=656)], ids=["latent", "packed"])
@pytest.mark.rotates(3)
def test_a_step_is_one_call_that_writes_in_place(setting: Setting):
    model = Model(rope=not setting.int8, read=lambda rows, new: rows.float().sum(1))
    gm, outcome, before = fused(model, setting(torch.bfloat16), **A3)
    assert targets(gm, "npu_") == {"custom.npu_gather_selection_kv_cache.in_place": 1}
    assert len(outcome.in_place) == (2 if setting.int8 else 3)
    assert not [node for node in gm.graph.nodes if node.target is torch.ops.aten.copy_.default]
    after = launches(gm)
    without, *_ = fused(model, setting(torch.bfloat16), **{**A3, "opt_in": frozenset()})
    assert after < launches(without) <= before
    assert after <= 5


@pytest.mark.rotates(6)
@pytest.mark.parametrize(
    ("setting", "options", "reason"),
    [
        (
            CHIP,
            {"plan_lower": "torchair", "lower": "torchair"},
            "cannot be lowered by torchair",
        ),
        (CHIP, {"target": "ascend910b"}, "does not exist on ascend910b"),
        (replace(CHIP, c=672), {}, "requires C <= 656"),
        (replace(CHIP, dr=72), {}, "requires Dr <= 64"),
        (replace(CHIP, index=torch.int64), {}, "requires selection_kv_block_status in int32"),
        (replace(CHIP, keys=2304, listed=2304, held=0), {}, "requires K <= 2048"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_the_chip_does_not_take_stays_as_it_is(setting: Setting, options: dict[str, Any], reason: str):
    gm, outcome, _ = fused(Model(), setting(torch.bfloat16), **{**A3, **options})
    assert "custom" not in str(gm.graph)
    assert any(reason in each for each in reasons(outcome))


# look-alikes -------------------------------------------------------------------------------------------------------


def by_another_list(ids: Tensor, held: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    same = (ids + 1).unsqueeze(-1) == held.unsqueeze(1)
    return same.any(-1), same.int().argmax(-1), same.any(1)


def nearly_equal(ids: Tensor, held: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    same = ids.unsqueeze(-1) >= held.unsqueeze(1)
    return same.any(-1), same.int().argmax(-1), same.any(1)


def last_slot(ids: Tensor, held: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    same = ids.unsqueeze(-1) == held.unsqueeze(1)
    return same.any(-1), (~same).int().argmax(-1), same.any(1)


def in_half(ids: Tensor, held: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    same = ids.half().unsqueeze(-1) == held.half().unsqueeze(1)
    return same.any(-1), same.int().argmax(-1), same.any(1)


def used_first(used: Tensor) -> Tensor:
    return (~used).int().argsort(dim=-1, stable=True)


def every_slot(used: Tensor) -> Tensor:
    return torch.arange(used.shape[1]).expand(used.shape)


def by_hits(found: Tensor, free: Tensor) -> Tensor:
    return free.gather(1, (found.cumsum(-1) - 1).clamp(min=0))


def one_behind(found: Tensor, free: Tensor) -> Tensor:
    return free.gather(1, (~found).cumsum(-1).clamp(max=found.shape[1] - 1))


def cut_off(found: Tensor, free: Tensor) -> Tensor:
    return free.gather(1, ((~found).cumsum(-1) - 1).clamp(0, 3))


def swapped(buffer: Tensor, at: Tables, found: Tensor, rows: Tensor) -> None:
    buffer[at] = torch.where(found[..., None], rows, buffer[at])


def moved(buffer: Tensor, at: Tables, found: Tensor, rows: Tensor) -> None:
    buffer[at] = torch.where(found[..., None], buffer[at].flip(1), rows)


def halved(buffer: Tensor, at: Tables, found: Tensor, rows: Tensor) -> None:
    buffer[at] = torch.where(found[..., None], buffer[at], rows * 0.5)


def other_length(status: Tensor, new: Tensor, ids: Tensor) -> None:
    status[:, :-1] = status[:, :-1].scatter(1, new, ids.to(status.dtype))
    status[:, -1] = ids.shape[1] - 1


def by_entries(status: Tensor, new: Tensor, ids: Tensor) -> None:
    status[:, :-1] = ids.to(status.dtype)
    status[:, -1] = ids.shape[1]


def nothing(status: Tensor, new: Tensor, ids: Tensor) -> None:
    pass


def some_missing(scores: Tensor, count: int) -> Tensor:
    best = scores.topk(count, dim=-1)
    return torch.where(best.values > 0, best.indices, 0)


def by_the_first(table: Tensor, numbers: Tensor, size: int) -> Tables:
    if table.shape[1] > 3:  # that of the cache
        return by_table(table, numbers, size)
    return table[0][numbers // size], numbers % size


def other_page(table: Tensor, numbers: Tensor, size: int) -> Tables:
    if table.shape[1] > 3:
        return by_table(table, numbers, size)
    return table.gather(1, numbers // size), (numbers + 1) % size


STATUS = "no list of the step before is compared with"
SLOTS = "rows that are missing from it are written to other slots"
TOLD = "it does not become the list in the order of"
LOOKALIKES: dict[str, tuple[str, dict[str, Any]]] = {
    **{each.__name__: (STATUS, {"compared": each}) for each in (by_another_list, nearly_equal, in_half)},
    "last_slot": (SLOTS, {"compared": last_slot}),
    **{each.__name__: (SLOTS, {"slots": each}) for each in (used_first, every_slot)},
    **{each.__name__: (SLOTS, {"placed": each}) for each in (by_hits, one_behind, cut_off)},
    "swapped": ("", {"write": swapped}),
    "moved": ("rows that are in it already are moved", {"write": moved}),
    "halved": ("", {"write": halved}),
    **{each.__name__: (TOLD, {"tell": each}) for each in (other_length, by_entries, nothing)},
    "some_missing": ("may be no key", {"listed": some_missing}),
    "by_the_first": ("the buffer has none of each list", {"page": by_the_first}),
    "other_page": ("the buffer has none of each list", {"page": other_page}),
}


def without_table(scores: Tensor, status: Tensor, rows: Tensor, full_table: Tensor, cache: Tensor) -> Tensor:
    """A buffer [L, K, C], which no table divides into pages."""
    ids, each = scores.topk(rows.shape[1], dim=-1).indices, torch.arange(len(rows))[:, None]
    found, slot, used = entries_first(ids, status[:, :-1])
    new = torch.where(found, slot, next_free(found, sorted_slots(used)))
    fresh = cache[by_table(full_table, ids, cache.shape[1])]
    rows[each, new] = torch.where(found[..., None], rows[each, new], fresh)
    told(status, new, ids)
    return rows.sum(1)


def without_length(
    scores: Tensor, status: Tensor, rows: Tensor, full_table: Tensor, cache: Tensor, table: Tensor
) -> Tensor:
    """A status [L, K], which has no room for how many keys are held."""
    ids = scores.topk(status.shape[1], dim=-1).indices
    found, slot, used = entries_first(ids, status)
    new = torch.where(found, slot, next_free(found, sorted_slots(used)))
    kept(rows, by_table(table, new, rows.shape[1]), found, cache[by_table(full_table, ids, cache.shape[1])])
    status.copy_(status.scatter(1, new, ids.to(status.dtype)))
    return rows[table].flatten(1, 2)[:, : ids.shape[1]].sum(1)


def told_of(function: Any, *inputs: Tensor, on: bool = True) -> list[str]:
    _, outcome, _ = fused(function, inputs, target="host", lower="eager", opt_in={NAME} if on else set())
    assert not any(each.match.rule.name == NAME for each in outcome.chosen)
    return reasons(outcome)


def test_a_buffer_without_a_table_and_a_status_without_a_length_are_told():
    scores, status, table, full_table, _, rows, _, cache = SETTING(torch.float32)
    buffer = rows[table].flatten(1, 2)[:, :10].clone()
    assert any(
        "the buffer has none of each list" in each
        for each in told_of(without_table, scores, status, buffer, full_table, cache)
    )
    narrow = (scores, status[:, :-1].clone(), rows, full_table, cache, table)
    assert any("it is [.., K] for a list of K" in each for each in told_of(without_length, *narrow))


def test_rows_that_are_gathered_anew_are_told():
    form = listed_rows.gathered
    inputs = listed_rows.batched(listed_rows.SMALL)
    given = tuple(each.float() if each.is_floating_point() else each for each in inputs)
    assert any("listed rows are gathered into fresh memory" in each for each in told_of(form, *given))
    assert not told_of(form, *given, on=False)


def test_an_order_of_free_slots_that_is_read_is_told():
    def step(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        free = []

        def slots(used: Tensor) -> Tensor:
            free.append(sorted_slots(used))
            return free[0]

        return Model(slots=slots)(*inputs), free[0]

    said = told_of(step, *SETTING(torch.float32))
    assert any("something else than the buffers and the" in each for each in said)


@pytest.mark.rotates(6)
def test_nothing_is_said_of_it_unless_it_is_named():
    for parts in ({}, *(parts for _, parts in LOOKALIKES.values())):
        gm, outcome, _ = fused(Model(**parts), SETTING(torch.float32), target="host", lower="eager")
        assert "gather_selection" not in str(gm.graph)
        assert not reasons(outcome)


@pytest.mark.rotates(12)
@pytest.mark.parametrize("name", LOOKALIKES)
def test_lookalikes_are_refused(name: str):
    reason, parts = LOOKALIKES[name]
    gm, outcome, _ = fused(Model(**parts), SETTING(torch.float32), target="host", lower="eager", opt_in={NAME})
    assert "gather_selection" not in str(gm.graph)
    assert any(reason in each for each in reasons(outcome)) or not reason
