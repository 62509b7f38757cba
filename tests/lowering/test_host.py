"""Host routes: the same result as eager, in place where eager is in place, whatever the sizes."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from fusion._torch import operators, tracing
from fusion.routes import cpu_gpu
from tests.lowering.models import TABLE, Block, inputs, scaled_silu
from tests.support.capture import Backend, Inner, compiled

needs_compiler = pytest.mark.skipif(not cpu_gpu.has_compiler("cpu"), reason="needs a C++ compiler and Python.h")


def inductor(gm: Any, values: Any) -> Any:
    return cpu_gpu.inductor(gm, values, TABLE)


ROUTES = [pytest.param(cpu_gpu.eager, id="eager"), pytest.param(inductor, id="inductor", marks=needs_compiler)]


@pytest.fixture(scope="module")
def model() -> Block:
    torch.manual_seed(0)
    return Block().eval()


def agrees(run: Any, model: Block, batch: int, length: int, *, dynamic: bool = False) -> None:
    ours, plain = inputs(batch, length), inputs(batch, length)
    if dynamic:
        for tensor, dim in ((ours[0], 0), (ours[0], 1), (ours[1], 0), (ours[2], 0)):
            torch._dynamo.mark_dynamic(tensor, dim)
    address = ours[1].data_ptr()
    torch.testing.assert_close(run(*ours), model(*plain))
    torch.testing.assert_close(ours[1], plain[1])
    assert ours[1].data_ptr() == address


@pytest.mark.rotates(8)
@pytest.mark.parametrize("route", ROUTES)
def test_static_graphs_of_one_process(model: Block, route: Inner):
    run, backend = compiled(model, route)
    with torch.no_grad():
        agrees(run, model, 3, 5)
        agrees(run, model, 5, 4)
        agrees(run, model, 3, 5)
    assert len(backend.graphs) == 2


@pytest.mark.rotates(8)
@pytest.mark.parametrize("route", ROUTES)
def test_one_graph_serves_every_batch_and_length(model: Block, route: Inner):
    run, backend = compiled(model, route, dynamic=None)
    with torch.inference_mode():
        agrees(run, model, 3, 5, dynamic=True)
        agrees(run, model, 5, 7, dynamic=True)
    assert len(backend.graphs) == 1


class Write(torch.nn.Module):
    """Writes rows into a cache [B, N, T, D], and reads a few of them."""

    def forward(self, cache: Tensor, position: Tensor, rows: Tensor) -> Tensor:
        cache.index_copy_(2, position, scaled_silu(rows, 2.0))
        return cache[:, :, :4].sum(2)


@pytest.mark.rotates(8)
@needs_compiler
def test_inductor_inlines_the_table_and_allocates_no_cache():
    cache, rows, position = torch.randn(2, 3, 977, 8), torch.randn(2, 3, 4, 8), torch.arange(4) + 5
    expected = cache.clone().index_copy_(2, position, scaled_silu(rows, 2.0))
    run, _ = compiled(Write(), inductor)
    with torch.no_grad():
        _, (code,) = run_and_get_code(run, cache, position, rows)
    torch.testing.assert_close(cache, expected)
    assert "lowering_test" not in code
    sizes = re.findall(r"empty_strided\w*\(\(([^)]*)\)", code)
    assert sizes
    assert all(math.prod(int(size) for size in shape.split(",") if size.strip()) < cache.numel() for shape in sizes)


@pytest.mark.rotates(8)
@needs_compiler
def test_inductor_leaves_the_graph_as_it_was(model: Block):
    seen: list[str] = []

    def inner(gm: Any, values: Any) -> Any:
        seen.append(str(gm.graph))
        call = inductor(gm, values)
        seen.append(str(gm.graph))
        return call

    run, _ = compiled(model, inner)
    with torch.no_grad():
        run(*inputs(3, 5))
    assert seen[0] == seen[1]


@pytest.mark.rotates(8)
@needs_compiler
def test_an_edited_decomposition_is_not_answered_from_a_cache():
    def twice(factor: float) -> Tensor:
        table = {scaled_silu: lambda x, scale: x * scale * factor}
        run, _ = compiled(lambda x: scaled_silu(x, 1.0), lambda gm, values: cpu_gpu.inductor(gm, values, table))
        with torch.no_grad():
            return run(torch.ones(5))

    torch.testing.assert_close(twice(2.0), torch.full((5,), 2.0))
    torch.testing.assert_close(twice(3.0), torch.full((5,), 3.0))


@pytest.mark.rotates(8)
@needs_compiler
def test_inductor_finds_what_it_compiled_before(model: Block):
    for _ in range(2):
        counters.clear()
        run, _ = compiled(model, inductor)
        with torch.no_grad():
            agrees(run, model, 3, 5)
    assert counters["inductor"]["fxgraph_cache_hit"] == 1
    assert not counters["inductor"]["fxgraph_cache_bypass"]


@pytest.mark.rotates(8)
@needs_compiler
def test_parameters_that_require_gradients_compile_for_inference(model: Block):
    assert all(parameter.requires_grad for parameter in model.parameters())
    run, _ = compiled(model, inductor)
    with torch.no_grad():
        assert not run(*inputs(3, 5)).requires_grad


def test_a_boxed_call_empties_its_list():
    call = tracing.boxed(lambda x, y: x - y)
    values = [5, 3]
    assert call(values) == 2
    assert values == []
    assert call._boxed_call


@pytest.mark.rotates(8)
def test_composites_are_decomposed_again_outside_the_context(model: Block):
    backend = Backend(cpu_gpu.eager)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(*inputs(3, 5))
        whole = {node.target for node in backend.graphs[0].graph.nodes}
        plain = torch.fx.experimental.proxy_tensor.make_fx(model)(*inputs(3, 5))
    assert whole >= set(operators.COMPOSITES)
    assert not {node.target for node in plain.graph.nodes} & set(operators.COMPOSITES)


@pytest.mark.rotates(8)
def test_no_compiler_where_there_is_none(monkeypatch: pytest.MonkeyPatch):
    from torch._inductor import cpp_builder, exc

    def nothing() -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", nothing)
    assert not cpu_gpu.has_compiler("cpu")
