"""Models of the tests of ports: blocks as people write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN, HEADS, WIDTH, TOKENS = 256, 2, 128, 16


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(1 + torch.randn(HIDDEN) / 8)

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * h.to(x.dtype)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Linear(HIDDEN, 512, bias=False) for _ in range(2))
        self.down = nn.Linear(512, HIDDEN)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Residual add, norm and feed-forward; counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp = Norm(), Mlp()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x, residual):
        residual = x + residual
        self.count += 1
        return self.mlp(self.norm(residual)), residual


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(HIDDEN, HEADS * WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(HEADS * WIDTH, HIDDEN, bias=False)

    def forward(self, x, cache, position):
        query, key, value = (each(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for each in (self.q, self.k, self.v))
        cache["keys"].index_copy_(2, position, key)
        cache["values"].index_copy_(2, position, value)
        seen = torch.arange(TOKENS) <= position[:, None]
        attended = F.scaled_dot_product_attention(query, cache["keys"], cache["values"], seen)
        return self.out(attended.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.mlp = Attention(), Mlp()
        self.before, self.behind = Norm(), Norm()

    def forward(self, x, cache, position):
        x = x + self.attention(self.before(x), cache, position)
        return x + self.mlp(self.behind(x))


class Stack(nn.Module):
    """Layers over a list of caches, one token a call."""

    def __init__(self, depth: int):
        super().__init__()
        self.embed = nn.Embedding(64, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.norm = Norm()

    def forward(self, tokens, caches, position):
        x = self.embed(tokens)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache, position)
        return F.linear(self.norm(x), self.embed.weight)


def stack(depth: int = 4) -> tuple[Stack, list]:
    """The model with its arguments, in bfloat16."""
    caches = [
        {name: torch.randn(1, HEADS, TOKENS, WIDTH).bfloat16() for name in ("keys", "values")} for _ in range(depth)
    ]
    return seeded(Stack, depth), [torch.tensor([[5]]), caches, torch.tensor([7])]


def seeded(make, *args):
    torch.manual_seed(0)
    return make(*args).bfloat16().eval()


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def spelt(x, y, at, mask, cache):
    """Calls that stay: each is written as a person writes it."""
    table = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    first, second = x.split([3, 5], -1)
    z = torch.cat((second, first), -1)[:, 1:, ::2]
    chosen, order = x.float().topk(2, dim=-1, largest=False)
    cache[:, at] = y[:, :1] * 2 + 1
    total = (x.float() / 3 - y.float()).pow(2).sum(-1, keepdim=True).sqrt().clamp(min=0.5)
    hidden = x.masked_fill(mask, float("-inf")).softmax(-1).nan_to_num(0.0)
    where = torch.where(mask & ~mask.roll(1, 0), x, -y)
    normed = F.layer_norm(x.float(), (8,), eps=1e-3)
    steps = torch.arange(4, dtype=torch.float32)[None].expand(2, 4)
    full = torch.full((2, 2), 3.5) @ table + steps[..., 2:]
    ints = at // 2 + at % 3 - (at > 1).to(torch.int64)
    taken = x[0][torch.tensor([1, 0])].gather(1, order[0, :2])
    other = F.gelu(x.float(), approximate="tanh").amax(dim=(0, 2)), x.cumsum(1).to(torch.float16), y[..., None, 3]
    return z, chosen, total, hidden, where, normed, full, ints, taken, *other
