"""In the manner of black-forest-labs/flux and CompVis/latent-diffusion: attention over pictures and their captions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Made, Piece, linear, normal

DIM, HEADS, D = 512, 8, 64
PICTURE, CAPTION, WORDS = 24, 8, 256
AXES = (16, 24, 24)
"""How many lanes of a head are turned by each of three positions."""


def matrices(positions: Tensor, lanes: int) -> Tensor:
    """[[cos, -sin], [sin, cos]] of each pair of lanes, float32 [.., lanes / 2, 2, 2]."""
    speed = 1.0 / 10000 ** (torch.arange(0, lanes, 2, dtype=torch.float64, device=positions.device) / lanes)
    turned = torch.einsum("...n,d->...nd", positions, speed)
    rows = torch.stack([turned.cos(), -turned.sin(), turned.sin(), turned.cos()], dim=-1)
    return rows.reshape(*rows.shape[:-1], 2, 2).float()


def rotated(x: Tensor, turning: Tensor) -> Tensor:
    pairs = x.float().reshape(*x.shape[:-1], -1, 1, 2)
    return (turning[..., 0] * pairs[..., 0] + turning[..., 1] * pairs[..., 1]).reshape(*x.shape).type_as(x)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(D) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + 1e-6)).to(x.dtype) * self.scale


class Stream(nn.Module):
    """What a picture, or its caption, has of its own in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = (
            nn.LayerNorm(DIM, elementwise_affine=False, eps=1e-6),
            linear(DIM, 3 * DIM, True),
            linear(DIM, DIM, True),
        )
        self.modulated, self.query_norm, self.key_norm = linear(DIM, 3 * DIM, True), Norm(), Norm()

    def asked(self, x: Tensor, vector: Tensor) -> tuple[Tensor, ...]:
        shift, scale, gate = self.modulated(F.silu(vector))[:, None].chunk(3, dim=-1)
        qkv = self.qkv((1 + scale) * self.norm(x) + shift).view(x.shape[0], -1, 3, HEADS, D)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        return self.query_norm(q).to(v), self.key_norm(k).to(v), v, gate


class Double(nn.Module):
    """A block of two streams that attend to both, turned by one position or by three."""

    def __init__(self, axes: tuple[int, ...]) -> None:
        super().__init__()
        self.axes, self.picture, self.caption = axes, Stream(), Stream()

    def forward(self, picture: Tensor, caption: Tensor, vector: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        b = picture.shape[0]
        turning = torch.cat([matrices(places[..., n], lanes) for n, lanes in enumerate(self.axes)], dim=-3)[:, None]
        *of_caption, caption_gate = self.caption.asked(caption, vector)
        *of_picture, picture_gate = self.picture.asked(picture, vector)
        q, k, v = (torch.cat(both, dim=2) for both in zip(of_caption, of_picture, strict=True))
        out = F.scaled_dot_product_attention(rotated(q, turning), rotated(k, turning), v)
        out = out.permute(0, 2, 1, 3).reshape(b, -1, DIM)
        mine, other = out[:, caption.shape[1] :], out[:, : caption.shape[1]]
        return picture + picture_gate * self.picture.proj(mine), caption + caption_gate * self.caption.proj(other)


def double(dtype: torch.dtype, axes: tuple[int, ...]) -> Made:
    places = torch.randint(0, 9, (1, CAPTION + PICTURE, len(axes))).double()
    given = normal(dtype, 2, PICTURE, DIM), normal(dtype, 2, CAPTION, DIM), normal(dtype, 2, DIM)
    return Double(axes).to(dtype), (*given, places)


class Cross(nn.Module):
    """Attention of a picture to words, heads in the batch, by sums over named dims."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = linear(DIM, DIM), linear(WORDS, DIM), linear(WORDS, DIM)
        self.to_out = linear(DIM, DIM, True)

    def forward(self, x: Tensor, words: Tensor, mask: Tensor | None = None) -> Tensor:
        b, s, _ = x.shape
        made = (self.to_q(x), self.to_k(words), self.to_v(words))
        q, k, v = (each.view(b, -1, HEADS, D).permute(0, 2, 1, 3).reshape(b * HEADS, -1, D) for each in made)
        scores = torch.einsum("b i d, b j d -> b i j", q, k) * D**-0.5
        if mask is not None:
            seen = mask.reshape(b, -1)[:, None].repeat(1, HEADS, 1).reshape(b * HEADS, 1, -1)
            scores.masked_fill_(~seen, -torch.finfo(scores.dtype).max)
        out = torch.einsum("b i j, b j d -> b i d", scores.softmax(dim=-1), v)
        return self.to_out(out.view(b, HEADS, s, D).permute(0, 2, 1, 3).reshape(b, s, DIM))


def cross(dtype: torch.dtype, masked: bool) -> Made:
    mask = (torch.arange(16)[None] < torch.tensor([[16], [9]]),) if masked else ()
    return Cross().to(dtype), (normal(dtype, 2, PICTURE, DIM), normal(dtype, 2, 16, WORDS), *mask)


FLUX, LATENT = "black-forest-labs/flux", "CompVis/latent-diffusion"
PIECES = (
    Piece(FLUX, "block of two streams, turned by one position", lambda dtype: double(dtype, axes=(D,))),
    Piece(FLUX, "block of two streams, turned by three positions", lambda dtype: double(dtype, axes=AXES)),
    Piece(LATENT, "attention to words", lambda dtype: cross(dtype, masked=False)),
    Piece(LATENT, "attention to words, masked", lambda dtype: cross(dtype, masked=True)),
)
