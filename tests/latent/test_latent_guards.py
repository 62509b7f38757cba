"""What prologs of latent attention and products of heads refuse, each for one thing that is otherwise."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusion.graph import Algebra
from fusion.language import Refused
from patterns.cache.stores import Fresh, Pages
from patterns.extras.mla_preprocess import EPSILON, JoinedRows, MlaPreprocess, PreprocessMatch, storage_pages
from patterns.latent.head_projection import HeadProjection
from patterns.latent.prolog.kv_write import KvRmsnormRopeCache
from patterns.latent.prolog.layers import StaticInt8Layers
from patterns.latent.prolog.prolog import Int8QueryPages, MlaProlog, PrologMatch
from patterns.latent.prolog.terms import LatentQueries, LatentRow
from patterns.rotary.orders import HALF, INTERLEAVED, RowOrder

NOTHING = SimpleNamespace(guard=lambda *args: None, guard_order=lambda *args: None)
X = torch.zeros(2, 3, 64)


def older(told: dict[str, Any], index: Any, first: float = 1.0, second: float = 1.0) -> None:
    storage = (
        Fresh() if index is None else SimpleNamespace(index=lambda x: index, prolog_arguments=Fresh().prolog_arguments)
    )
    of = SimpleNamespace(arguments=lambda: told)
    row = SimpleNamespace(widths=(8, 4), factor=second)
    match = PrologMatch(X, of, storage, SimpleNamespace(factor=first), row, None)
    MlaProlog().older(match, "npu_mla_prolog")


def test_the_older_versions_take_less():
    with pytest.raises(Refused, match="it is contiguous"):
        older({}, None)
    with pytest.raises(Refused, match="they are quantised"):
        older({"weight_quant_mode": 1}, torch.zeros(2, 3))
    for factors in ((2.0, 1.0), (1.0, 2.0), (2.0, 2.0)):
        with pytest.raises(Refused, match="it is multiplied by a number"):
            older({}, torch.zeros(2, 3), *factors)


def norms(*eps: float) -> dict[str, Any]:
    first, second, third = (SimpleNamespace(eps=each, guard=NOTHING.guard, result=HALF) for each in eps)
    return dict(norm=first, queries=second, row=third)


def matched(**captures: Any) -> PreprocessMatch:
    return PreprocessMatch(X, tables=None, **captures)


@pytest.mark.parametrize("place", range(3))
def test_every_norm_adds_what_the_kernel_adds(place: int):
    rule, rest = MlaPreprocess(), dict(projection=SimpleNamespace(dkv=None, guard=NOTHING.guard), storage=NOTHING)
    rule.guard(matched(**norms(EPSILON, EPSILON, EPSILON), **rest))
    with pytest.raises(Refused, match=r"a norm adds 0\.5"):
        rule.guard(matched(**norms(*(0.5 if each == place else EPSILON for each in range(3))), **rest))


@pytest.mark.parametrize("block", [None, 16])
@pytest.mark.parametrize("place", [0, 1])
def test_pages_that_lie_otherwise_are_not_written(place: int, block: int | None):
    shape = (4, 2, 8, 16) if block else (4, 8, 32)
    both = [torch.zeros(shape).transpose(0, 1).contiguous().transpose(0, 1) if place == n else torch.zeros(shape)
            for n in range(2)]  # fmt: skip
    with pytest.raises(Refused, match=r"not contiguous|do not lie together"):
        storage_pages(Pages(kv_cache=both[0], kr_cache=both[1], nz_block=block))


def test_rotated_lanes_of_every_head_are_put_in_halves():
    pairs = torch.arange(12).reshape(12, 1)
    dq, dkv = torch.full((1, 1), -1), torch.arange(6).reshape(6, 1)
    down, wide = JoinedRows(RowOrder(4, HALF), 2, INTERLEAVED, INTERLEAVED).joined(dq, dkv, pairs)
    assert down.flatten().tolist() == [0, 1, 2, 4, 3, 5, -1]
    assert wide.flatten().tolist() == [0, 1, 2, 4, 3, 5, 6, 7, 8, 10, 9, 11]
    assert JoinedRows(RowOrder(4, HALF), 2, HALF, INTERLEAVED).joined(dq, dkv, pairs)[1] is pairs
    down, wide = JoinedRows(RowOrder(4, HALF), 2, INTERLEAVED, HALF).joined(dq, dkv, pairs)
    assert down.flatten().tolist() == [0, 1, 2, 3, 4, 5, -1]


def test_rotated_lanes_of_every_head_are_put_in_pairs():
    rows = RowOrder(4, INTERLEAVED)
    assert rows.of(torch.arange(12), HALF, 2).tolist() == [0, 1, 2, 4, 3, 5, 6, 7, 8, 10, 9, 11]
    assert rows.of(torch.arange(6)[:, None], HALF).flatten().tolist() == [0, 1, 2, 4, 3, 5]
    six = RowOrder(6, INTERLEAVED)
    assert six.of(torch.arange(7), HALF).tolist() == [0, 1, 4, 2, 5, 3, 6]
    assert RowOrder(6, HALF).of(torch.arange(7), INTERLEAVED).tolist() == [0, 1, 3, 5, 2, 4, 6]


@pytest.mark.parametrize("name", ["dq_bias", "uq_bias", "dkv_bias"])
def test_biases_are_added_to_whole_numbers(name: str):
    of: dict[str, Any] = dict.fromkeys(("dq_bias", "uq_bias", "dkv_bias"))
    StaticInt8Layers(**of | {name: torch.zeros(1, dtype=torch.int32)}).guard()
    with pytest.raises(Refused, match=r"a layer adds one of torch\.float32"):
        StaticInt8Layers(**of | {name: torch.zeros(1)}).guard()


def test_a_latent_is_read_with_the_scale_that_it_is_written_with():
    a = Algebra()
    scale, other = (a.make("input", (), (name, 0), (1,), torch.float32) for name in ("scale", "other"))
    pages = SimpleNamespace(shape=(4, 16, 32))
    of_number = Int8QueryPages(
        kv_cache=pages, kr_cache=pages, slots=scale, nz_block=None, kr_block=None, kv_scale=None, kv_by=0.5,
        keys=None, keys_by=0.5,
    )  # fmt: skip
    of_number.guard(X, "npu_mla_prolog_v3")
    replace(of_number, kv_scale=scale, keys=scale).guard(X, "npu_mla_prolog_v3")
    for keys in (replace(of_number, keys_by=0.25), replace(of_number, kv_scale=scale, keys=other)):
        with pytest.raises(Refused, match="it is read with another than it is written"):
            keys.guard(X, "npu_mla_prolog_v3")


def test_heads_first_is_for_one_sequence():
    with pytest.raises(Refused, match="there are several sequences"):
        HeadProjection().first(torch.zeros(2, 3, 4, 8), torch.zeros(3, 8, 6), ())


ORDERS = [(HALF, HALF), (HALF, INTERLEAVED), (INTERLEAVED, INTERLEAVED)]


@pytest.mark.parametrize(("source", "result"), ORDERS)
def test_the_operator_of_a_row_rotates_pairs_to_halves(source: str, result: str):
    rule, row = KvRmsnormRopeCache(), SimpleNamespace(source=INTERLEAVED, result=HALF)
    rule.guard(X, row, NOTHING)
    with pytest.raises(Refused, match=f"from {source} to {result} order"):
        rule.guard(X, SimpleNamespace(source=source, result=result), NOTHING)


def test_a_cache_keeps_the_order_that_it_has():
    pages = Pages(kv_cache=None, kr_cache=None, slots=None, nz_block=None)
    pages.guard_order(HALF, "npu_mla_prolog_v3")
    Fresh().guard_order(INTERLEAVED, "npu_mla_prolog_v3")
    with pytest.raises(Refused, match="its lanes are in pairs"):
        pages.guard_order(INTERLEAVED, "npu_mla_prolog_v3")
    rest = dict(projection=SimpleNamespace(dkv=None, guard=NOTHING.guard), storage=pages)
    row = SimpleNamespace(eps=EPSILON, guard=NOTHING.guard, result=INTERLEAVED)
    with pytest.raises(Refused, match="its lanes are in pairs"):
        MlaPreprocess().guard(matched(**norms(EPSILON, EPSILON, EPSILON) | dict(row=row), **rest))


def row_of(**other: Any) -> LatentRow:
    lanes = dict(begin=0, split=512, end=576, source=INTERLEAVED, result=HALF)
    return LatentRow(**dict(gamma=None, eps=1e-6, factor=1.0, dtype=None) | lanes | other)


def test_queries_and_keys_lie_alike():
    lanes = dict(width=192, begin=0, first=128, heads_first=True, source=INTERLEAVED, result=HALF)
    queries = LatentQueries(**lanes, gamma=None, eps=1e-6, up=SimpleNamespace(shape=(4, 128, 512)), dtype=None)
    queries.guard(row_of())
    queries.guard(row_of(source=HALF))
    with pytest.raises(Refused, match="rotated queries are in"):
        queries.guard(row_of(result=INTERLEAVED))


def test_a_row_is_all_that_its_layer_gives():
    layer = SimpleNamespace(shape=(576, 64))
    row_of().guard(layer)
    for lanes in (dict(begin=64, split=576, end=640), dict(end=568), dict(begin=8)):
        with pytest.raises(Refused, match="are not all its lanes"):
            row_of(**lanes).guard(layer)
