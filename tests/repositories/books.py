"""In the manner of rasbt/LLMs-from-scratch: on caches, groups, windows, latents, sparse attention, experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .base import Made, Piece, linear, normal

DIM, HEADS, GROUPS, D, ROOM = 512, 8, 2, 64, 96


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(DIM)), nn.Parameter(torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.var(dim=-1, keepdim=True, unbiased=False)
        return self.scale * ((x - mean) / torch.sqrt(variance + 1e-5)) + self.shift


class Gelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        root = torch.sqrt(torch.tensor(2.0 / torch.pi))
        return 0.5 * x * (1 + torch.tanh(root * (x + 0.044715 * torch.pow(x, 3))))


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.att, self.norm1, self.norm2 = attention, Norm(), Norm()
        self.ff = nn.Sequential(linear(DIM, 4 * DIM, True), Gelu(), linear(4 * DIM, DIM, True))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, *cache) -> Tensor:
        x = self.drop(self.att(self.norm1(x), *cache)) + x
        return self.drop(self.ff(self.norm2(x))) + x


class First(nn.Module):
    """Chapter 3: no cache; the mask is a buffer that is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.W_query, self.W_key, self.W_value = linear(DIM, DIM), linear(DIM, DIM), linear(DIM, DIM)
        self.out_proj, self.dropout = linear(DIM, DIM, True), nn.Dropout(0.1)
        self.register_buffer("mask", torch.triu(torch.ones(ROOM, ROOM), diagonal=1))

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        k, q, v = (each(x).view(b, s, HEADS, D).transpose(1, 2) for each in (self.W_key, self.W_query, self.W_value))
        scores = q @ k.transpose(2, 3)
        scores.masked_fill_(self.mask.bool()[:s, :s], -torch.inf)
        weights = self.dropout(torch.softmax(scores / k.shape[-1] ** 0.5, dim=-1))
        return self.out_proj((weights @ v).transpose(1, 2).contiguous().view(b, s, DIM))


class Cached(nn.Module):
    """Chapter 4: a cache of fixed room behind a pointer, and a mask of shifted positions."""

    def __init__(self) -> None:
        super().__init__()
        self.W_query, self.W_key, self.W_value = linear(DIM, DIM), linear(DIM, DIM), linear(DIM, DIM)
        self.out_proj = linear(DIM, DIM, True)

    def forward(self, x: Tensor, cache_k: Tensor, cache_v: Tensor, pointer: int) -> Tensor:
        b, s, _ = x.shape
        k, v, q = (each(x).view(b, s, HEADS, D).transpose(1, 2) for each in (self.W_key, self.W_value, self.W_query))
        if pointer + s > cache_k.shape[2]:
            over = pointer + s - cache_k.shape[2]
            cache_k[:, :, :-over, :] = cache_k[:, :, over:, :].clone()
            cache_v[:, :, :-over, :] = cache_v[:, :, over:, :].clone()
            pointer -= over
        cache_k[:, :, pointer : pointer + s, :] = k
        cache_v[:, :, pointer : pointer + s, :] = v
        keys, values = cache_k[:, :, : pointer + s, :], cache_v[:, :, : pointer + s, :]
        scores = q @ keys.transpose(2, 3)
        t = scores.size(-1)
        if s == t:
            hidden = torch.triu(torch.ones(s, t, device=x.device, dtype=torch.bool), diagonal=1)
        else:
            row, column = torch.arange(s, device=x.device).unsqueeze(1), torch.arange(t, device=x.device).unsqueeze(0)
            hidden = row + (t - s) < column
        scores.masked_fill_(hidden.unsqueeze(0).unsqueeze(0), -torch.inf)
        weights = torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1)
        return self.out_proj((weights @ values).transpose(1, 2).contiguous().view(b, s, DIM))


class Grouped(nn.Module):
    """The chapter on grouped heads, and with a window the one on windows; past keys are joined."""

    def __init__(self, groups: int = GROUPS, window: int = 0) -> None:
        super().__init__()
        self.groups, self.window = groups, window
        self.W_query, self.W_key, self.W_value = linear(DIM, DIM), linear(DIM, groups * D), linear(DIM, groups * D)
        self.out_proj = linear(DIM, DIM)

    def forward(self, x: Tensor, past_k: Tensor | None = None, past_v: Tensor | None = None, start: int = 0) -> Tensor:
        b, s, _ = x.shape
        q = self.W_query(x).view(b, s, HEADS, D).transpose(1, 2)
        k = self.W_key(x).view(b, s, self.groups, D).transpose(1, 2)
        v = self.W_value(x).view(b, s, self.groups, D).transpose(1, 2)
        if past_k is not None and past_v is not None:
            k, v = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)
        k = k.repeat_interleave(HEADS // self.groups, dim=1)
        v = v.repeat_interleave(HEADS // self.groups, dim=1)
        scores = q @ k.transpose(2, 3)
        here = torch.arange(start, start + s, device=x.device, dtype=torch.long).unsqueeze(-1)
        there = torch.arange(k.shape[-2], device=x.device, dtype=torch.long).unsqueeze(0)
        if self.window:
            distance = here - there
            hidden = (distance < 0) | (distance >= self.window)
        else:
            hidden = here < there
        scores = scores.masked_fill(hidden, -torch.inf)
        weights = torch.softmax(scores / k.shape[-1] ** 0.5, dim=-1)
        return self.out_proj((weights @ v).transpose(1, 2).contiguous().view(b, s, DIM))


class Latent(nn.Module):
    """The chapter on latents: keys and values are projected from all of the latent that was kept, without rotation."""

    C = 512

    def __init__(self) -> None:
        super().__init__()
        self.W_query, self.W_DKV = linear(DIM, DIM), linear(DIM, self.C)
        self.W_UK, self.W_UV = linear(self.C, DIM), linear(self.C, DIM)
        self.out_proj = linear(DIM, DIM, True)

    def forward(self, x: Tensor, past: Tensor | None = None, start: int = 0) -> Tensor:
        b, s, _ = x.shape
        queries, fresh = self.W_query(x), self.W_DKV(x)
        latent = fresh if past is None else torch.cat([past, fresh], dim=1)
        keys, values = self.W_UK(latent), self.W_UV(latent)
        queries, keys, values = (
            each.view(b, each.shape[1], HEADS, D).transpose(1, 2).contiguous() for each in (queries, keys, values)
        )
        scores = torch.matmul(queries, keys.transpose(-2, -1))
        here = torch.arange(start, start + s, device=x.device, dtype=torch.long)
        there = torch.arange(keys.shape[-2], device=x.device, dtype=torch.long)
        scores.masked_fill_(here.unsqueeze(-1) < there.unsqueeze(0), -torch.inf)
        weights = torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1)
        return self.out_proj((weights @ values).transpose(1, 2).contiguous().view(b, s, DIM))


class Sparse(nn.Module):
    """The chapter on sparse attention: an index of softmaxed weights chooses keys, the others are hidden."""

    def __init__(self, best: int = 16) -> None:
        super().__init__()
        self.best = best
        self.W_query, self.W_key, self.W_value = linear(DIM, DIM), linear(DIM, DIM), linear(DIM, DIM)
        self.W_q_index, self.W_k_index, self.W_weights = linear(DIM, 4 * D), linear(DIM, D), linear(DIM, 4)
        self.out_proj = linear(DIM, DIM, True)

    def chosen(self, x: Tensor, mask: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k = self.W_q_index(x).view(b, s, 4, D), self.W_k_index(x)
        raw = torch.relu(torch.einsum("bthd,bsd->bths", q, k) * D**-0.5)
        scores = torch.einsum("bth,bths->bts", self.W_weights(x).softmax(dim=-1), raw)
        return (scores + mask).topk(min(self.best, k.shape[1]), dim=-1).indices

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (each(x).view(b, s, HEADS, D).transpose(1, 2) for each in (self.W_query, self.W_key, self.W_value))
        scores = q @ k.transpose(2, 3)
        here = torch.arange(s, device=x.device)
        causal = torch.zeros(s, s, device=x.device, dtype=scores.dtype)
        causal.masked_fill_(here.unsqueeze(-1) < here.unsqueeze(0), float("-inf"))
        sparse = torch.full((b, s, s), float("-inf"), device=x.device, dtype=scores.dtype)
        sparse.scatter_(-1, self.chosen(x, causal), 0.0)
        scores = scores + (causal.unsqueeze(0) + sparse).unsqueeze(1)
        weights = torch.softmax(scores / D**0.5, dim=-1)
        return self.out_proj((weights @ v).transpose(1, 2).contiguous().view(b, s, DIM))


def block(dtype: torch.dtype, attention: nn.Module, s: int) -> Made:
    return Block(attention).to(dtype), (normal(dtype, 2, s, DIM),)


def cached(dtype: torch.dtype, s: int, pointer: int) -> Made:
    caches = normal(dtype, 2, HEADS, ROOM, D), normal(dtype, 2, HEADS, ROOM, D)
    return Block(Cached()).to(dtype), (normal(dtype, 2, s, DIM), *caches, pointer)


def joined(dtype: torch.dtype, s: int, past: int, **how) -> Made:
    kept = normal(dtype, 2, GROUPS, past, D), normal(dtype, 2, GROUPS, past, D)
    return Block(Grouped(**how)).to(dtype), (normal(dtype, 2, s, DIM), *kept, past)


def latent(dtype: torch.dtype, s: int, past: int) -> Made:
    return Block(Latent()).to(dtype), (normal(dtype, 2, s, DIM), normal(dtype, 2, past, Latent.C), past)


class Mixture(nn.Module):
    """Every expert is given all tokens; columns of weights are put among zeros one after the other."""

    def __init__(self, experts: int = 8, chosen: int = 2) -> None:
        super().__init__()
        self.chosen, self.gate = chosen, linear(DIM, experts)
        sizes = ((DIM, 2 * D), (DIM, 2 * D), (2 * D, DIM))
        self.fc1, self.fc2, self.fc3 = (nn.ModuleList(linear(*size) for _ in range(experts)) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x)
        best, places = torch.topk(scores, self.chosen, dim=-1)
        shares = torch.softmax(best, dim=-1)
        layers = zip(self.fc1, self.fc2, self.fc3, strict=True)
        given = [three(nn.functional.silu(one(x)) * two(x)).unsqueeze(-2) for one, two, three in layers]
        weights = torch.zeros_like(scores)
        for n in range(self.chosen):
            weights.scatter_(-1, places[..., n : n + 1], shares[..., n : n + 1])
        return (weights.unsqueeze(-1) * torch.cat(given, dim=-2)).sum(dim=-2)


class Routed(nn.Module):
    """The chosen logits put among -inf; experts with biases, each given all tokens."""

    def __init__(self, experts: int = 4, chosen: int = 2) -> None:
        super().__init__()
        self.chosen, self.route = chosen, linear(DIM, experts, True)
        self.experts = nn.ModuleList(
            nn.Sequential(linear(DIM, 2 * DIM, True), nn.ReLU(), linear(2 * DIM, DIM, True), nn.Dropout(0.1))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        logits = self.route(x)
        best, places = logits.topk(self.chosen, dim=-1)
        weights = torch.full_like(logits, float("-inf")).scatter(-1, places, best).softmax(dim=-1)
        total = torch.zeros_like(x)
        for n, expert in enumerate(self.experts):
            total = total + expert(x) * weights[..., n].unsqueeze(-1)
        return total


def mixture(dtype: torch.dtype, made: nn.Module) -> Made:
    return made.to(dtype), (normal(dtype, 2, 6, DIM),)


NAME = "rasbt/LLMs-from-scratch"
PIECES = (
    Piece(NAME, "block", lambda dtype: block(dtype, First(), 24)),
    Piece(NAME, "block with a cache, prefill", lambda dtype: cached(dtype, 24, 0)),
    Piece(NAME, "block with a cache, decode", lambda dtype: cached(dtype, 1, 40)),
    Piece(NAME, "block with a cache, a prompt behind another", lambda dtype: cached(dtype, 8, 40)),
    Piece(NAME, "block with a cache that is full", lambda dtype: cached(dtype, 1, ROOM)),
    Piece(NAME, "block with grouped heads", lambda dtype: block(dtype, Grouped(), 24)),
    Piece(NAME, "block with grouped heads, decode", lambda dtype: joined(dtype, 1, 40)),
    Piece(NAME, "block within a window", lambda dtype: block(dtype, Grouped(window=8), 24)),
    Piece(NAME, "block within a window, decode", lambda dtype: joined(dtype, 1, 40, window=8)),
    Piece(NAME, "block with a latent", lambda dtype: block(dtype, Latent(), 24)),
    Piece(NAME, "block with a latent, decode", lambda dtype: latent(dtype, 1, 256)),
    Piece(NAME, "block with sparse attention", lambda dtype: block(dtype, Sparse(), 48)),
    Piece(NAME, "experts, all of them", lambda dtype: mixture(dtype, Mixture()), attentions=0),
    Piece("AviSoori1x/makeMoE", "router and experts", lambda dtype: mixture(dtype, Routed()), attentions=0),
)
