"""DeepSeek-R1's attention in W8A8C8 over a paged cache, in plain PyTorch: weights, activations, latents in int8.

The latent is stored in whole numbers by one scale, in pages that hold every row in lines of 32 lanes, the rotated key
in lines of 16 beside it. A prompt attends to itself; a token attends to the cache, its queries quantised too. Prints
which operators the block becomes, how many launches that saves, and how far plain and fused are from float64.
"""

import torch
from deepseek_r1_w8a8 import DR, HCKV, HCQ, HE, D, Int8Linear, N, RMSNorm, converted, error, quantise, rotate, wide
from torch import Tensor, nn

import fusion

BATCH, PROMPT, BLOCKS, SIZE = 2, 20, 8, 128
LINES = {"latents": (HCKV // 32, SIZE, 32), "ropes": (DR // 16, SIZE, 16)}
TABLE = torch.tensor([[3, 6], [0, 5]], dtype=torch.int32)
OPTIONS = {"target": "ascend910_93", "lower": "eager", "plan_lower": "torchair"}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q_norm, self.kv_norm = RMSNorm(HE), RMSNorm(HCQ), RMSNorm(HCKV)
        self.q_a, self.q_b = Int8Linear(HE, HCQ), Int8Linear(HCQ, N * (D + DR))
        self.kv_a, self.out = Int8Linear(HE, HCKV + DR), Int8Linear(N * D, HE)
        self.kv_b = nn.Parameter(torch.randn(N * 2 * D, HCKV) * HCKV**-0.5)
        self.latent_scale = nn.Parameter(torch.tensor([2**-5]))
        self.register_buffer("latents", torch.zeros(BLOCKS, 1, *LINES["latents"], dtype=torch.int8))
        self.register_buffer("ropes", torch.zeros(BLOCKS, 1, *LINES["ropes"]))

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
        """x [B, S, H], slots [B · S], table [B, M], lengths [B] with these tokens; None where the sequences begin."""
        residual = residual + x
        batch, tokens, _ = x.shape
        scale = wide(self.latent_scale)
        rows = quantise(self.norm(residual))
        q = self.q_b(quantise(self.q_norm(self.q_a(rows, x.dtype))), x.dtype)
        q_nope, q_rope = q.view(batch, tokens, N, D + DR).transpose(1, 2).split((D, DR), dim=-1)
        q_rope = rotate(q_rope, cos[:, None], sin[:, None])
        latent, rope = self.kv_a(rows, x.dtype).split((HCKV, DR), dim=-1)
        latent, rope = self.kv_norm(latent), rotate(rope, cos, sin)

        stored = (wide(latent) / scale).round().clamp(-128, 127).to(torch.int8)
        block, place = slots // SIZE, slots % SIZE
        self.latents[block, :, :, place] = stored.view(-1, 1, HCKV // 32, 32)
        self.ropes[block, :, :, place] = rope.reshape(-1, 1, DR // 16, 16)

        up_key, up_value = self.kv_b.view(N, 2 * D, HCKV).split((D, D), dim=1)
        query = torch.einsum("bnsd,ndc->bnsc", q_nope, up_key)
        if lengths is None:
            at = torch.arange(tokens)
            scores = torch.einsum("bnsc,btc->bnst", query, latent) + torch.einsum("bnsr,btr->bnst", q_rope, rope)
            shares = shared(wide(scores), at <= at[:, None]).to(x.dtype)
            y = torch.einsum("bnst,btc->bnsc", shares, latent)
        else:
            latent, rope = (gathered(pages, table) for pages in (self.latents, self.ropes))
            whole, of_tokens = quantise(query)
            latent = latent.to(scale.dtype)
            scores = torch.einsum("bnsc,btc->bnst", whole.to(scale.dtype), latent) * of_tokens * scale
            scores = scores + torch.einsum("bnsr,btr->bnst", wide(q_rope), wide(rope))
            shares = shared(scores, (torch.arange(latent.shape[1]) < lengths[:, None])[:, None, None])
            y = (torch.einsum("bnst,btc->bnsc", shares, latent) * scale).to(x.dtype)
        y = torch.einsum("bnsc,nec->bsne", y, up_value).flatten(2)
        return self.out(quantise(y), x.dtype), residual


def shared(scores: Tensor, seen: Tensor) -> Tensor:
    return (scores * (D + DR) ** -0.5).masked_fill(~seen, -torch.inf).softmax(-1)


def gathered(pages: Tensor, table: Tensor) -> Tensor:
    """Rows [B, T, D] of the pages [Block, 1, D / L, Size, L] that a table names."""
    rows = pages[table].permute(0, 1, 2, 4, 3, 5)
    return rows.reshape(table.shape[0], table.shape[1] * SIZE, -1)


def step(first: int, tokens: int, dtype: torch.dtype) -> tuple:
    """Hidden states of positions first … first + tokens - 1 of each sequence, and where they go."""
    positions = torch.arange(first, first + tokens).expand(BATCH, -1)
    generator = torch.Generator().manual_seed(first)
    x, residual = (torch.randn(BATCH, tokens, HE, generator=generator) for _ in range(2))
    angles = (positions[..., None] / 10000.0 ** (torch.arange(0, DR, 2) / DR)).repeat(1, 1, 2)
    slots = (TABLE.long().gather(1, positions // SIZE) * SIZE + positions % SIZE).flatten()
    floats = (each.bfloat16().to(dtype) for each in (x, residual, angles.cos(), angles.sin()))
    return *floats, slots, TABLE, None if first == 0 else positions[:, -1] + 1


def run(call, dtype: torch.dtype) -> list[Tensor]:
    """The prompt, then three tokens."""
    steps = ((0, PROMPT), *((PROMPT + number, 1) for number in range(3)))
    with torch.no_grad():
        return [call(*step(*each, dtype))[0] for each in steps]


def main() -> None:
    torch.manual_seed(0)
    state = converted(Attention().state_dict(), torch.bfloat16, Attention).state_dict()
    dtypes = (torch.float64, torch.bfloat16, torch.bfloat16)
    exact, plain, fused = (converted(state, dtype, Attention) for dtype in dtypes)
    for name, first, tokens in (("prefill", 0, PROMPT), ("decode", PROMPT, 1)):
        with torch.no_grad():
            report = fusion.explain(plain, *step(first, tokens, torch.bfloat16), options=OPTIONS)
        print(f"{name}: {report.launches[0]} launches became {report.launches[1]}")
        print("   ", ", ".join(f"{count} {op}" for op, count in sorted(report.ops.items())))
    compiled = torch.compile(fused, backend="cann_fusion", options=OPTIONS, dynamic=False)
    truth, *results = (run(call, dtype) for call, dtype in zip((exact, plain, compiled), dtypes, strict=True))
    for name, place in (("prefill", 0), ("decode", -1)):
        before, after = (error(each[place], truth[place]) for each in results)
        print(f"{name}: relative error {after:.2e} fused, {before:.2e} plain")


if __name__ == "__main__":
    main()
