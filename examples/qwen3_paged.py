"""The attention block of a small Qwen3 over a paged cache, in plain PyTorch: a prompt, a chunk behind it, and tokens.

The cache keeps keys and values as they are, or in int8 by scales of each channel (C8); attention reads it as it lies.
Prints which operators every step becomes, how many launches that saves, and how far plain and fused are from float64.
"""

import torch
from torch import Tensor, nn

import fusion

HIDDEN, HEADS, SHARED, WIDTH = 512, 4, 2, 128
BATCH, BLOCKS, SIZE = 2, 6, 128
TABLE = torch.tensor([[3, 1], [0, 5]], dtype=torch.int32)
PROMPT, CHUNK = 20, 3
OPTIONS = {"target": "ascend910_93", "lower": "eager", "plan_lower": "torchair"}


class Attention(nn.Module):
    """From the residual add to the output projection; with `int8` over a C8 cache."""

    def __init__(self, int8: bool) -> None:
        super().__init__()
        self.norm, self.q_norm, self.k_norm = (nn.RMSNorm(size, eps=1e-6) for size in (HIDDEN, WIDTH, WIDTH))
        self.q, self.k, self.v = (nn.Linear(HIDDEN, n * WIDTH, bias=False) for n in (HEADS, SHARED, SHARED))
        self.out = nn.Linear(HEADS * WIDTH, HIDDEN, bias=False)
        pages = torch.zeros(BLOCKS, SIZE, SHARED, WIDTH, dtype=torch.int8 if int8 else None)
        self.register_buffer("keys", pages)
        self.register_buffer("values", pages.clone())
        scales = torch.rand(2, SHARED, WIDTH, generator=torch.Generator().manual_seed(1)) / 64 + 2**-6
        self.scales = nn.Parameter(scales, requires_grad=False) if int8 else None

    def forward(
        self,
        x: Tensor,
        residual: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        table: Tensor,
        lengths: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """x [B, S, H], slots [B · S], table [B, P], lengths [B] with these tokens; None where the sequences begin."""
        residual = residual + x
        rows = self.norm(residual)
        q, k, v = (each(rows).unflatten(-1, (-1, WIDTH)) for each in (self.q, self.k, self.v))
        q, k = (rotated(each, cos, sin) for each in (self.q_norm(q), self.k_norm(k)))
        caches = list(zip((self.keys, self.values), (None, None) if self.scales is None else self.scales, strict=True))
        for (pages, scale), new in zip(caches, (k, v), strict=True):
            pages.view(-1, SHARED, WIDTH)[slots] = (new if scale is None else stored(new, scale)).flatten(0, 1)
        tokens = x.shape[1]
        if lengths is None:
            last = torch.arange(tokens)[None]
        else:
            k, v = (read(pages, scale, table) for pages, scale in caches)
            last = lengths[:, None] - tokens + torch.arange(tokens)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        seen = torch.arange(k.shape[2]) <= last[:, None, :, None]
        y = nn.functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2)), residual


def read(pages: Tensor, scale: Tensor | None, table: Tensor) -> Tensor:
    """Rows [B, T, M, D] of the pages of each sequence."""
    rows = pages[table].flatten(1, 2)
    return rows if scale is None else rows.to(scale.dtype) * scale


def stored(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).round().clamp(-128, 127).to(torch.int8)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


def step(first: int, tokens: int, dtype: torch.dtype) -> tuple:
    """Hidden states of positions first … first + tokens - 1 of each sequence, and where they go."""
    positions = torch.arange(first, first + tokens).expand(BATCH, -1)
    generator = torch.Generator().manual_seed(first)
    x, residual = (torch.randn(BATCH, tokens, HIDDEN, generator=generator) for _ in range(2))
    angles = (positions[..., None] / 1000000.0 ** (torch.arange(0, WIDTH, 2) / WIDTH)).repeat(1, 1, 2).unsqueeze(2)
    slots = (TABLE.long().gather(1, positions // SIZE) * SIZE + positions % SIZE).flatten()
    floats = (each.bfloat16().to(dtype) for each in (x, residual, angles.cos(), angles.sin()))
    return *floats, slots, TABLE, None if first == 0 else positions[:, -1] + 1


STEPS = {"prompt": (0, PROMPT), "chunk": (PROMPT, CHUNK), "token": (PROMPT + CHUNK, 1)}


def run(call, dtype: torch.dtype) -> list[Tensor]:
    with torch.no_grad():
        return [call(*step(*each, dtype))[0] for each in STEPS.values()]


def model(int8: bool, dtype: torch.dtype) -> Attention:
    torch.manual_seed(0)
    return Attention(int8).bfloat16().to(dtype).eval()


def main() -> None:
    for int8 in (False, True):
        print("over a cache in int8:" if int8 else "over a cache in bfloat16:")
        for name, each in STEPS.items():
            with torch.no_grad():
                report = fusion.explain(model(int8, torch.bfloat16), *step(*each, torch.bfloat16), options=OPTIONS)
            print(f"  {name}: {report.launches[0]} launches became {report.launches[1]}")
            print("     ", ", ".join(f"{count} {op}" for op, count in sorted(report.ops.items())))
        compiled = torch.compile(model(int8, torch.bfloat16), backend="cann_fusion", options=OPTIONS, dynamic=False)
        truth = run(model(int8, torch.float64), torch.float64)
        plain, fused = run(model(int8, torch.bfloat16), torch.bfloat16), run(compiled, torch.bfloat16)
        for place, name in enumerate(STEPS):
            errors = [float((y[place].double() - truth[place]).norm() / truth[place].norm()) for y in (fused, plain)]
            print(f"  {name}: relative error {errors[0]:.2e} fused, {errors[1]:.2e} plain")


if __name__ == "__main__":
    main()
