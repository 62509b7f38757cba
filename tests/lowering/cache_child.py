"""Runs in a child process behind the stubs: caches written by a step compiled for npugraph_ex and for torchair."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch_npu  # noqa: F401  (registers the operators)
from torch import Tensor, fx

from fusion.operators import ensure
from fusion.routes import vendor
from tests.support import acl, ge

SHAPES = {
    "cache": (2, 2, 16, 8), "rows": (2, 2, 3, 8), "keys": (5, 4, 2, 8), "key": (3, 2, 8),
    "pair": (2, 5, 4, 2, 8), "layers": (3, 2, 2, 2, 16, 8),
    "latents": (2, 16, 512), "ropes": (2, 16, 64), "lines": (2, 3, 576), "gain": (512,), "angle": (2, 3, 64),
}  # fmt: skip
CACHES = ("cache", "keys", "keys", "latents", "ropes", "pair", "layers")
NEAR = 2**-9  # two roundings of half


def step(
    cache: Tensor, keys: Tensor, values: Tensor, latents: Tensor, ropes: Tensor, pair: Tensor, layers: Tensor,
    rows: Tensor, key: Tensor, value: Tensor, lines: Tensor, gain: Tensor, cos: Tensor, sin: Tensor, start: Tensor,
    slots: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """One cache written from a position on, or a layer of one; pages by slots; and a latent line in two caches."""
    latent, rope = (each.float() for each in lines.split((512, 64), dim=-1))
    latent = latent * torch.rsqrt(latent.square().mean(-1, keepdim=True) + 1e-6) * gain.float()
    (even, odd), cos, sin = (rope[..., ::2], rope[..., 1::2]), cos.float(), sin.float()
    rope = torch.cat((even, odd), dim=-1) * cos + torch.cat((-odd, even), dim=-1) * sin
    latents.index_copy_(1, start + torch.arange(3), latent.half())
    ropes.index_copy_(1, start + torch.arange(3), rope.half())
    cache.index_copy_(2, start + torch.arange(rows.shape[2]), rows)
    keys.view(-1, 2, 8)[slots] = key
    values.view(-1, 2, 8)[slots] = value
    pair[0].view(-1, 2, 8)[slots] = key
    pair[1].view(-1, 2, 8)[slots] = value
    layers[1, 0].index_copy_(2, start + torch.arange(3), rows)
    more = pair[0] * 2, layers[1] * 2
    return cache.sum(-1), keys.sum(-1), values.sum(-1), latents * 2, ropes * 2, *more


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    names = (*CACHES, "rows", "key", "key", "lines", "gain", "angle", "angle")
    tensors = [torch.randn(*SHAPES[name], generator=generator).half() for name in names]
    return [*tensors, torch.tensor(5), torch.tensor([7, -1, 0])]


def through(**options: Any) -> dict[str, bool]:
    """Whether results and caches of the compiled step are eager's, and the caches where they were."""
    compiled = torch.compile(step, backend="cann_fusion", options={"target": "ascend910_93", **options}, dynamic=False)
    plain, ours = inputs(), inputs()
    count = len(CACHES)
    places = [each.data_ptr() for each in ours[:count]]
    with torch.no_grad():
        expected, got = step(*plain), compiled(*ours)
    return {
        "results": all(map(near, got, expected)),
        "caches": all(map(near, ours[:count], plain[:count])),
        "in_place": [each.data_ptr() for each in ours[:count]] == places,
    }


def near(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=NEAR, atol=NEAR)


def npugraph_ex() -> None:
    """Print, as one line of JSON, also the operators that npugraph_ex runs."""
    final: list[fx.GraphModule] = []
    inner = vendor.npugraph_ex

    def forced(gm: fx.GraphModule, values: Any, **_: Any) -> Any:
        final.append(gm)
        return inner(gm, values, options={"force_eager": True})

    vendor.npugraph_ex = forced
    told = through(lower="npugraph_ex", plan_lower="npugraph_ex")
    operators = [str(node.target) for gm in final for node in gm.graph.nodes if node.op == "call_function"]
    print(json.dumps(told | {"operators": operators}))


def called_by_the_model() -> None:
    """Print, as one line of JSON, what npugraph_ex runs of a model that calls an operator of torch_npu."""

    def step(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> Tensor:
        torch.ops.npu.npu_scatter_pa_kv_cache(key, value, keys, values, slots, cache_mode="Norm")
        return keys.sum() + values.sum()

    def given() -> list[Tensor]:
        caches = [torch.zeros(5, 4, 2, 8).half() for _ in range(2)]
        rows = [torch.full((3, 2, 8), number).half() for number in (1.0, 2.0)]
        return [*caches, *rows, torch.tensor([7, 1, 0], dtype=torch.int32)]

    ensure()
    acl.install()
    inner = vendor.npugraph_ex
    vendor.npugraph_ex = lambda gm, values, **_: inner(gm, values, options={"force_eager": True})
    options = {"target": "ascend910_93", "lower": "npugraph_ex"}
    inputs = given()
    with torch.no_grad():
        result = torch.compile(step, backend="cann_fusion", options=options)(*inputs)
    (graph,) = acl.optimized()
    operators = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    written = [each.sum().item() for each in inputs[:2]]
    print(json.dumps({"operators": operators, "written": written, "result": result.item()}))


def torchair() -> None:
    """Print, as one line of JSON, also the GE operators after torchair's own passes."""
    ge.install()
    told = through(lower="torchair")
    print(json.dumps(told | {"operators": [name for graph in ge.converted() for name in graph.after]}))
