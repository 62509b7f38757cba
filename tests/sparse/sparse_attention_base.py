"""One attention block of the kind of DeepSeek-V3.2, of parts that are written in different ways, and its reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.corpus.base import activations, weights

B, S, T, P, N, D, R, E = 2, 6, 32, 9, 4, 16, 8, 12
HIDDEN, Q, C, HEADS, X, K = 40, 28, 24, 8, 16, 4
START = 5
EPS = 1e-6
SCALE = (D + R) ** -0.5
MODES = ("prefill", "chunk", "step", "grow")

SHAPES = {
    "q_a": (Q, HIDDEN), "q_norm": (Q,), "q_b": (N * (D + R), Q), "kv_a": (C + R, HIDDEN), "kv_norm": (C,),
    "kv_b": (N * (D + E), C), "o": (HIDDEN, N * E), "iq": (HEADS * X, Q), "ik": (X, HIDDEN), "ik_gain": (X,),
    "ik_bias": (X,), "iw": (HEADS, HIDDEN),
}  # fmt: skip


# parts, as they are where nothing else is tried ----------------------------------------------------------------------


def norm(x, gain):
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return gain * h.to(x.dtype)


def layer_norm(x, gain, bias):
    return F.layer_norm(x, (X,), gain, bias, EPS)


def pairs(x, cos, sin):
    """[B, S, N, R] in pairs of neighbours, rotated, in halves."""
    cos, sin = (each[..., : R // 2].unsqueeze(2) for each in (cos, sin))
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), -1)


def rotate_half(x):
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def halves(x, cos, sin):
    """[B, S, N, R] in halves, rotated."""
    return x * cos.unsqueeze(2) + rotate_half(x) * sin.unsqueeze(2)


def write(cache, rows, start):
    """[B, T, W] with rows [B, S, W] from `start` on."""
    return cache.index_copy_(1, start + torch.arange(rows.shape[1]), rows)


def expand(block, latent):
    """Keys [B, N, T, D] and values [B, N, T, E] of all heads."""
    heads = F.linear(latent, block.kv_b).view(*latent.shape[:2], N, D + E).transpose(1, 2)
    return heads.split((D, E), -1)


def join(k, rope):
    """Keys [B, N, T, D] and their shared rotated part [B, T, R] in one."""
    return torch.cat((k, rope.unsqueeze(1).expand(-1, N, -1, -1)), -1)


def see(s, t, start, x):
    """Where query i of [S] sees key j of [T]."""
    return torch.arange(t) <= (torch.arange(s) + start)[:, None]


def score(q, k, w):
    """Σ w relu(q k) [B, S, T] of q [B, S, N, X], k [B, T, X], w [B, S, N]."""
    products = F.relu(torch.matmul(q.float(), k.float().transpose(-1, -2).unsqueeze(1)) * X**-0.5)
    return torch.matmul((w.float() * HEADS**-0.5).unsqueeze(-2), products).squeeze(-2)


def choose(scores, seen):
    """The places [B, S, K] of the best keys."""
    return scores.masked_fill(~seen, -math.inf).topk(min(K, scores.shape[-1]), dim=-1).indices


def hide(places, seen, x):
    """A mask [B, 1, S, T] of the keys that are listed and seen."""
    listed = torch.zeros(*places.shape[:2], seen.shape[-1], dtype=torch.bool).scatter(-1, places, True)
    return (listed & seen).unsqueeze(1)


def attend(q, k, v, mask):
    """[B, N, S, E] of q, k [B, N, .., D + R] and v [B, N, T, E]."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=SCALE)


@dataclass(frozen=True)
class Parts:
    """How every part is written; `cache` says how a cache [B, T, W] lies."""

    norm: Callable[..., Tensor] = norm
    layer_norm: Callable[..., Tensor] = layer_norm
    rope: Callable[..., Tensor] = pairs
    index_rope: Callable[..., Tensor] = halves
    write: Callable[..., Tensor] = write
    expand: Callable[..., tuple[Tensor, Tensor]] = expand
    join: Callable[..., Tensor] = join
    see: Callable[..., Tensor] = see
    score: Callable[..., Tensor] = score
    choose: Callable[..., Tensor] = choose
    hide: Callable[..., Tensor] = hide
    attend: Callable[..., Tensor] = attend
    cache: Callable[[Tensor], Tensor] = lambda cache: cache


class Block(nn.Module):
    """Attention from the hidden states [B, S, H] on, with tables [B, S, R] and what `mode` keeps of former tokens."""

    def __init__(self, parts: Parts, mode: str) -> None:
        super().__init__()
        self.parts, self.mode = parts, mode
        for seed, (name, shape) in enumerate(SHAPES.items()):
            made = weights(seed, *shape) if len(shape) == 1 else activations(seed, *shape) * shape[-1] ** -0.5
            setattr(self, name, nn.Parameter(made, requires_grad=False))
        up_k, up_v = self.kv_b.view(N, D + E, C).split((D, E), 1)  # the same weight, for those who keep it otherwise
        kept = {"k_b": up_k.flatten(0, 1), "v_b": up_v.flatten(0, 1), "up_k": up_k, "up_v": up_v.mT}
        for name, made in kept.items():
            setattr(self, name, nn.Parameter(made.clone(), requires_grad=False))

    def forward(self, x, cos, sin, *state):
        p = self.parts
        b, s, _ = x.shape
        c = self.query_latent(x)
        q = F.linear(c, self.q_b).view(b, s, N, D + R)
        q = torch.cat((q[..., :D], p.rope(q[..., D:], cos, sin)), -1).transpose(1, 2)
        latent, rope = self.key_latent(x)
        latent, rope = p.norm(latent, self.kv_norm), p.rope(rope.unsqueeze(2), cos, sin).squeeze(2)
        key = p.layer_norm(F.linear(x, self.ik), self.ik_gain, self.ik_bias)
        key = self.index_turned(key.unsqueeze(2), cos, sin).squeeze(2)
        latent, rope, key, start = self.kept((latent, rope, key), state)
        seen = p.see(s, latent.shape[1], start, x)
        places = self.places(x, c, key, cos, sin, seen)
        y = self.attended(q, latent, rope, p.hide(places, seen, x))
        out = F.linear(y.transpose(1, 2).reshape(b, s, N * E), self.o)
        results = (out, *((latent, rope, key) if self.mode == "grow" else ()), *self.readers_of_results())
        return results if len(results) > 1 else out

    def readers_of_results(self):
        """Further results."""
        return ()

    def query_latent(self, x):
        return self.parts.norm(F.linear(x, self.q_a), self.q_norm)

    def key_latent(self, x):
        return F.linear(x, self.kv_a).split((C, R), -1)

    def index_turned(self, x, cos, sin):
        return torch.cat((self.parts.index_rope(x[..., :R], cos, sin), x[..., R:]), -1)

    def kept(self, rows, state):
        """Everything that is there of the latent, the rotated key and the indexer's key, and where `rows` stand."""
        if self.mode == "prefill":
            return *rows, 0
        if self.mode == "grow":
            return *(torch.cat((old, new), 1) for old, new in zip(state, rows, strict=True)), state[0].shape[1]
        *caches, start = state
        return *(self.parts.write(old, new, start) for old, new in zip(caches, rows, strict=True)), start

    def places(self, x, c, key, cos, sin, seen):
        query = self.index_turned(F.linear(c, self.iq).view(*x.shape[:2], HEADS, X), cos, sin)
        return self.parts.choose(self.parts.score(query, key, F.linear(x, self.iw)), seen)

    def attended(self, q, latent, rope, mask):
        k, v = self.parts.expand(self, latent)
        return self.parts.attend(q, self.parts.join(k, rope), v, mask)


@dataclass(frozen=True)
class Entry:
    """One way to write the block, or something that resembles it.

    Attributes:
        name: what is written otherwise.
        parts: how.
        prolog: how often the prolog must appear.
        indexer: how often the indexer must.
        sparse: how often sparse attention must.
        modes: in which modes this makes a difference.
        block: the module, where more than its parts is different.
        reason: text of the refusal, where less is fused.
        start: what the code is told of the first position of new tokens.
        tokens: how many of them there are, where there are several.
        batch: how many sequences.
    """

    name: str
    parts: Parts = Parts()
    prolog: int = 1
    indexer: int = 1
    sparse: int = 1
    modes: tuple[str, ...] = MODES
    block: type[Block] = Block
    reason: str = ""
    start: Callable[[int], Any] = torch.tensor
    tokens: int = S
    batch: int = B

    def expected(self, dtype: torch.dtype) -> tuple[int, int, int]:
        """How often prolog, indexer and sparse attention are called."""
        return self.prolog if dtype is torch.bfloat16 else 0, self.indexer, self.sparse

    def make(self, mode: str, dtype: torch.dtype) -> Block:
        """The code."""
        return self.block(self.parts, mode).to(dtype).eval()

    def inputs(self, mode: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Its arguments, with caches of their own."""
        tokens = 1 if mode in ("step", "grow") else self.tokens
        first = {"prefill": 0, "grow": P}.get(mode, START)
        base = (activations(40, self.batch, tokens, HIDDEN), *tables(self.batch, first, tokens))
        if mode == "prefill":
            return tuple(each.to(dtype) for each in base)
        size = P if mode == "grow" else T
        kept = tuple(activations(41 + number, self.batch, size, width) for number, width in enumerate((C, R, X)))
        if mode == "grow":
            return tuple(each.to(dtype) for each in (*base, *kept))
        caches = (self.parts.cache(each.to(dtype)).contiguous() for each in kept)
        return (*(each.to(dtype) for each in base), *caches, self.start(first))


def reference(block: Block, x: Tensor, cos: Tensor, sin: Tensor, *state: Any) -> tuple[Tensor, ...]:
    """The result and all that is kept, in float64, one query after the other."""
    turn = partial(rotated, cos=cos[..., None, : R // 2], sin=sin[..., None, : R // 2])
    c = normed(x @ block.q_a.T) * block.q_norm
    q = (c @ block.q_b.T).unflatten(-1, (N, D + R))
    both = x @ block.kv_a.T
    latent = normed(both[..., :C]) * block.kv_norm
    q_rope = turn(q[..., D::2], q[..., D + 1 :: 2])
    rope = turn(both[..., None, C::2], both[..., None, C + 1 :: 2]).squeeze(2)
    iq = (c @ block.iq.T).unflatten(-1, (HEADS, X))
    key = x @ block.ik.T
    key = F.layer_norm(key, (X,), block.ik_gain, block.ik_bias, EPS)[..., None, :]
    iq, key = (torch.cat((turn(each[..., : R // 2], each[..., R // 2 : R]), each[..., R:]), -1) for each in (iq, key))
    rows = (latent, rope, key.squeeze(2))
    kept, first = _kept(block.mode, rows, state)
    weights = x @ block.iw.T
    out = torch.zeros(*x.shape[:2], N * E, dtype=x.dtype)
    up_k, up_v = block.kv_b.unflatten(0, (N, D + E)).split((D, E), 1)
    for b in range(x.shape[0]):
        for i in range(x.shape[1]):
            seen = int(first[b]) + i + 1
            latent, rope, key = (each[b, :seen] for each in kept)
            listed = (weights[b, i] @ (iq[b, i] @ key.T).relu()).topk(min(K, seen)).indices
            k, v = (torch.einsum("tc,ndc->ntd", latent[listed], up) for up in (up_k, up_v))
            scores = (k @ q[b, i, :, :D, None]).squeeze(-1) + q_rope[b, i] @ rope[listed].T
            out[b, i] = ((scores * SCALE).softmax(-1)[:, None] @ v).flatten()
    return (out @ block.o.T, *kept)


def normed(x: Tensor) -> Tensor:
    """x over the root of its mean square."""
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def rotated(left: Tensor, right: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs (left, right) [.., R / 2], rotated, one after the other."""
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


def _kept(mode: str, rows: tuple[Tensor, ...], state: tuple[Any, ...]) -> tuple[list[Tensor], Tensor]:
    """All that is there of former and new tokens [B, T, W], and the position of the first new one [B]."""
    batch, count = rows[0].shape[:2]
    if mode == "prefill":
        return list(rows), torch.zeros(batch)
    if mode == "grow":
        return [torch.cat(each, 1) for each in zip(state, rows, strict=True)], torch.full((batch,), state[0].shape[1])
    *caches, start = state
    first = torch.as_tensor(start).expand(batch)
    whole = [cache.reshape(batch, T, -1).clone() for cache in caches]
    for cache, new in zip(whole, rows, strict=True):
        for b in range(batch):
            cache[b, int(first[b]) : int(first[b]) + count] = new[b]
    return whole, first


def tables(batch: int, first: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B, S, R] of consecutive positions in float64, rounded to what bfloat16 holds."""
    angles = torch.arange(first, first + tokens)[:, None] / 30.0 ** (torch.arange(R // 2) * 2 / R)
    twice = torch.cat((angles, angles), -1).expand(batch, -1, -1)
    return twice.cos().bfloat16().double().contiguous(), twice.sin().bfloat16().double().contiguous()


UNFUSED = {"prolog": 0, "indexer": 0, "sparse": 0}


def entry(name: str, modes: tuple[str, ...] = MODES, **parts: Any) -> Entry:
    """The block with other parts."""
    own = {each.name for each in fields(Entry)}
    more = {key: parts.pop(key) for key in list(parts) if key in own}
    return Entry(name, Parts(**parts), modes=modes, **more)
