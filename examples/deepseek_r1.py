"""An attention block of the kind of DeepSeek-R1 over a paged cache, in plain PyTorch: prefill and decode, fused."""

import torch
from torch import Tensor, nn

import fusion

HIDDEN, HEADS, Q_LORA, LATENT, NOPE, ROPE, VALUE = 1024, 4, 1536, 512, 128, 64, 128
BLOCKS, SIZE, BATCH, PROMPT = 8, 16, 2, 20
TABLE = torch.tensor([[3, 6, 1], [0, 5, 2]], dtype=torch.int32)
OPTIONS = {"target": "ascend910_93", "lower": "eager", "plan_lower": "torchair"}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_a = nn.Linear(HIDDEN, Q_LORA, bias=False)
        self.q_norm = nn.RMSNorm(Q_LORA, eps=1e-6)
        self.q_b = nn.Linear(Q_LORA, HEADS * (NOPE + ROPE), bias=False)
        self.kv_a = nn.Linear(HIDDEN, LATENT + ROPE, bias=False)
        self.kv_norm = nn.RMSNorm(LATENT, eps=1e-6)
        self.kv_b = nn.Linear(LATENT, HEADS * (NOPE + VALUE), bias=False)
        self.out = nn.Linear(HEADS * VALUE, HIDDEN, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: tuple[Tensor, Tensor], slots: Tensor, table: Tensor, lengths
    ) -> Tensor:
        """x [B, S, H], cos and sin [B, S, R], pages [Block, Size, C | R], slots [B · S], lengths [B] with these tokens.

        `lengths` None: the sequences begin here, and attend to themselves.
        """
        batch, tokens, _ = x.shape
        q = self.q_b(self.q_norm(self.q_a(x))).view(batch, tokens, HEADS, -1).transpose(1, 2)
        nope, q_rope = q.split((NOPE, ROPE), -1)
        latent, rope = self.kv_a(x).split((LATENT, ROPE), -1)
        latent, rope = self.kv_norm(latent), rotated(rope, cos, sin)
        q_rope = rotated(q_rope, cos[:, None], sin[:, None])
        for pages, rows in zip(cache, (latent, rope), strict=True):
            pages.view(-1, pages.shape[-1])[slots] = rows.flatten(0, 1)
        if lengths is None:
            at = torch.arange(tokens)
            seen = at <= at[:, None]
        else:
            latent, rope = (pages[table].view(batch, -1, pages.shape[-1]) for pages in cache)
            seen = (torch.arange(latent.shape[1]) < lengths[:, None])[:, None, None]
        up_key, up_value = self.kv_b.weight.view(HEADS, NOPE + VALUE, LATENT).split((NOPE, VALUE), 1)
        absorbed = torch.einsum("bnsd,ndc->bnsc", nope, up_key)
        scores = torch.einsum("bnsc,btc->bnst", absorbed, latent) + torch.einsum("bnsr,btr->bnst", q_rope, rope)
        scores = (scores * (NOPE + ROPE) ** -0.5).masked_fill(~seen, -torch.inf)
        attended = torch.einsum("bnst,btc->bnsc", scores.softmax(-1, dtype=torch.float32).to(x.dtype), latent)
        return self.out(torch.einsum("bnsc,nec->bsne", attended, up_value).flatten(2))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of neighbours rotated, the first of each pair in the first half of the result."""
    x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


def tables(positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [B, S, R] of positions [B, S]."""
    angles = positions[..., None] / 10000.0 ** (torch.arange(0, ROPE, 2) / ROPE)
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def step(first: int, tokens: int, dtype: torch.dtype) -> tuple:
    """Hidden states of positions first … first + tokens - 1 of each sequence, and where they go."""
    positions = torch.arange(first, first + tokens).expand(BATCH, -1)
    x = torch.randn(BATCH, tokens, HIDDEN, generator=torch.Generator().manual_seed(first))
    blocks = TABLE.long().gather(1, positions // SIZE)
    slots = (blocks * SIZE + positions % SIZE).flatten()
    return x.to(dtype), *tables(positions, dtype), slots, None if first == 0 else positions[:, -1] + 1


def run(call, dtype: torch.dtype) -> list[Tensor]:
    """The prompt, then three tokens."""
    cache = tuple(torch.zeros(BLOCKS, SIZE, width, dtype=dtype) for width in (LATENT, ROPE))
    results = []
    for first, tokens in ((0, PROMPT), *((PROMPT + number, 1) for number in range(3))):
        x, cos, sin, slots, lengths = step(first, tokens, dtype)
        results.append(call(x, cos, sin, cache, slots, TABLE, lengths))
    return results


@torch.inference_mode()
def main() -> None:
    torch.manual_seed(0)
    model = Attention().bfloat16().eval()
    for name, first, tokens in (("prefill", 0, PROMPT), ("decode", PROMPT, 1)):
        x, cos, sin, slots, lengths = step(first, tokens, torch.bfloat16)
        cache = tuple(torch.zeros(BLOCKS, SIZE, width, dtype=torch.bfloat16) for width in (LATENT, ROPE))
        report = fusion.explain(model, x, cos, sin, cache, slots, TABLE, lengths, options=OPTIONS)
        print(f"{name}: {report.launches[0]} launches became {report.launches[1]}")
        print("   ", ", ".join(f"{count} {op}" for op, count in sorted(report.ops.items())))
    plain = run(model, torch.bfloat16)
    fused = run(torch.compile(model, backend="cann_fusion", options=OPTIONS, dynamic=False), torch.bfloat16)
    exact = run(model.double(), torch.float64)
    for name, place in (("prefill", 0), ("decode", -1)):
        errors = [float((y[place].double() - exact[place]).norm() / exact[place].norm()) for y in (plain, fused)]
        print(f"{name}: relative error {errors[1]:.2e} fused, {errors[0]:.2e} plain")


if __name__ == "__main__":
    main()
