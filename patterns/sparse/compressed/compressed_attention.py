"""out = softmax(scale · q [keys; entries]ᵀ, with a sink) [keys; entries]  (DeepSeek-V4, 2026).

*Matches* attention with one head of keys that are their own values: the last 128 of them up to the query, alone or with
compressed entries behind them, of which a query sees those whose tokens are not after it, or those that a list names.
*Replaces with* `sparse_flash_mla` of the package cann_ops_transformer, which reads both kinds of keys where they are,
without a mask. The schedule of the call, `sparse_flash_mla_metadata`, depends on sizes alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fusion import Captures, Group, Rule, attribute, bounded, lowering, pattern, require, scalar, tensor
from patterns.attention.calls import viewed

_LISTED = (512, 1024)
"""Lengths of a list that every version of the operator takes."""


@dataclass(frozen=True)
class Entries(Group):
    """Compressed entries behind the keys, all absent where attention has the window alone."""

    entries: Any = tensor("B 1 C D", optional=True)
    places: Any = tensor("B S K", optional=True)
    ratio: Any = attribute()
    residual: Any = attribute()


@dataclass(frozen=True)
class CompressedMatch(Captures):
    """Captures of the word `windowed_attention`."""

    q: Tensor
    keys: Tensor
    behind: Entries
    sink: Tensor
    scale: float
    view: Any

    def compressed(self) -> dict[str, Any]:
        """Return the arguments for compressed entries: these, the residual tokens, the ratio and the list."""
        if self.behind.entries is None:
            return dict(cmp_ratio=1, cmp_mask_mode=0)
        residual = torch.full((self.q.shape[0],), self.behind.residual, dtype=torch.int32, device=self.q.device)
        listed = {} if self.behind.places is None else dict(cmp_sparse_indices=self._listed(self.behind.places))
        entries = self.behind.entries.transpose(1, 2)
        return dict(cmp_kv=entries, cmp_residual_kv=residual, cmp_ratio=self.behind.ratio, cmp_mask_mode=3, **listed)

    def _listed(self, places: Tensor) -> Tensor:
        """Return the list int32 [B, S, 1, K] of `places`, entries first, -1 behind them, of a length the operator
        takes."""
        count: Any = self.behind.entries.shape[2]
        most: Any = places.shape[-1]
        fits = isinstance(most, int) and most <= _LISTED[-1]
        require(
            fits,
            "list: it has {most} entries; sparse_flash_mla requires at most 1024; lower the top-k of the indexer",
            most=most,
        )
        length = min(each for each in _LISTED if most <= each)
        named = places.to(torch.int32)
        named = named.masked_fill((named < 0) | (named >= count), -1)
        return pad(named.sort(dim=-1, descending=True).values, (0, length - most), value=-1).unsqueeze(2)


@dataclass(frozen=True)
class CompressedAttention(Rule):
    """Attention with a sink over a window of keys and over compressed entries."""

    aliases = ("sparse_flash_mla", "window_attention", "compressed_sparse_attention", "heavily_compressed_attention")

    def reference(self, q: Tensor, keys: Tensor, sink: Tensor, scale: float) -> Tensor:
        """Compute [B, N, S, D] of q [B, N, S, D] over the last 128 keys [B, 1, S, D] up to each query, with a sink
        [N]."""
        scores = (q @ keys.mT).float() * scale
        ahead = torch.arange(q.shape[2]) - torch.arange(q.shape[2]).unsqueeze(-1)
        hidden = scores.masked_fill((ahead > 0) | (ahead <= -128), -torch.inf)
        joined = torch.cat((hidden, sink.reshape(-1, 1, 1).expand(*scores.shape[:-1], 1)), dim=-1)
        return joined.softmax(-1)[..., :-1].to(q.dtype) @ keys

    @pattern
    def written(
        self,
        p,
        q=tensor("B N S D"),
        keys=tensor("B 1 W D"),
        behind: Any = Entries,
        sink=tensor("N"),
        scale=scalar(),
        view: Any = attribute(),
    ):
        """softmax(scale · q [keys; entries]ᵀ) [keys; entries] with a sink, over the visible keys and entries"""
        return p.windowed_attention(q=q, keys=keys, sink=sink, scale=scale, output_view=view, **vars(behind))

    @lowering
    def fused(self, match: CompressedMatch):
        """Emit sparse_flash_mla, and the schedule of the call."""
        q, keys = match.q.transpose(1, 2), match.keys.transpose(1, 2)
        compressed = match.compressed()
        ops, window = torch.ops.cann_ops_transformer, dict(ori_mask_mode=4, ori_win_left=127, ori_win_right=0)
        modes = dict(cmp_ratio=compressed["cmp_ratio"], cmp_mask_mode=compressed["cmp_mask_mode"], **window)
        layouts = dict(layout_q="BSND", layout_kv="BSND")
        entries, listed = compressed.get("cmp_kv"), compressed.get("cmp_sparse_indices")
        schedule = ops.sparse_flash_mla_metadata(
            q.shape[2], 1, q.shape[3], cmp_residual_kv=compressed.get("cmp_residual_kv"), batch_size=q.shape[0],
            max_seqlen_q=q.shape[1], max_seqlen_ori_kv=keys.shape[1],
            max_seqlen_cmp_kv=0 if entries is None else entries.shape[1], ori_topk=0,
            cmp_topk=0 if listed is None else listed.shape[-1], has_ori_kv=True, has_cmp_kv=entries is not None,
            **modes, **layouts,
        )  # fmt: skip
        with bounded():  # a result is a mean of values, and of 0 for the sink
            y, _ = ops.sparse_flash_mla(
                q, ori_kv=keys, sinks=match.sink.float(), metadata=schedule, softmax_scale=match.scale,
                **(compressed | modes), **layouts, topk_value_mode=1, return_softmax_lse=False,
            )  # fmt: skip
        return viewed(y.transpose(1, 2), match.view)
