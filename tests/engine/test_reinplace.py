"""Writes in place: what is copied back over itself is not copied, and whoever reads the old cache reads it before."""

from __future__ import annotations

import copy
from dataclasses import replace
from operator import getitem
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fusion import operators
from fusion.frontend.library import installed
from fusion.options import Options
from fusion.pipeline import fuse_graph
from fusion.stages.host_reads import read_on_host
from fusion.stages.reinplace import fills_buffer, link_of, puts_back, reinplace
from fusion.testing import capture

from .graphs import Build, fuse, names, numbers

CACHE, ROWS, PLACES = numbers(2, 3, 9, 8), numbers(2, 3, 4, 8, seed=1), torch.tensor([7, 0, 2, 5])
START = torch.tensor(3)
NPU = Options(target="ascend910_93", lower="torchair")


def consecutive(cache: Tensor, rows: Tensor, start: Tensor) -> Tensor:
    cache.index_copy_(2, start + torch.arange(rows.shape[2]), rows)
    return cache


def checked(function, *args, options: Options | None = None, writes: int = 1) -> fx.GraphModule:
    """The fused graph, after results and every input have been compared with those of the plain one."""
    captured = capture(function, args)
    gm = fx.GraphModule(captured.graph, copy.deepcopy(captured.graph.graph))
    fuse(gm, *([options] if options else []), facts=replace(captured.facts, extensible=False))
    calls = [each.clone() for each in captured.inputs], [each.clone() for each in captured.inputs]
    expected, got = captured.graph(*calls[0]), gm(*calls[1])
    for have, want in zip((*got, *calls[1]), (*expected, *calls[0]), strict=True):
        assert torch.equal(have, want)
    in_place = [name for name in names(gm) if name.startswith("npu.") and "_.default" in name]
    assert len(in_place) == writes, gm.graph
    return gm


def copies(gm: fx.GraphModule) -> int:
    return sum("copy" in name or "index_put" in name for name in names(gm))


@pytest.mark.parametrize("options", [None, NPU], ids=["host", "npu"])
def test_a_write_that_is_copied_back_is_in_place(options):
    gm = checked(lambda c, r, s: consecutive(c, r, s) * 2, CACHE, ROWS, START, options=options)
    assert copies(gm) == 0


def test_a_cache_seen_through_a_transpose():
    def form(cache, rows, start):
        consecutive(cache.transpose(1, 2), rows, start)
        return cache * 2

    assert copies(checked(form, CACHE.transpose(1, 2).contiguous(), ROWS, START)) == 0


def test_slots_of_a_paged_cache():
    def form(cache, rows, slots):
        cache.view(-1, 8)[slots] = rows
        return cache * 2

    gm = checked(form, numbers(3, 4, 8), numbers(2, 8, seed=1), torch.tensor([7, 0]))
    assert copies(gm) == 0


def test_two_writes_one_after_the_other():
    def form(cache, rows, start, places):
        consecutive(cache, rows, start)
        between = cache * 3
        cache.index_copy_(2, places, rows)
        return between, cache * 2

    assert copies(checked(form, CACHE, ROWS, START, PLACES, writes=2)) == 0


def test_who_reads_the_old_cache_reads_it_before():
    def form(cache, rows, start):
        old = cache * 3
        return consecutive(cache, rows, start) * 2, old

    assert copies(checked(form, CACHE, ROWS, START)) == 0


def test_a_reader_that_stands_behind_is_put_before():
    captured = capture(lambda c, r, s: (c * 3, consecutive(c, r, s) * 2), (CACHE, ROWS, START))
    graph = captured.graph.graph
    (old,) = [node for node in graph.nodes if node.args[1:] == (3,)]
    list(graph.nodes)[-3].append(old)
    expected = captured.graph(*[each.clone() for each in captured.inputs])
    fuse(captured.graph)
    assert copies(captured.graph) == 0
    got = captured.graph(*[each.clone() for each in captured.inputs])
    assert all(map(torch.equal, got, expected))


def test_an_old_value_that_is_needed_afterwards_keeps_the_copy():
    """What is read depends on the write and on the old cache: no order gives both."""

    def form(cache, rows, start):
        written = cache.index_copy(2, start + torch.arange(rows.shape[2]), rows)
        difference = written - cache
        cache.copy_(written)
        return difference

    gm = checked(form, CACHE, ROWS, START, writes=0)
    assert "aten.copy_.default" in names(gm)


def test_a_result_that_is_another_tensor_of_the_caller_stays_another():
    def form(cache, rows, start):
        written = cache.index_copy(2, start + torch.arange(rows.shape[2]), rows)
        cache.copy_(written)
        return written

    checked(form, CACHE, ROWS, START, writes=0)


def test_rows_that_are_read_from_the_same_cache():
    def form(cache, start):
        cache.index_copy_(2, start + torch.arange(4), cache[:, :, :4])
        return cache * 2

    captured = capture(form, (CACHE, START))
    expected = [each.clone() for each in captured.inputs]
    captured.graph(*expected)
    fuse(captured.graph)
    got = [each.clone() for each in captured.inputs]
    captured.graph(*got)
    assert all(map(torch.equal, got, expected))


def test_a_second_pass_changes_nothing():
    gm = checked(lambda c, r, s: consecutive(c, r, s) * 2, CACHE, ROWS, START)
    before = [node.format_node() for node in gm.graph.nodes]
    assert not fuse(gm).chosen
    assert [node.format_node() for node in gm.graph.nodes] == before


def test_the_contract_speaks_of_inputs():
    from fusion.stages.verify import contract

    captured = capture(lambda c, r, s: consecutive(c, r, s) * 2, (CACHE, ROWS, START))
    before = contract(captured.graph.graph)
    assert len(before.written) == 1
    fuse(captured.graph)
    assert contract(captured.graph.graph) == before


def front(x: Tensor, latents: Tensor, ropes: Tensor, query: Tensor) -> tuple[Tensor, ...]:
    """Two tokens through a kernel that takes memory for its results beside the caches."""
    ones = [x.new_ones(size) for size in (64, 64, 112, 64, 64, 96, 32)]
    lines = [torch.ones(1, 2, size, 32, dtype=torch.int8) for size in (112, 96)]
    up, slots = x.new_ones(2, 32, 32), torch.tensor([5, 0], dtype=torch.int32)
    query, new_latents, rope, new_ropes = torch.ops.atb.npu_mla_preprocess.functional(
        x, ones[0], ones[1], lines[0], ones[2], ones[3], ones[4], lines[1], ones[5], ones[6],
        x[:, :16].cos(), x[:, :16].sin(), up, latents, ropes, slots, cache_mode="krope_ctkv",
        q_out0=query, kv_cache_out0=latents, q_out1=x.new_empty(2, 2, 16), kv_cache_out1=ropes,
    )  # fmt: skip
    return query * 2, rope * 2, new_latents, new_ropes


def into_memory_of_its_own(x: Tensor, latents: Tensor, ropes: Tensor) -> tuple[Tensor, ...]:
    return into_a_tensor_of_the_caller(x, latents, ropes, x.new_empty(2, 2, 32))


def into_a_tensor_of_the_caller(x: Tensor, latents: Tensor, ropes: Tensor, query: Tensor) -> tuple[Tensor, ...]:
    *found, new_latents, new_ropes = front(x, latents, ropes, query)
    latents.copy_(new_latents)
    ropes.copy_(new_ropes)
    return tuple(found)


def beside_the_old_cache(x: Tensor, latents: Tensor, ropes: Tensor) -> tuple[Tensor, ...]:
    *found, new_latents, new_ropes = front(x, latents, ropes, x.new_empty(2, 2, 32))
    difference = new_latents - latents
    latents.copy_(new_latents)
    ropes.copy_(new_ropes)
    return *found, difference


PAGES = numbers(3, 4, 1, 32, seed=2), numbers(3, 4, 1, 16, seed=3)


@pytest.mark.parametrize(
    ("function", "more", "copied"),
    [
        (into_memory_of_its_own, (), []),
        (into_a_tensor_of_the_caller, (numbers(2, 2, 32, seed=4),), [[2, 2, 32], [3, 4, 1, 32], [3, 4, 1, 16]]),
        (beside_the_old_cache, (), [[3, 4, 1, 32], [3, 4, 1, 16]]),
    ],
)
def test_results_that_a_kernel_takes_memory_for(function, more, copied):
    operators.ensure()
    captured = capture(function, (numbers(2, 64), *PAGES, *more))
    calls = [[each.clone() for each in captured.inputs] for _ in range(2)]
    expected = captured.graph(*calls[0])
    graph = captured.graph.graph
    (call,) = [node for node in graph.nodes if "mla_preprocess" in str(node.target)]
    call.meta["fusion"] = {}
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy.default):
        node.replace_all_uses_with(node.args[1])  # as the pass leaves a write of its own
        graph.erase_node(node)
    assert len(reinplace(graph, "eager")) == (0 if copied else 2)
    captured.graph.recompile()
    clones = [list(node.meta["val"].shape) for node in graph.nodes if "clone" in str(node.target)]
    assert clones == copied
    assert "atb.npu_mla_preprocess.out" in names(captured.graph)
    for have, want in zip((*captured.graph(*calls[1]), *calls[1]), (*expected, *calls[0]), strict=True):
        assert torch.equal(have, want)


# calls made one by one ---------------------------------------------------------------------------------------------

aten = torch.ops.aten
f16, f32, i32 = torch.float16, torch.float32, torch.int32


class Made(Build):
    """Calls as the pass adds them."""

    def fused_call(self, target, *args, **kwargs) -> fx.Node:
        operators.ensure()
        node = self(getattr(torch.ops.npu, target).default, *args, **kwargs)
        node.meta["fusion"] = {}
        return node

    def paged(self, caches, slots) -> fx.Node:
        key, value = self.input(2, 2, 16, dtype=f16), self.input(2, 2, 16, dtype=f16)
        return self.fused_call("npu_scatter_pa_kv_cache_functional", key, value, *caches, slots, cache_mode="Norm")

    def written(self, cache) -> fx.Node:
        first, second, _, width = cache.meta["val"].shape
        rows = self.input(first, second, 1, width)
        return self.fused_call("scatter_update", cache, self.input(first, dtype=torch.int64), rows, -2)

    def called(self, *results) -> list[str]:
        self.graph.output((results,))
        self.graph.lint()
        return [str(node.target) for node in self.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize(
    ("lowering", "fresh", "in_place", "copied"),
    [
        ("eager", True, True, 0), ("eager", False, True, 2), ("torchair", True, False, 0),
        ("inductor", True, True, 0), ("inductor", False, False, 0),
    ],
)  # fmt: skip
def test_a_form_that_a_compiler_does_not_take_is_replaced(lowering, fresh, in_place, copied):
    build = Made()
    slots = build.input(2, dtype=i32)
    caches = [build.input(4, 16, 2, 16, dtype=f16) for _ in range(2)]
    caches = [build(aten.new_empty.default, each, [4, 16, 2, 16]) for each in caches] if fresh else caches
    call = build.paged(caches, slots)
    for number in (0, 1):
        build(getitem, call, number)
    assert reinplace(build.graph, lowering) == ()
    called = [str(node.target) for node in build.graph.nodes if node.op == "call_function"]
    assert ("npu.npu_scatter_pa_kv_cache.default" in called) == in_place
    assert called.count("aten.clone.default") == copied


@pytest.mark.parametrize("other", [None, aten.sum.default])
def test_memory_that_something_else_reads_is_not_written_in_place(other):
    build = Made()
    cache = build(aten.new_empty.default, build.input(2, 3, 9, 8), [2, 3, 9, 8])
    beside = [build(other, cache)] if other else []
    build.written(cache)
    reinplace(build.graph, "eager")
    assert ("npu.scatter_update_.default" in build.called(*beside)) == (other is None)


def test_the_result_of_a_write_is_no_memory_of_its_own():
    build = Made()
    cache = build.input(2, 3, 9, 8)
    made = build.written(build(aten.add_.Tensor, cache, 1))
    assert reinplace(build.graph, "eager") == ()
    assert "npu.scatter_update.default" in build.called(made)


def test_a_cache_that_is_copied_over_itself_stays_as_it_is():
    build = Made()
    cache = build.input(2, 3, 9, 8)
    build(aten.copy_.default, cache, cache)
    assert reinplace(build.graph, "eager") == ()
    assert build.called() == ["aten.copy_.default"]


def test_what_is_copied_back_turned_is_copied():
    build = Made()
    cache = build.input(3, 3, 9, 8)
    build(aten.copy_.default, cache, build.written(build(aten.transpose.int, cache, 0, 1)))
    assert reinplace(build.graph, "eager") == ()
    assert build.called().count("aten.copy_.default") == 1


def test_a_tensor_of_the_caller_that_gets_the_old_cache_gets_it_where_it_did():
    """Put before the write it would be written to before the sum reads it."""
    build = Made()
    cache, other = build.input(2, 3, 9, 8), build.input(2, 3, 9, 8)
    made = build.written(cache)
    total = build(aten.add.Tensor, made, other)
    build(aten.copy_.default, other, cache)
    build(aten.copy_.default, cache, made)
    assert reinplace(build.graph, "eager") == ()
    assert build.called(total).count("aten.copy_.default") == 2


@pytest.mark.parametrize(
    ("steps", "restores"),
    [
        ([(aten.t.default,), (aten.t.default,)], True),
        ([(aten.t.default,)], False),
        ([(aten.view.default, [16])], False),
        ([(aten.slice.Tensor, 0, 1), (aten.slice.Tensor, 0, 1)], False),
        ([(aten.view.dtype, i32)], False),
        ([(aten.clone.default,)], False),
    ],
)
def test_views_restore_a_cache_if_each_element_is_where_it_was(steps, restores):
    build = Build()
    place = value = build.input(4, 4)
    made = []
    for target, *args in steps:
        value = build(target, value, *args)
        made.append(value)
    assert puts_back(place, made) == restores


def test_only_a_new_cache_that_lies_as_the_old_one_is_a_write():
    """What stands beside the caches is none of them, also where it is as large as they are."""
    build = Build()
    operators.ensure()
    target = torch.ops.npu.npu_kv_rmsnorm_rope_cache_v2_functional.default
    inputs = [build.input(4, 4) for each in target._schema.arguments if not each.kwarg_only]
    call = build.graph.call_function(target, tuple(inputs))
    call.meta["fusion"] = {}
    links = []
    for item in range(4):
        result = build.graph.call_function(getitem, (call, item))
        result.meta["val"] = inputs[0].meta["val"]
        links.append(link_of(result, "eager"))
    assert [each is not None for each in links] == [False, False, True, True]
    result.meta["val"] = result.meta["val"].t()
    assert link_of(result, "eager") is None


@pytest.mark.parametrize(
    ("target", "args", "fills"),
    [
        (aten.slice_scatter.default, (1, 0, 9), True),
        (aten.slice_scatter.default, (1, 0, 9, 1), True),
        (aten.slice_scatter.default, (1, 0), False),
        (aten.slice_scatter.default, (1, 2, 9), False),
        (aten.slice_scatter.default, (0, 0, 3), False),
        (aten.index_copy.default, (1, 0, 9), False),
    ],
)
def test_a_buffer_is_filled_if_nothing_of_it_is_left(target, args, fills):
    build = Build()
    dim, start, stop, *_ = (*args, 9)
    buffer, rows = build.input(4, 9), build.input(*((stop - start, 9) if dim == 0 else (4, stop - start)))
    node = build.graph.call_function(target, (buffer, rows, *args))
    assert fills_buffer(node) == fills


def test_a_buffer_that_is_filled_keeps_its_strides():
    build = Build()
    rows = build(aten.t.default, build.input(9, 4))
    assert not fills_buffer(build.graph.call_function(aten.slice_scatter.default, (build.input(4, 9), rows, 1, 0, 9)))


@pytest.mark.parametrize(
    ("lowering", "own", "copies"), [("eager", True, 1), ("eager", False, 0), ("inductor", True, 0)]
)
def test_what_a_call_reads_on_the_host_is_copied_where_the_pass_added_it(lowering, own, copies):
    operators.ensure()
    build = Build()
    q, k, v = (build.input(3, 4, 1, 128, dtype=f16) for _ in range(3))
    lengths = build.input(3, dtype=torch.int64)
    call = build.graph.call_function(
        torch.ops.npu.npu_fused_infer_attention_score_v2.tensor_lengths,
        (q, k, v),
        {"actual_seq_kvlen": lengths},
    )
    call.meta.update({"fusion": {}} if own else {})
    assert read_on_host(build.graph, lowering) == copies


def rows_written(lowering: str, form: Any) -> list[str]:
    """Writes of the fused graph of `form`, planned for `lowering`, which gives what `form` gives."""
    pages, rows = torch.randn(5, 4, 32).half(), torch.randn(3, 32).half()
    slots, x, gain = torch.tensor([7, 1, 0]), torch.randn(4, 64).half(), torch.ones(64).half()
    captured = capture(form, (pages, rows, slots, x, gain))
    options = Options(target="ascend910_93", lower="eager", plan_lower=lowering, plan_cache="off")
    fuse_graph(captured.graph.graph, installed(), options, captured.facts)
    captured.graph.recompile()
    plain = [pages.clone(), rows, slots, x, gain]
    expected = form(*plain)
    ours = [each.clone() if each.shape == pages.shape else each for each in captured.inputs]
    (result,) = captured.graph(*ours)
    torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-2)
    assert any(torch.equal(each, plain[0]) for each in ours if each.shape == pages.shape)
    return [name for name in names(captured.graph) if "index_" in name or name.endswith("copy_.default")]


def test_rows_behind_a_view_of_bits_are_written_in_place_where_calls_are_launched():
    def step(pages, rows, slots, x, gain):
        pages.view(torch.uint8).view(-1, 64)[slots] = rows.view(torch.uint8)
        return torch.nn.functional.rms_norm(x, (64,), gain, 1e-6) + pages.sum()

    assert rows_written("eager", step) == ["aten.index_put_.default"]
    assert rows_written("npugraph_ex", step) == ["aten.index_put_.default"]
    assert rows_written("torchair", step) == ["aten.index_put.default", "aten.copy_.default"]


def test_rows_stay_functional_where_the_old_ones_are_read_behind():
    def later(pages, rows, slots, x, gain):
        new = pages.view(torch.uint8).view(-1, 64).index_put((slots,), rows.view(torch.uint8))
        normed = torch.nn.functional.rms_norm(x, (64,), gain, 1e-6) + pages.sum() * new[0, 0].half() * 1e-3
        pages.copy_(new.view(5, 4, 64).view(torch.float16))
        return normed

    assert rows_written("eager", later) == ["aten.index_put.default", "aten.copy_.default"]
