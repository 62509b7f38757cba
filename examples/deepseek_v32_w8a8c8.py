"""DeepSeek-V3.2's sparse attention in W8A8C8 over a paged cache, in plain PyTorch.

The queries' second layer, that of the indexer and the last one take int8 weights and rows that are quantised per token.
A row of the cache is one of 656 bytes: the latent in int8 with a scale of every 128 lanes, and the rotated key as it
is. Queries and keys of the indexer are turned by a Hadamard matrix and quantised too, the keys kept beside their
scales. Prints what the block becomes at every step, and how far plain and fused are from float64.
"""

import torch
from deepseek_r1_w8a8 import Int8Linear, converted, quantise
from deepseek_v32 import BLOCKS, EPS, SIZE, RMSNorm, Sizes, halves_rotated, kept, pairs_rotated, show, wide
from torch import Tensor, nn
from torch.nn.functional import layer_norm

TILE = 128


def hadamard(width: int) -> Tensor:
    """H / √width [width, width]."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < width:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix * width**-0.5


def packed(latent: Tensor, rope: Tensor) -> Tensor:
    """Latents [T, C] and rotated keys [T, R] as bytes [T, 656]."""
    whole, scale = quantise(latent.unflatten(-1, (-1, TILE)))
    parts = whole.flatten(-2), rope.bfloat16().view(torch.int8), scale.squeeze(-1).float().view(torch.int8)
    return torch.cat(parts, -1)


def unpacked(rows: Tensor, of: Sizes, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    whole, rope, scale = rows.split((of.latent, 2 * of.rope, 4 * of.latent // TILE), -1)
    latent = whole.unflatten(-1, (-1, TILE)).float() * scale.contiguous().view(torch.float32).unsqueeze(-1)
    return latent.flatten(-2).to(dtype), rope.contiguous().view(torch.bfloat16).to(dtype)


class Indexer(nn.Module):
    rotated = staticmethod(halves_rotated)

    def __init__(self, of: Sizes) -> None:
        super().__init__()
        self.of = of
        self.q_b = Int8Linear(of.q_lora, of.index_heads * of.index)
        self.k = nn.Linear(of.hidden, of.index, bias=False)
        self.k_norm = nn.LayerNorm(of.index, eps=EPS)
        self.weights = nn.Linear(of.hidden, of.index_heads, bias=False)
        self.register_buffer("turn", hadamard(of.index))

    def quantised(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [T, heads, D] rotated, turned and in int8, with their scales [T, heads] in float16."""
        rope, rest = x.split((self.of.rope, self.of.index - self.of.rope), -1)
        whole, scale = quantise(torch.cat((self.rotated(rope, cos, sin), rest), -1) @ self.turn)
        return whole, scale.squeeze(-1).half()

    def key(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        key = layer_norm(self.k(x), (self.of.index,), self.k_norm.weight, self.k_norm.bias, EPS)
        whole, scale = self.quantised(key[:, None], cos, sin)
        return whole.squeeze(1), scale

    def forward(self, x: Tensor, query: Tensor, cos: Tensor, sin: Tensor, keys: tuple[Tensor, Tensor], seen: Tensor):
        """Places [T, K] of int8 keys [T, L, D] with scales [T, L, 1] for tokens [T, H]."""
        query, scale = self.quantised(query.unflatten(-1, (self.of.index_heads, -1)), cos, sin)
        weights = self.weights(x).half().float() * scale.float()
        products = torch.einsum("thd,tld->thl", query.float(), keys[0].float()).relu()
        scores = torch.einsum("thl,th->tl", products, weights) * keys[1].squeeze(-1).float()
        return scores.masked_fill(~seen, -torch.inf).topk(self.of.listed, -1).indices


class Attention(nn.Module):
    def __init__(self, of: Sizes) -> None:
        super().__init__()
        self.of = of
        self.norm, self.q_norm, self.kv_norm = RMSNorm(of.hidden), RMSNorm(of.q_lora), RMSNorm(of.latent)
        self.q_a = nn.Linear(of.hidden, of.q_lora, bias=False)
        self.q_b = Int8Linear(of.q_lora, of.heads * (of.nope + of.rope))
        self.kv_a = nn.Linear(of.hidden, of.latent + of.rope, bias=False)
        self.kv_b = nn.Linear(of.latent, of.heads * (of.nope + of.value), bias=False)
        self.out = Int8Linear(of.heads * of.value, of.hidden)
        self.indexer = Indexer(of)

    def forward(
        self,
        x: Tensor,
        residual: Tensor,
        cos: Tensor,
        sin: Tensor,
        caches: tuple[Tensor, ...],
        slots: Tensor,
        table: Tensor,
        positions: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """As of `deepseek_v32.Attention`, over pages of packed rows, of int8 keys, and of their scales."""
        of, residual = self.of, residual + x
        x = self.norm(residual)
        low = quantise(self.q_norm(self.q_a(x)))
        nope, q_rope = self.q_b(low, x.dtype).unflatten(-1, (of.heads, -1)).split((of.nope, of.rope), -1)
        q_rope = pairs_rotated(q_rope, cos, sin)
        latent, rope = self.kv_a(x).split((of.latent, of.rope), -1)
        rope = pairs_rotated(rope[:, None], cos, sin).squeeze(1)
        new = packed(self.kv_norm(latent), rope), *self.indexer.key(x, cos, sin)
        rows, *keys = (kept(pages, each, slots, table) for pages, each in zip(caches, new, strict=True))
        seen = torch.arange(rows.shape[1], device=x.device) <= positions[:, None]
        places = self.indexer(x, self.indexer.q_b(low, x.dtype), cos, sin, keys, seen)
        seen = seen & torch.zeros_like(seen).scatter(-1, places, True)

        latent, rope = unpacked(rows, of, x.dtype)
        up_key, up_value = self.kv_b.weight.view(of.heads, -1, of.latent).split((of.nope, of.value), 1)
        absorbed = torch.einsum("thd,hdc->thc", nope, up_key)
        scores = torch.einsum("thc,tlc->thl", absorbed, latent) + torch.einsum("thr,tlr->thl", q_rope, rope)
        scores = (scores * (of.nope + of.rope) ** -0.5).masked_fill(~seen[:, None], -torch.inf)
        attended = torch.einsum("thl,tlc->thc", scores.softmax(-1, dtype=wide(x).dtype).to(x.dtype), latent)
        y = torch.einsum("thc,hec->the", attended, up_value).flatten(1)
        return self.out(quantise(y), x.dtype), residual


class Model(nn.Module):
    """The attention of one layer."""

    def __init__(self, of: Sizes) -> None:
        super().__init__()
        self.of, self.layer = of, Attention(of)

    def forward(self, x: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, caches: tuple[Tensor, ...], *of_tokens):
        return self.layer(x, residual, cos, sin, caches, *of_tokens)

    def empty_caches(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        of = self.of
        row = of.latent + 2 * of.rope + 4 * of.latent // TILE
        kinds = ((row, torch.int8), (of.index, torch.int8), (1, torch.float16))
        return tuple(torch.zeros(BLOCKS, SIZE, width, dtype=kind) for width, kind in kinds)


SIZES = Sizes()


def build(of: Sizes = SIZES) -> Model:
    """A block in bfloat16 that keeps scales in float32."""
    return converted(Model(of).state_dict(), torch.bfloat16, lambda: Model(of))


def main() -> None:
    torch.manual_seed(0)
    show(build())


if __name__ == "__main__":
    main()
