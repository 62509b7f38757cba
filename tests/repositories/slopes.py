"""In the manner of mosaicml/llm-foundry, allenai/OLMo and microsoft/DeBERTa: biases of distances, masks beside them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Made, Piece, linear, normal

DIM, HEADS, D = 512, 8, 64


def slopes(heads: int) -> Tensor:
    steps = torch.arange(1, heads + 1, dtype=torch.float32).mul(8 / heads)
    return (1.0 / torch.pow(2, steps)).view(1, heads, 1, 1)


class Mosaic(nn.Module):
    """MPT: slopes of a whole context, cut to the keys; padding filled into them, the order filled into the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.Wqkv, self.out_proj = linear(DIM, 3 * DIM), linear(DIM, DIM)

    def bias(self, x: Tensor, valid: Tensor, longest: int = 64) -> Tensor:
        whole = (torch.arange(1 - longest, 1, dtype=torch.int32).view(1, 1, 1, longest) * slopes(HEADS)).to(x.dtype)
        keys = valid.shape[-1]
        return whole[..., max(0, whole.size(-1) - keys) :].masked_fill(
            ~valid.view(-1, 1, 1, keys), torch.finfo(x.dtype).min
        )

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.Wqkv(x).chunk(3, dim=2)
        q, v = (each.view(b, s, HEADS, D).transpose(1, 2) for each in (q, v))
        k = k.view(b, s, HEADS, D).permute(0, 2, 3, 1)
        scores = q.matmul(k) * (1 / math.sqrt(D)) + self.bias(x, valid)
        order = scores.new_ones(s, s, dtype=torch.float32).tril().to(torch.bool).logical_not()
        scores = scores.masked_fill(order.view(1, 1, s, s), torch.finfo(q.dtype).min)
        y = torch.softmax(scores, dim=-1).to(v.dtype).matmul(v)
        return self.out_proj(y.transpose(1, 2).reshape(b, s, DIM))


class Wide(nn.Module):
    """MPT in transformers: slopes of a whole context stay float32 beside narrow scores."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.Wqkv, self.out_proj, self.heads = linear(DIM, 3 * DIM), linear(DIM, DIM), heads

    def forward(self, x: Tensor, valid: Tensor, longest: int = 64) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (each.reshape(b, s, self.heads, -1).transpose(1, 2) for each in self.Wqkv(x).chunk(3, dim=2))
        whole = (torch.arange(1 - longest, 1, dtype=torch.int32).view(1, 1, 1, longest) * slopes(self.heads)).squeeze(0)
        scores = torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        scores = scores + whole[:, max(0, whole.size(1) - s) :, max(0, whole.size(2) - s) :]
        order = torch.ones(s, s, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(order | ~valid[:, None, None], torch.finfo(q.dtype).min)
        y = F.softmax(scores.float(), dim=-1).to(v.dtype) @ v
        return self.out_proj(y.permute(0, 2, 1, 3).contiguous().view(b, s, -1))


def wide(dtype: torch.dtype, heads: int = 8) -> Made:
    return Wide(heads).to(dtype), (normal(dtype, 2, 24, DIM), torch.arange(24) >= torch.tensor([[5], [0]]))


def sixteen(dtype: torch.dtype) -> Made:
    return wide(dtype, 16)


def mosaic(dtype: torch.dtype) -> Made:
    return Mosaic().to(dtype), (normal(dtype, 2, 24, DIM), torch.arange(24) >= torch.tensor([[5], [0]]))


class Olmo(nn.Module):
    """The order and slopes joined in float32, cast, and handed to torch's operator."""

    def __init__(self) -> None:
        super().__init__()
        self.att_proj, self.attn_out = linear(DIM, 3 * DIM), linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (each.view(b, s, HEADS, D).transpose(1, 2) for each in self.att_proj(x).split((DIM, DIM, DIM), -1))
        here = torch.arange(1 - s, 1, dtype=torch.float)
        distances = (here.view(1, 1, 1, s) - here.view(1, 1, s, 1)).abs().mul(-1)
        order = torch.triu(torch.ones(s, s, dtype=torch.float), diagonal=1)
        order.masked_fill_(order == 1, torch.finfo(order.dtype).min)
        bias = (order.view(1, 1, s, s) + distances * slopes(HEADS)).to(x.dtype)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=0.0)
        return self.attn_out(y.transpose(1, 2).contiguous().view(b, s, DIM))


class Pairs(nn.Module):
    """DeBERTa without its tables: a mask of pairs lowers the scores, and makes the weights 0."""

    def __init__(self) -> None:
        super().__init__()
        self.query_proj, self.key_proj, self.value_proj = (linear(DIM, DIM, True) for _ in range(3))

    def heads(self, x: Tensor) -> Tensor:
        return x.view(*x.size()[:-1], HEADS, -1).permute(0, 2, 1, 3).contiguous().view(-1, x.size(1), D)

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        wide = valid.unsqueeze(1).unsqueeze(2)
        gone = ~(wide * wide.squeeze(-2).unsqueeze(-1)).to(torch.bool)
        q, k, v = self.heads(self.query_proj(x)), self.heads(self.key_proj(x)), self.heads(self.value_proj(x))
        scores = torch.bmm(q, k.transpose(-1, -2) / math.sqrt(D)).view(-1, HEADS, q.size(1), k.size(1))
        shares = torch.softmax(scores.masked_fill(gone, torch.finfo(q.dtype).min), -1).masked_fill(gone, 0)
        y = torch.bmm(shares.view(-1, q.size(1), k.size(1)), v).view(-1, HEADS, q.size(1), D)
        return y.permute(0, 2, 1, 3).contiguous().view(*x.size())


def pairs(dtype: torch.dtype) -> Made:
    return Pairs().to(dtype), (normal(dtype, 2, 24, DIM), (torch.arange(24) < torch.tensor([[19], [24]])).long())


PIECES = (
    Piece("mosaicml/llm-foundry", "attention with slopes, padded on the left", mosaic, why="bias"),
    Piece("huggingface/transformers", "MPT, slopes of eight heads", wide),
    Piece("huggingface/transformers", "MPT, slopes of 16 heads", sixteen, why="rounded from float32"),
    Piece(
        "allenai/OLMo",
        "attention with slopes",
        lambda dtype: (Olmo().to(dtype), (normal(dtype, 2, 24, DIM),)),
        why="bias",
    ),
    Piece("microsoft/DeBERTa", "attention of pairs", pairs),
)
