"""The prologue of latent attention with int8 weights, from the hidden states to the pages, in one call of atb.

    x8 = quantise(norm(x))    [q, q_r] = quantise(norm(x8 W_DQ)) W_UQ, per head      [k, k_r] = x8 W_DKV
    query = q W_UK            query_rope = rope(q_r)    pages[slot] = s norm(k)      rope_pages[slot] = rope(k_r)

*Matches* three W8A8 layers with scales per token or static ones, the norms before them, and rows written to the pages
of both caches at the same slots, in BSND or NZ, for an attention that reads absorbed queries; latent and queries may be
int8 as well. *Replaces with* `npu_mla_preprocess`, whose norms add 1e-6 and which does not return the latent of the
queries. Weights are prepared once: W_DKV and W_DQ are joined, rotated rows of interleaved order are put in half order,
and the result is cast to FRACTAL_NZ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from fusion import Captures, Group, Rule, encodings, lowering, pattern, require, rounding, scalar, tensor, variants
from patterns.cache.pages import in_rows, page_operand
from patterns.cache.stores import PAGES, Int8LatentPages, Pages
from patterns.kit.int8_scales import STATIC, exact_scale, int8_zero_point
from patterns.latent.prolog.layers import StaticInt8Layers, TokenInt8Layers
from patterns.latent.prolog.prolog import MlaProlog
from patterns.latent.prolog.terms import LatentQueries, LatentRow, Tables
from patterns.quant.quantised_linear import NZ
from patterns.rotary.orders import HALF, RowOrder
from patterns.rotary.token_tables import rotated_lanes

_OPERATOR = "npu_mla_preprocess"
EPSILON = 1e-6  # compiled into the kernel


@dataclass(frozen=True)
class Norm(Group):
    """The RMS norm of the hidden states before W_DQ and W_DKV: gain `gamma` [He] and `eps`."""

    gamma: Any = tensor("He")
    eps: Any = scalar()


@dataclass(frozen=True)
class Queries(LatentQueries):
    """Queries of attention over a latent, computed by W8A8 layers: norm of their latent, and lanes of each head."""

    def terms(self, p, low, projection, tables):
        """Build the terms of rotated and of absorbed queries, by `tables` and the layers of `projection`.

        `low` is the layer W_DQ of the hidden states.
        """
        heads = projection.heads(p, self.norm(p, low))
        lanes = p.layer_lanes(layer=heads, width=self.width, start=self.first, heads_first=self.heads_first)
        rotated = rotated_lanes(p, lanes, tables, self, self.gamma, self.heads_first)
        return rotated, p.layer_query(layer=heads, width=self.width, start=self.begin, up=self.up)


@dataclass(frozen=True)
class Int8Pages(Int8LatentPages):
    """Pages in NZ of an int8 latent with one scale, for absorbed queries in int8 with a scale [N] of each head."""

    kv_scale: Any = tensor("1", optional=True)
    kv_shift: Any = scalar()
    query_scale: Any = tensor("N")

    def queries(self, p, rotated, absorbed):
        """Return the term `rotated` unchanged, and build that of the queries `absorbed` in int8 by the scale of each
        head.
        """
        return rotated, p.quantise(x=absorbed, scale=self.query_scale, encoding=STATIC, scheme="head")

    def quantised(self, p, latent):
        """Build the term of the latent quantised by a static scale and a zero point."""
        scheme = dict(scale=self.kv_scale, by=self.kv_by, shift=self.kv_shift, encoding=STATIC, scheme="static")
        return p.quantise(x=p.reshaped(latent), **scheme)

    def guard(self, tokens: Any, operator: str) -> None:
        """Refuse pages in BSND, and a zero point of the latent."""
        require(
            None not in self.blocks,
            "cache: its pages are rows [Block, Size, 1, D]; npu_mla_preprocess requires lines of NZ for an "
            "int8 latent; allocate [Block, D / 32, Size, 32]",
        )
        super().guard(tokens, operator)
        require(
            self.kv_shift == 0,
            "latent: it is stored with a zero point; npu_mla_preprocess requires round(latent / scale); "
            "quantise symmetrically",
        )

    def preprocess_arguments(self, like: Tensor) -> dict[str, Any]:
        """Return ctkv_scale, by which the latent is divided, and q_nope_scale, by which the queries are multiplied."""
        kv_scale = exact_scale(self.kv_scale, self.kv_by, like, _OPERATOR)
        return dict(ctkv_scale=kv_scale, q_nope_scale=exact_scale(self.query_scale, 1, like, _OPERATOR))


@dataclass(frozen=True)
class PreprocessMatch(Captures):
    """Captures of the prologue with its first norm: hidden states `x` [*B, He], norm, W8A8 layers, caches, tables."""

    x: Tensor
    norm: Norm
    projection: TokenInt8Layers
    storage: Pages
    queries: Queries
    row: LatentRow
    tables: Tables


@dataclass(frozen=True)
class MlaPreprocess(Rule):
    """Prologue of latent attention with W8A8 layers, from the norm of the hidden states to the writes into caches."""

    aliases = ("preprocess", "mla_preprocess_whole", "mla_preprocess_fixed")

    def readers_of_results(self) -> frozenset[str]:
        """Name the attention that reads absorbed queries."""
        return frozenset({"latent_attention", "latent_attention_atb"})

    def reference(self, x: Tensor, gamma: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the reference of `MlaProlog` for norm(x) and its `weights`: no rotation, no quantisation."""
        return MlaProlog().reference(rms_norm(x, gamma.shape, gamma, EPSILON), *weights)

    @pattern
    @variants(projection=(TokenInt8Layers, StaticInt8Layers), storage=(*PAGES, Int8Pages))
    def written(
        self,
        p,
        projection,
        storage,
        x=tensor("*B He"),
        norm: Any = Norm,
        queries: Any = Queries,
        row: Any = LatentRow,
        tables: Any = Tables,
    ):
        """query = norm(norm(x) W_DQ) W_UQ W_UK, query_rope = rope(q_r), and pages[slot] = norm(k), rope(k_r)."""
        low, both = projection.down(p, p.rms_norm(x=x, gamma=norm.gamma, eps=norm.eps))
        rotated, absorbed = queries.terms(p, low, projection, tables)
        rows = row.terms(p, both, tables, queries.gamma)
        return *storage.queries(p, rotated, absorbed), *storage.written(p, *rows)

    def guard(self, match: PreprocessMatch):
        """Refuse norms with another epsilon than 1e-6, heads and rows with other lanes, rotated lanes that the cache
        has in pairs.

        And what `projection` (biases) and `storage` (slots, NZ blocks) refuse.
        """
        projection, storage, queries, row = match.projection, match.storage, match.queries, match.row
        queries.guard(row)
        row.guard(projection.dkv)
        for eps in (match.norm.eps, queries.eps, row.eps):
            require(
                eps == EPSILON,
                "eps: a norm adds {eps}; npu_mla_preprocess requires 1e-6, which its kernel has compiled in",
                eps=eps,
            )
        projection.guard()
        storage.guard_order(row.result, _OPERATOR)
        storage.guard(match.x, _OPERATOR)

    @lowering
    def run(self, match: PreprocessMatch):
        """Emit npu_mla_preprocess, which writes rows to the pages and queries to fresh memory."""
        x, norm, queries, row = match.x, match.norm, match.queries, match.row
        projection, storage, tables = match.projection, match.storage, match.tables
        cos, sin = (each.flatten(0, -2) for each in tables.for_tokens(x, row, x.dtype))
        tokens, turning, (heads, _, width) = storage.slots.numel(), cos.shape[-1], queries.up.shape
        order = JoinedRows(RowOrder(turning, HALF), heads, queries.source, row.source)
        down, wide = map(_nz, order.joined(projection.dq, projection.dkv, projection.uq))
        scales = order.joined(projection.dq_scale, projection.dkv_scale, projection.uq_scale)
        betas, scheme = _quantisation(projection, x, (norm.gamma, queries.gamma), order)
        kv, kr, mode = storage_pages(storage)
        inputs = (
            x.reshape(tokens, -1), norm.gamma, betas[0], down, scales[0].float(), queries.gamma, betas[1], wide,
            scales[1].float(), row.scaled_gamma(x.dtype), cos, sin, queries.up.contiguous(), kv, kr,
            storage.slots.reshape(-1).to(torch.int32),
        )  # fmt: skip
        with rounding("what the int8 layers give", projection.layer_dtype, x.dtype):
            query, kv, rope, kr = torch.ops.atb.npu_mla_preprocess.functional(
                *inputs, q_out0=torch.empty((tokens, heads, width), dtype=kv.dtype, device=x.device), kv_cache_out0=kv,
                q_out1=torch.empty((tokens, heads, turning), dtype=x.dtype, device=x.device), kv_cache_out1=kr,
                cache_mode=mode, **scheme, **storage.preprocess_arguments(x),
            )  # fmt: skip
        query, rope = (each.unflatten(0, x.shape[:-1]) if x.dim() == 3 else each for each in (query, rope))
        return *queries.restored(query, rope), *storage.restored(kv, kr)


@dataclass(frozen=True)
class JoinedRows:
    """Order in which npu_mla_preprocess reads rows of weights, and their scales and biases.

    Attributes:
        order: order of the lanes that are rotated.
        query_order, key_order: orders in which the model has these lanes of the queries and of the key.
    """

    order: RowOrder
    heads: int
    query_order: str
    key_order: str

    def joined(self, dq: Tensor, dkv: Tensor, uq: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of `dkv` and `dq` in one tensor, and those of `uq`, each in the order in which the operator
        reads them.
        """
        return torch.cat((self.order.of(dkv, self.key_order), dq)), self.order.of(uq, self.query_order, self.heads)


def _quantisation(
    layers: Any, x: Tensor, gammas: tuple[Tensor, Tensor], order: JoinedRows
) -> tuple[list[Tensor], dict[str, Any]]:
    """Return the biases of both norms, and the arguments by which npu_mla_preprocess quantises and dequantises.

    Args:
        layers: the W8A8 layers.
        x: the hidden states.
        gammas: gains of the norms of `x` and of the latent of the queries.
        order: order in which the operator reads rows of the weights.
    """
    if not isinstance(layers, StaticInt8Layers):
        return [torch.zeros_like(each) for each in gammas], dict(quant_mode="per_token_quant_symm")
    pairs = zip((layers.beta, layers.beta_cq), gammas, strict=True)
    betas = [_or_zeros(beta, each, each.dtype) for beta, each in pairs]
    biases = (
        (layers.dq_bias, layers.dq_scale),
        (layers.dkv_bias, layers.dkv_scale),
        (layers.uq_bias, layers.uq_scale),
    )
    both = order.joined(*(_or_zeros(*each, torch.int32) for each in biases))
    return betas, dict(
        quant_mode="per_tensor_quant_asymm",
        quant_scale0=exact_scale(layers.scale, layers.factor, x, _OPERATOR),
        quant_offset0=int8_zero_point(layers.zero_point, layers.shift, x.device, _OPERATOR),
        bias0=both[0],
        quant_scale1=exact_scale(layers.scale_cq, layers.factor_cq, x, _OPERATOR),
        quant_offset1=int8_zero_point(layers.zero_point_cq, layers.shift_cq, x.device, _OPERATOR),
        bias1=both[1],
    )


def _or_zeros(bias: Tensor | None, like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(like, dtype=dtype) if bias is None else bias


def storage_pages(storage: Pages) -> tuple[Tensor, Tensor, str]:
    """Return both caches as the operator takes them, in rows or in NZ blocks, and their cache_mode."""
    both = storage.kv_cache, storage.kr_cache
    if storage.nz_block is None:
        kv, kr = (in_rows(each, None, _OPERATOR) for each in both)
        return kv, kr, "krope_ctkv"
    kv, kr = (page_operand(each, each.shape[-2], _OPERATOR, "NZ").squeeze(1) for each in both)
    return kv, kr, "int8_nzcache" if isinstance(storage, Int8Pages) else "nzcache"


def _nz(weight: Tensor) -> Tensor:
    """Arrange `weight` [out, in] as [1, in / 32, out, 32] in FRACTAL_NZ."""
    require(
        weight.shape[1] % encodings.INT8.line == 0,
        "weights: their rows or columns are no multiple of 32; npu_mla_preprocess requires that for NZ in "
        "int8; pad them",
    )
    blocks = weight.unflatten(1, (-1, encodings.INT8.line)).transpose(0, 1)
    return torch.ops.npu.npu_format_cast(blocks.contiguous()[None], NZ)
