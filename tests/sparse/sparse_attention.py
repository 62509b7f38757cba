"""Sparse attention over a latent, as people write its parts: one part after the other, all else as in the base."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .sparse_attention_base import EPS, C, D, E, N, R, X, entry, halves

KEPT = ("chunk", "step")


# keys and values of all heads ----------------------------------------------------------------------------------------


def joined_positions_first(k, rope):
    rope = rope.unsqueeze(2).expand(-1, -1, N, -1)
    return torch.cat((k.transpose(1, 2), rope), -1).transpose(1, 2)


def new_empty_copied(k, rope):
    keys = k.new_empty(*k.shape[:-1], D + R)
    keys[..., :D].copy_(k)
    keys[..., D:].copy_(rope.unsqueeze(1).expand(-1, N, -1, -1))
    return keys


def empty_assigned(k, rope):
    keys = torch.empty(*k.shape[:-1], D + R, dtype=k.dtype)
    keys[..., D:] = rope[:, None]
    keys[..., :D] = k
    return keys


def zeros_assigned(k, rope):
    keys = torch.zeros(*k.shape[:-1], D + R, dtype=k.dtype)
    keys[:, :, :, :D] = k
    keys[:, :, :, D:] = rope[:, None]
    return keys


def padded_and_added(k, rope):
    return F.pad(k, (0, R)) + F.pad(rope.unsqueeze(1), (D, 0))


def repeated(k, rope):
    return torch.cat([k, rope.unsqueeze(1).repeat(1, N, 1, 1)], dim=-1)


def two_linears(block, latent):
    b, t, _ = latent.shape
    k = F.linear(latent, block.k_b).view(b, t, N, D).transpose(1, 2)
    return k, F.linear(latent, block.v_b).view(b, t, N, E).transpose(1, 2)


def split_first(block, latent):
    heads = F.linear(latent, block.kv_b).view(*latent.shape[:2], N, D + E)
    k, v = heads.split([D, E], dim=-1)
    return k.transpose(1, 2), v.transpose(1, 2)


def sliced(block, latent):
    heads = (latent @ block.kv_b.T).unflatten(-1, (N, -1)).permute(0, 2, 1, 3)
    return heads[..., :D], heads[..., D:]


def einsum_of_weights(block, latent):
    up = block.kv_b.view(N, D + E, C)
    return torch.einsum("btc,ndc->bntd", latent, up[:, :D]), torch.einsum("btc,nec->bnte", latent, up[:, D:])


def einsum_of_both(block, latent):
    heads = torch.einsum("btc,ndc->bntd", latent, block.kv_b.view(N, D + E, C))
    return heads.split((D, E), dim=-1)


def einsum_behind(block, latent):
    heads = torch.einsum("btc,ndc->btnd", latent, block.kv_b.unflatten(0, (N, -1)))
    k, v = torch.split(heads, [D, E], dim=-1)
    return k.permute(0, 2, 1, 3), v.permute(0, 2, 1, 3)


def matmul_of_weights(block, latent):
    up = block.kv_b.view(N, D + E, C).transpose(1, 2)
    return latent.unsqueeze(1) @ up[..., :D], latent.unsqueeze(1) @ up[..., D:]


def weights_of_heads(block, latent):
    return torch.einsum("btc,ndc->bntd", latent, block.up_k), torch.einsum("btc,nce->bnte", latent, block.up_v)


def flat_rows(block, latent):
    b, t, _ = latent.shape
    heads = (latent.reshape(b * t, C) @ block.kv_b.t()).view(b, t, N, D + E).transpose(1, 2)
    return heads.split((D, E), -1)


# rotation and norms --------------------------------------------------------------------------------------------------


def sorted_then_halves(x, cos, sin):
    b, s, n, r = x.shape
    return halves(x.view(b, s, n, r // 2, 2).transpose(4, 3).reshape(b, s, n, r), cos, sin)


def sorted_by_slices(x, cos, sin):
    return halves(torch.cat((x[..., ::2], x[..., 1::2]), -1), cos, sin)


def sorted_by_unflatten(x, cos, sin):
    return halves(x.unflatten(-1, (-1, 2)).mT.flatten(-2), cos, sin)


def heads_before(x, cos, sin):
    b, s, n, r = x.shape
    x = x.transpose(1, 2).view(b, n, s, r // 2, 2).transpose(4, 3).reshape(b, n, s, r)
    first, second = x[..., : r // 2], x[..., r // 2 :]
    turned = torch.cat((-second, first), dim=-1)
    return (x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)).transpose(1, 2)


def stacked_pairs(x, cos, sin):
    cos, sin = (each[:, :, None, : R // 2] for each in (cos, sin))
    even, odd = x.reshape(*x.shape[:-1], R // 2, 2).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -2).flatten(-2)


def turned_in_float(x, cos, sin):
    return sorted_then_halves(x.float(), cos.float(), sin.float()).to(x.dtype)


def gathered_lanes(x, cos, sin):
    order = torch.arange(R).view(R // 2, 2).t().reshape(-1)
    return halves(x[..., order], cos, sin)


def rms_norm(x, gain):
    return F.rms_norm(x, x.shape[-1:], gain, EPS)


def norm_all_in_float(x, gain):
    h = x.float()
    return (h / torch.sqrt(h.square().mean(-1, keepdim=True) + EPS) * gain.float()).to(x.dtype)


def layer_norm_in_float(x, gain, bias):
    return F.layer_norm(x.float(), (X,), gain.float(), bias.float(), EPS).type_as(x)


def layer_norm_by_hand(x, gain, bias):
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + EPS) * gain + bias


# caches --------------------------------------------------------------------------------------------------------------


def places_of(rows, start):
    return start + torch.arange(rows.shape[1])


def written_one_head(cache, rows, start):
    return cache.index_copy_(2, places_of(rows, start), rows.unsqueeze(1)).squeeze(1)


def written_one_head_behind(cache, rows, start):
    return cache.index_copy_(1, places_of(rows, start), rows.unsqueeze(2)).squeeze(2)


def put_in_place(cache, rows, start):
    cache[:, places_of(rows, start)] = rows
    return cache


def put_one_head(cache, rows, start):
    cache[:, :, places_of(rows, start)] = rows.unsqueeze(1)
    return cache[:, 0]


def scattered(cache, rows, start):
    index = places_of(rows, start)[None, :, None].expand_as(rows)
    return cache.scatter_(1, index, rows)


def put_by_batch(cache, rows, start):
    batch = torch.arange(rows.shape[0])[:, None]
    cache[batch, places_of(rows, start)[None]] = rows
    return cache


def put_ragged(cache, rows, start):
    cache[torch.arange(rows.shape[0])[:, None], start[:, None] + torch.arange(rows.shape[1])] = rows
    return cache


def see_ragged(s, t, start, x):
    at = start if isinstance(start, torch.Tensor) else torch.tensor([start])
    return torch.arange(t) <= (at[:, None] + torch.arange(s))[..., None]


def ragged(first):
    return torch.tensor([first, first - 2])


ONE_HEAD = {"cache": lambda cache: cache.unsqueeze(1)}

SPELLINGS = (
    entry("plain"),
    entry("joined_positions_first", join=joined_positions_first),
    entry("new_empty_copied", join=new_empty_copied),
    entry("empty_assigned", join=empty_assigned),
    entry("zeros_assigned", join=zeros_assigned),
    entry("padded_and_added", join=padded_and_added),
    entry("repeated", join=repeated),
    entry("two_linears", expand=two_linears),
    entry("split_first", expand=split_first),
    entry("sliced", expand=sliced),
    entry("einsum_of_weights", expand=einsum_of_weights),
    entry("einsum_of_both", expand=einsum_of_both),
    entry("einsum_behind", expand=einsum_behind),
    entry("matmul_of_weights", expand=matmul_of_weights),
    entry("weights_of_heads", expand=weights_of_heads),
    entry("flat_rows", expand=flat_rows),
    entry("sorted_then_halves", rope=sorted_then_halves),
    entry("sorted_by_slices", rope=sorted_by_slices),
    entry("sorted_by_unflatten", rope=sorted_by_unflatten),
    entry("heads_before", rope=heads_before),
    entry("stacked_pairs", rope=stacked_pairs),
    entry("turned_in_float", rope=turned_in_float),
    entry("gathered_lanes", rope=gathered_lanes),
    entry("rms_norm", norm=rms_norm),
    entry("norm_all_in_float", norm=norm_all_in_float),
    entry("layer_norm_in_float", layer_norm=layer_norm_in_float),
    entry("layer_norm_by_hand", layer_norm=layer_norm_by_hand),
    entry("written_one_head", KEPT, write=written_one_head, **ONE_HEAD),
    entry("written_one_head_behind", KEPT, write=written_one_head_behind, cache=lambda cache: cache.unsqueeze(2)),
    entry("put_in_place", KEPT, write=put_in_place),
    entry("put_one_head", KEPT, write=put_one_head, **ONE_HEAD),
    entry("scattered", KEPT, write=scattered),
    entry("put_by_batch", KEPT, write=put_by_batch),
    entry("put_ragged", KEPT, write=put_ragged, see=see_ragged, start=ragged),
)
