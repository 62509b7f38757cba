"""DeepSeek-R1's attention in W8A8, in plain PyTorch: int8 weights, activations quantised per token, a latent cache.

Prints for a prompt and for one more token which operators the block becomes, how many launches that saves, and how far
the plain and the fused block are from the same block in float64.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion

HE, HCQ, HCKV, N, D, DR = 1024, 1536, 512, 8, 128, 64
BATCH, PROMPT, CACHE, EPS = 2, 96, 128, 1e-6


def wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = wide(x)
        return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = wide(x).abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
    return (wide(x) / scale).round().clamp(-128, 127).to(torch.int8), scale


class Int8Linear(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        weight = torch.randn(outer, inner) * inner**-0.5
        scale = weight.abs().amax(-1) / 127
        self.weight = nn.Parameter((weight / scale[:, None]).round().to(torch.int8), requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, rows: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
        whole, tokens = rows
        y = torch._int_mm(whole.reshape(-1, whole.shape[-1]), self.weight.t()).view(*whole.shape[:-1], -1)
        return (wide(y) * tokens * self.scale).to(dtype)


def tables(places: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [B, S, Dr] of positions, in two equal halves: all layers of a model share them."""
    angles = torch.outer(places, 10000.0 ** -(torch.arange(0, DR, 2) / DR)).repeat(BATCH, 1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)  # pairs to halves
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q_norm, self.kv_norm = RMSNorm(HE), RMSNorm(HCQ), RMSNorm(HCKV)
        self.q_a, self.q_b = Int8Linear(HE, HCQ), Int8Linear(HCQ, N * (D + DR))
        self.kv_a, self.out = Int8Linear(HE, HCKV + DR), Int8Linear(N * D, HE)
        self.kv_b = nn.Parameter(torch.randn(N * 2 * D, HCKV) * HCKV**-0.5)
        self.register_buffer("latents", torch.zeros(BATCH, CACHE, HCKV))
        self.register_buffer("ropes", torch.zeros(BATCH, CACHE, DR))

    def forward(self, x: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        residual = residual + x
        batch, length, _ = x.shape
        places = torch.arange(length, device=x.device) + start

        rows = quantise(self.norm(residual))
        q = self.q_b(quantise(self.q_norm(self.q_a(rows, x.dtype))), x.dtype)
        q_nope, q_rope = q.view(batch, length, N, D + DR).transpose(1, 2).split((D, DR), dim=-1)
        latent, rope = self.kv_a(rows, x.dtype).split((HCKV, DR), dim=-1)
        self.latents.index_copy_(1, places, self.kv_norm(latent))
        self.ropes.index_copy_(1, places, rotate(rope, cos, sin))

        expanded = F.linear(self.latents, self.kv_b).view(batch, CACHE, N, 2 * D).transpose(1, 2)
        k_nope, v = expanded.split((D, D), dim=-1)
        k = torch.cat((k_nope, self.ropes[:, None].expand(-1, N, -1, -1)), dim=-1)
        q = torch.cat((q_nope, rotate(q_rope, cos[:, None], sin[:, None])), dim=-1)
        seen = torch.arange(CACHE, device=x.device) <= places[:, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.out(quantise(y.transpose(1, 2).reshape(batch, length, N * D)), x.dtype), residual


def steps() -> Iterator[tuple[str, list[Tensor], Tensor]]:
    for name, length, start in (("prompt", PROMPT, 0), ("one more token", 1, PROMPT)):
        x, residual = (torch.randn(BATCH, length, HE) for _ in range(2))
        floats = x, residual, *tables(torch.arange(start, start + length))
        yield name, [each.bfloat16() for each in floats], torch.tensor(start)


def converted(state: dict[str, Tensor], dtype: torch.dtype, kind: type[nn.Module] = Attention) -> nn.Module:
    """A block of this kind with its float parameters in `dtype`, and the scales in float32 at least."""
    block = kind()
    block.load_state_dict(state)
    block = block.to(dtype).eval().requires_grad_(False)
    for name, layer in block.named_modules():
        if isinstance(layer, Int8Linear):
            layer.scale = nn.Parameter(state[f"{name}.scale"].to(torch.promote_types(dtype, torch.float32)), False)
    return block


def error(y: Tensor, truth: Tensor) -> float:
    return float((y.double() - truth).norm() / truth.norm())


def main() -> None:
    torch.manual_seed(0)
    options = {"target": "ascend910_93", "lower": "eager"}
    state = converted(Attention().state_dict(), torch.bfloat16).state_dict()  # all three hold the same numbers
    exact, plain, fused = (converted(state, dtype) for dtype in (torch.float64, torch.bfloat16, torch.bfloat16))
    compiled = torch.compile(fused, backend="cann_fusion", options=options)
    for name, inputs, start in steps():
        with torch.no_grad():
            report = fusion.explain(plain, *inputs, start, options=options)
            truth, _ = exact(*(each.double() for each in inputs), start)
            before, after = (error(block(*inputs, start)[0], truth) for block in (plain, compiled))
        print(f"{name}: {report.launches[0]} launches become {report.launches[1]}")
        print("  " + "  ".join(f"{count} x {operator}" for operator, count in sorted(report.ops.items())))
        print(f"  error against float64: {before:.2e} plain, {after:.2e} fused")


if __name__ == "__main__":
    main()
