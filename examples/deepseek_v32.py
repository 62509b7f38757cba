"""DeepSeek-V3.2's sparse attention over a paged cache, in plain PyTorch, as serving code writes it.

The tokens of all sequences are packed, whichever sequences they are of: prompts, a chunk behind one, several tokens at
once, or the next. Every token reads the pages of its sequence up to itself, and attends to the keys that an indexer
lists of them. Prints which operators the block becomes, how many launches that saves, and how far plain and fused are
from float64.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

import fusion

EPS = 1e-6
BLOCKS, SIZE = 16, 16
TABLE = torch.tensor([[3, 6, 1], [0, 5, 2], [9, 9, 9], [4, 8, 7]], dtype=torch.int32)
STEPS = {
    "prompts": [(0, 30), (0, 17), (0, 0), (0, 3)],
    "a chunk, a token, nothing": [(30, 9), (17, 1), (0, 0), (3, 20)],
    "two tokens each": [(39, 2), (18, 2), (0, 0), (23, 2)],
    "a token each": [(41, 1), (20, 1), (0, 0), (25, 1)],
}
"""Where the new tokens of every sequence begin, and how many there are."""
OPTIONS = {"target": "ascend910_93", "lower": "eager", "plan_lower": "torchair"}


@dataclass(frozen=True)
class Sizes:
    hidden: int = 1024
    heads: int = 4
    q_lora: int = 1536
    latent: int = 512
    nope: int = 128
    rope: int = 64
    value: int = 128
    index_heads: int = 8
    index: int = 128
    listed: int = 24


def wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = wide(x)
        return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def halves_rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


def pairs_rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of neighbours rotated, the first of each pair in the first half of the result."""
    return halves_rotated(x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), cos, sin)


class Indexer(nn.Module):
    """Which keys each token attends to."""

    rotated = staticmethod(halves_rotated)

    def __init__(self, of: Sizes) -> None:
        super().__init__()
        self.of = of
        self.q_b = nn.Linear(of.q_lora, of.index_heads * of.index, bias=False)
        self.k = nn.Linear(of.hidden, of.index, bias=False)
        self.k_norm = nn.LayerNorm(of.index, eps=EPS)
        self.weights = nn.Linear(of.hidden, of.index_heads, bias=False)

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rows [T, heads, D] of which the first lanes are rotated."""
        rope, rest = x.split((self.of.rope, self.of.index - self.of.rope), -1)
        return torch.cat((self.rotated(rope, cos, sin), rest), -1)

    def key(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        key = layer_norm(self.k(x), (self.of.index,), self.k_norm.weight, self.k_norm.bias, EPS)
        return self.turned(key[:, None], cos, sin).squeeze(1)

    def forward(self, x: Tensor, low: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, seen: Tensor) -> Tensor:
        """Places [T, K] of keys [T, L, D] for tokens [T, H], of which `seen` [T, L] says which there are."""
        query = self.turned(self.q_b(low).unflatten(-1, (self.of.index_heads, -1)), cos, sin)
        weights = self.weights(x) * (self.of.index_heads * self.of.index) ** -0.5
        products = torch.einsum("thd,tld->thl", query, keys).relu()
        scores = torch.einsum("thl,th->tl", wide(products), wide(weights))
        return scores.masked_fill(~seen, -torch.inf).topk(self.of.listed, -1).indices


class Attention(nn.Module):
    """By an indexer of its own, or, without one, by the list of a layer before."""

    def __init__(self, of: Sizes, indexer: Indexer | None) -> None:
        super().__init__()
        self.of = of
        self.norm, self.q_norm, self.kv_norm = RMSNorm(of.hidden), RMSNorm(of.q_lora), RMSNorm(of.latent)
        self.q_a = nn.Linear(of.hidden, of.q_lora, bias=False)
        self.q_b = nn.Linear(of.q_lora, of.heads * (of.nope + of.rope), bias=False)
        self.kv_a = nn.Linear(of.hidden, of.latent + of.rope, bias=False)
        self.kv_b = nn.Linear(of.latent, of.heads * (of.nope + of.value), bias=False)
        self.out = nn.Linear(of.heads * of.value, of.hidden, bias=False)
        self.indexer = indexer

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
        places: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x and residual [T, H], cos and sin [T, 1, R], pages [Block, Size, D], slots [T], table [T, M], positions [T].

        Slots are where the rows of the tokens go, a row of the table are the pages of a token's sequence. Returns what
        comes out, the residual, and the list of keys [T, K].
        """
        of, residual = self.of, residual + x
        x = self.norm(residual)
        low = self.q_norm(self.q_a(x))
        nope, q_rope = self.q_b(low).unflatten(-1, (of.heads, -1)).split((of.nope, of.rope), -1)
        q_rope = pairs_rotated(q_rope, cos, sin)
        latent, rope = self.kv_a(x).split((of.latent, of.rope), -1)
        latent = kept(caches[0], self.kv_norm(latent), slots, table)
        rope = kept(caches[1], pairs_rotated(rope[:, None], cos, sin).squeeze(1), slots, table)
        seen = torch.arange(latent.shape[1], device=x.device) <= positions[:, None]
        if self.indexer is not None:
            keys = kept(caches[2], self.indexer.key(x, cos, sin), slots, table)
            places = self.indexer(x, low, cos, sin, keys, seen)
        assert places is not None
        seen = seen & torch.zeros_like(seen).scatter(-1, places, True)

        up_key, up_value = self.kv_b.weight.view(of.heads, -1, of.latent).split((of.nope, of.value), 1)
        absorbed = torch.einsum("thd,hdc->thc", nope, up_key)
        scores = torch.einsum("thc,tlc->thl", absorbed, latent) + torch.einsum("thr,tlr->thl", q_rope, rope)
        scores = (scores * (of.nope + of.rope) ** -0.5).masked_fill(~seen[:, None], -torch.inf)
        attended = torch.einsum("thl,tlc->thc", scores.softmax(-1, dtype=wide(x).dtype).to(x.dtype), latent)
        return self.out(torch.einsum("thc,hec->the", attended, up_value).flatten(1)), residual, places


def kept(pages: Tensor, rows: Tensor, slots: Tensor, table: Tensor) -> Tensor:
    """Rows [T, L, D] of the pages that a table names, the new ones among them."""
    pages.view(-1, pages.shape[-1])[slots] = rows
    return pages[table].flatten(1, 2)


class Model(nn.Module):
    """The attention of some layers, without what stands between."""

    def __init__(self, of: Sizes, *indexers: Indexer | None) -> None:
        super().__init__()
        self.of = of
        self.layers = nn.ModuleList(Attention(of, each) for each in indexers)

    def forward(self, x: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, caches: list, *of_tokens: Tensor):
        places = None
        for layer, own in zip(self.layers, caches, strict=True):
            x, residual, places = layer(x, residual, cos, sin, own, *of_tokens, places)
        return x, residual

    def empty_caches(self, dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
        widths = (self.of.latent, self.of.rope, self.of.index)
        return [tuple(torch.zeros(BLOCKS, SIZE, width, dtype=dtype) for width in widths) for _ in self.layers]


def step(of: Sizes, name: str, dtype: torch.dtype, caches: list[tuple[Tensor, ...]]) -> tuple:
    """New tokens, and what an engine tells the model of them."""
    request = torch.cat([torch.full((count,), number) for number, (_, count) in enumerate(STEPS[name])])
    positions = torch.cat([torch.arange(first, first + count) for first, count in STEPS[name]])
    generator = torch.Generator().manual_seed(len(name))
    x, residual = (torch.randn(len(request), of.hidden, generator=generator).bfloat16() for _ in range(2))
    angles = (positions[:, None, None] / 10000.0 ** (torch.arange(0, of.rope, 2) / of.rope)).repeat(1, 1, 2)
    x, residual, cos, sin = (each.to(dtype) for each in (x, residual, angles.cos().bfloat16(), angles.sin().bfloat16()))
    table = TABLE[request]
    slots = table.long().gather(1, positions[:, None] // SIZE).squeeze(1) * SIZE + positions % SIZE
    return x, residual, cos, sin, caches, slots, table, positions


def run(call, model: Model, dtype: torch.dtype) -> list[Tensor]:
    """One step after the other."""
    caches = model.empty_caches(dtype)
    return [call(*step(model.of, name, dtype, caches))[0] for name in STEPS]


def error(y: Tensor, truth: Tensor) -> float:
    return float((y.double() - truth).norm() / truth.norm())


@torch.inference_mode()
def show(model: Model) -> None:
    """What it becomes at every step, and how exact it is."""
    for name in STEPS:
        given = step(model.of, name, torch.bfloat16, model.empty_caches(torch.bfloat16))
        report = fusion.explain(model, *given, options=OPTIONS)
        print(f"{name}: {report.launches[0]} launches became {report.launches[1]}")
        print("   ", ", ".join(f"{count} {op}" for op, count in sorted(report.ops.items())))
    compiled = torch.compile(model, backend="cann_fusion", options=OPTIONS, dynamic=False)
    plain, fused = (run(call, model, torch.bfloat16) for call in (model, compiled))
    exact = run(model.double(), model, torch.float64)
    for name, before, after, truth in zip(STEPS, plain, fused, exact, strict=True):
        print(f"{name}: relative error {error(after, truth):.2e} fused, {error(before, truth):.2e} plain")


SIZES = Sizes()


def build(of: Sizes = SIZES) -> Model:
    return Model(of, Indexer(of)).bfloat16().eval()


def main() -> None:
    torch.manual_seed(0)
    show(build())


if __name__ == "__main__":
    main()
