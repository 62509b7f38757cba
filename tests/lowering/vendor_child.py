"""Runs in a child process behind the stubs: a block of fused operators through torchair and npugraph_ex."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch
import torch_npu  # noqa: F401  (registers the operators)
from torch import Tensor, nn
from torch.nn import functional as F

from fusion.routes import vendor
from tests.support import ge
from tests.support.capture import Inner, compiled

npu = torch.ops.npu


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    rstd = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + epsilon)
    return (x.float() * rstd * gamma.float()).to(x.dtype), rstd


def add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    total = x1 + x2
    return (*rms_norm(total, gamma, epsilon), total)


def add_layer_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor, epsilon: float = 1e-5, additional_output: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = x1 + x2
    y, mean, root = torch.native_layer_norm(total, gamma.shape, gamma, beta, epsilon)
    return y, mean, root, total


def gemma_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    return rms_norm(x, 1.0 + gamma.float(), epsilon)


def rotary_mul(x: Tensor, cos: Tensor, sin: Tensor, rotary_mode: str = "half", rotate: Any = None) -> Tensor:
    if rotary_mode == "interleave":
        return x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * sin
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def apply_rotary(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str = "BSH", rotary_mode: str = "half"
) -> tuple[Tensor, Tensor]:
    return rotary_mul(query, cos, sin), rotary_mul(key, cos, sin)


def interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotary_mul(torch.cat([x[..., ::2], x[..., 1::2]], -1), cos, sin)


def swiglu(x: Tensor, dim: int = -1) -> Tensor:
    left, right = x.chunk(2, dim)
    return F.silu(left) * right


def scatter_nd_update(x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    return x.index_put(tuple(indices.unbind(-1)), updates)


KERNELS: dict[str, Callable[..., Any]] = {
    "npu_rms_norm": rms_norm,
    "npu_add_rms_norm": add_rms_norm,
    "npu_add_layer_norm": add_layer_norm,
    "npu_gemma_rms_norm": gemma_rms_norm,
    "npu_rotary_mul": rotary_mul,
    "npu_apply_rotary_pos_emb": apply_rotary,
    "npu_interleave_rope": interleave_rope,
    "npu_swiglu": swiglu,
    "npu_scatter_nd_update": scatter_nd_update,
}


class Block(nn.Module):
    """hidden [B, S, H], cos and sin [B, S, 1, D], cache [B, N, T, D], position [S] → [B, S, H]."""

    def __init__(self, heads: int = 2, dim: int = 64) -> None:
        super().__init__()
        hidden = heads * dim
        self.heads, self.dim = heads, dim
        self.project = nn.Linear(hidden, 3 * hidden)
        self.gate_up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(2 * hidden, hidden, bias=False)
        self.gamma = nn.Parameter(torch.rand(3, hidden))
        self.layer_norm = nn.LayerNorm(hidden)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, position: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        x = npu.npu_rms_norm(hidden, self.gamma[0], 1e-6)[0]
        query, key, value = (
            part.reshape(batch, length, self.heads, self.dim) for part in self.project(x).chunk(3, dim=-1)
        )
        query, key = npu.npu_apply_rotary_pos_emb(query, key, cos, sin, "BSND")
        query = npu.npu_rotary_mul(npu.npu_rotary_mul(query, cos, sin), cos, sin, "interleave")
        query = npu.npu_interleave_rope(query.transpose(1, 2), cos.transpose(1, 2), sin.transpose(1, 2))
        cache.index_copy_(2, position, key.transpose(1, 2))
        visible = torch.arange(cache.shape[2], device=hidden.device) <= position[:, None]
        attended = F.scaled_dot_product_attention(query, cache, cache, attn_mask=visible)
        scores = torch.matmul(query, key.permute(0, 2, 3, 1))
        attended = attended + torch.einsum("bnst,btnd->bnsd", torch.softmax(scores, dim=-1), value)
        attended = attended.transpose(1, 2).reshape(batch, length, -1)
        y, _, total = npu.npu_add_rms_norm(attended, hidden, self.gamma[1], 1e-6)
        total = total + self.down(npu.npu_swiglu(self.gate_up(y)))
        total = npu.npu_gemma_rms_norm(total, self.gamma[2], 1e-6)[0]
        centred, *_, total = npu.npu_add_layer_norm(self.layer_norm(total), y, self.gamma[0], self.gamma[1], 1e-5, True)
        return F.rms_norm(centred + total, [total.shape[-1]], self.gamma[0])


def inputs(batch: int, length: int, heads: int = 2, dim: int = 64, room: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(batch * 100 + length)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    angles = random(batch, length, 1, dim)
    return [
        random(batch, length, heads * dim),
        angles.cos(),
        angles.sin(),
        random(batch, heads, room, dim),
        torch.arange(length) + 2,
    ]


def difference(run: Callable[..., Tensor], model: nn.Module, batch: int, length: int, mark: bool) -> list[float]:
    """Largest difference of the output and of the cache from an eager run."""
    ours, eager = inputs(batch, length), inputs(batch, length)
    if mark:
        for tensor in ours[:4]:
            torch._dynamo.mark_dynamic(tensor, 0)
        for tensor in ours[:3]:
            torch._dynamo.mark_dynamic(tensor, 1)
        torch._dynamo.mark_dynamic(ours[4], 0)
    with torch.no_grad():
        outputs = run(*ours), model(*eager)
    return [(outputs[0] - outputs[1]).abs().max().item(), (ours[3] - eager[3]).abs().max().item()]


def main(route: str, shapes: str) -> None:
    """Print, as one line of JSON, what happened to the block on `route` with "static" or "dynamic" shapes."""
    dynamic = shapes == "dynamic"
    library = torch.library.Library("npu", "IMPL")
    for name, kernel in KERNELS.items():
        library.impl(name, kernel, "CPU")
    inner: Inner = vendor.torchair
    if route == "torchair":
        ge.install()
    else:
        inner = lambda gm, values: vendor.npugraph_ex(gm, values, options={"force_eager": True})  # noqa: E731
    torch.manual_seed(0)
    model = Block().eval()
    run, backend = compiled(model, inner, dynamic=None if dynamic else False)
    started = time.perf_counter()
    sizes = [(2, 3), (4, 5)] if dynamic else [(2, 3), (2, 3)]
    differences = [difference(run, model, *size, mark=dynamic) for size in sizes]
    report = {
        "seconds": time.perf_counter() - started,
        "graphs": len(backend.graphs),
        "differences": differences,
        "converted": [vars(graph) for graph in ge.converted()],
    }
    print(json.dumps(report))
