"""Runs in two processes: context-parallel prefill and a tensor-parallel projection, compiled, against one process."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce, reduce_scatter_tensor

import fusion

B, S, N, D, HIDDEN, EPS = 1, 8, 2, 64, 64, 1e-6


def norm(x: Tensor, gain: Tensor) -> Tensor:
    wide = x.float()
    return gain * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def heads(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight).unflatten(-1, (N, D)).transpose(1, 2)


def everything() -> dict[str, Tensor]:
    """The hidden states, the tables, and the weights: the same in every process."""
    torch.manual_seed(0)
    angles = torch.arange(S)[:, None] / 10.0 ** (torch.arange(D // 2) * 2 / D)
    angles = torch.cat((angles, angles), -1)
    made = {name: torch.randn(N * D, HIDDEN) / HIDDEN**0.5 for name in ("q", "k", "v")}
    made |= {"x": torch.randn(B, S, HIDDEN), "gain": torch.rand(HIDDEN), "o": torch.randn(HIDDEN, N * D) / 8}
    return made | {"cos": angles.cos(), "sin": angles.sin(), "last": torch.rand(HIDDEN)}


def whole(x, gain, q, k, v, o, cos, sin, last):
    """One process."""
    h = norm(x, gain)
    query, key = (rotated(heads(h, each), cos, sin) for each in (q, k))
    y = F.scaled_dot_product_attention(query, key, heads(h, v), is_causal=True)
    return norm(x + F.linear(y.transpose(1, 2).flatten(2), o), last)


def context_parallel(x, gain, q, k, v, o, cos, sin, last, positions):
    """Zig-zag parts of the positions; keys and values of all are gathered, and put in order."""
    h = norm(x, gain)
    query, key = (rotated(heads(h, each), cos, sin) for each in (q, k))
    both = torch.cat((key, heads(h, v)), -1).permute(2, 0, 1, 3).contiguous()
    order = torch.cat([zigzag(rank) for rank in range(2)]).argsort()
    key, value = all_gather_tensor(both, 0, dist.group.WORLD)[order].permute(1, 2, 0, 3).split(D, -1)
    y = F.scaled_dot_product_attention(query, key, value, attn_mask=torch.arange(S) <= positions[:, None])
    return norm(x + F.linear(y.transpose(1, 2).flatten(2), o), last)


def tensor_parallel(x, gain, q, k, v, o, cos, sin, last):
    """Half of the heads, whose products with their columns of W_O are summed; rows are scattered before the norm."""
    h = norm(x, gain)
    lanes = q.shape[0] // D
    of = [F.linear(h, each).unflatten(-1, (lanes, D)).transpose(1, 2) for each in (q, k, v)]
    y = F.scaled_dot_product_attention(*(rotated(each, cos, sin) for each in of[:2]), of[2], is_causal=True)
    part = F.linear(y.transpose(1, 2).flatten(2), o)
    summed = norm(x + all_reduce(part, "sum", dist.group.WORLD), last)
    rows = reduce_scatter_tensor(part.transpose(0, 1).contiguous(), "sum", 0, dist.group.WORLD).transpose(0, 1)
    return summed, rows


def zigzag(rank: int) -> Tensor:
    """The quarter from the front and the one from the back that a process has."""
    quarters = torch.arange(S).chunk(4)
    return torch.cat((quarters[rank], quarters[3 - rank]))


def compiled(function: Any) -> Any:
    torch._dynamo.reset()
    options = {"target": "host", "lower": "eager", "plan_cache": "off"}
    return torch.compile(function, backend="cann_fusion", fullgraph=True, options=options)


def fused(function: Any, *args: Any) -> Counter[str]:
    torch._dynamo.reset()
    return Counter(fusion.explain(function, *args, options={"target": "ascend910_93"}).ops)


def main(rank: int) -> None:
    """Check both ways against one process, and print what the local work on both sides of the collectives becomes."""
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(sys.argv[2], 2))
    given, mine = everything(), zigzag(rank)
    wanted = whole(**given)
    local = {**given, "x": given["x"][:, mine], "cos": given["cos"][mine], "sin": given["sin"][mine]}
    with torch.no_grad():
        args = (*ordered(local), mine)
        torch.testing.assert_close(compiled(context_parallel)(*args), wanted[:, mine])
        half = slice(rank * N * D // 2, (rank + 1) * N * D // 2)
        local = given | {name: given[name][half] for name in "qkv"} | {"o": given["o"][:, half]}
        summed, rows = compiled(tensor_parallel)(*ordered(local))
        torch.testing.assert_close(summed, wanted)
        own = slice(rank * S // 2, (rank + 1) * S // 2)
        torch.testing.assert_close(rows, projected(given)[:, own])
        ops = fused(context_parallel, *(each.bfloat16() for each in args[:-1]), mine)
    print(json.dumps(ops))
    dist.destroy_process_group()


def ordered(given: dict[str, Tensor]) -> list[Tensor]:
    return [given[name] for name in ("x", "gain", "q", "k", "v", "o", "cos", "sin", "last")]


def projected(given: dict[str, Tensor]) -> Tensor:
    """What the projection of all heads gives before the residual."""
    h = norm(given["x"], given["gain"])
    query, key = (rotated(heads(h, given[each]), given["cos"], given["sin"]) for each in "qk")
    y = F.scaled_dot_product_attention(query, key, heads(h, given["v"]), is_causal=True)
    return F.linear(y.transpose(1, 2).flatten(2), given["o"])


if __name__ == "__main__":
    main(int(sys.argv[1]))
