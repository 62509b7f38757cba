"""The quantised prolog of latent attention whose rows the model itself joins, writes or attends to.

*Matches* what `mla_prolog_quantised` matches, without writes. *Replaces with* `npu_mla_prolog_v3` into fresh memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fusion import attribute, lowering, pattern, scalar, tensor
from patterns.composites.mla_prolog import Prolog
from patterns.composites.mla_prolog_quantised import layer, prolog, queries, rows


@dataclass(frozen=True)
class MlaPrologQuantisedRows(Prolog):
    """The rows of both caches as they are."""

    @pattern
    def heads_alone(
        self, p, x=tensor("*B He"), dq=tensor("Hcq He"), uq=tensor("Nq Hcq"), uq_scale=tensor("Nq"),
        up=tensor("N D Hckv"), dkv=tensor("Nk He"), gamma_cq=tensor("Hcq"), gamma_ckv=tensor("Hckv"),
        cos=tensor("T U Dr"), sin=tensor("T U Dr"), beside_q=tensor("*E", optional=True),
        beside_kv=tensor("*F", optional=True), eps_cq=scalar(), eps_ckv=scalar(), width=attribute(), begin=attribute(),
        first=attribute(), split=attribute(), end=attribute(), heads_first=attribute(), dtype_q=attribute(),
        dtype_kv=attribute(), fixed=attribute(), scale_dtype=attribute(), layer_dtype=attribute(),
    ):  # fmt: skip
        """The layer of the queries' heads is quantised."""
        how = dict(scale_dtype=scale_dtype, layer_dtype=layer_dtype, fixed=fixed)
        low = p.linear(x=x, weight=dq, fixed=fixed, beside=beside_q)
        q = queries(
            p, low, uq, uq_scale, up, gamma_cq, eps_cq, cos, sin, width, begin, first, heads_first, dtype_q, how
        )
        line = p.linear(x=x, weight=dkv, fixed=fixed, beside=beside_kv)
        return *q, *rows(p, line, gamma_cq, gamma_ckv, eps_ckv, cos, sin, split, end, dtype_kv)

    @pattern
    def all_layers(
        self, p, x=tensor("*B He"), tokens=tensor("*B 1"), dq=tensor("Hcq He"), dq_scale=tensor("Hcq"),
        uq=tensor("Nq Hcq"), uq_scale=tensor("Nq"), up=tensor("N D Hckv"), dkv=tensor("Nk He"), dkv_scale=tensor("Nk"),
        gamma_cq=tensor("Hcq"), gamma_ckv=tensor("Hckv"), cos=tensor("T U Dr"), sin=tensor("T U Dr"), eps_cq=scalar(),
        eps_ckv=scalar(), width=attribute(), begin=attribute(), first=attribute(), split=attribute(), end=attribute(),
        heads_first=attribute(), dtype_q=attribute(), dtype_kv=attribute(), fixed=attribute(), scale_dtype=attribute(),
        layer_dtype=attribute(),
    ):  # fmt: skip
        """All three layers are quantised."""
        how = dict(scale_dtype=scale_dtype, layer_dtype=layer_dtype, fixed=fixed)
        low = layer(p, x, dq, dq_scale, tokens, layer_dtype, fixed)
        q = queries(
            p, low, uq, uq_scale, up, gamma_cq, eps_cq, cos, sin, width, begin, first, heads_first, dtype_q, how
        )
        line = layer(p, x, dkv, dkv_scale, tokens, layer_dtype, fixed)
        return *q, *rows(p, line, gamma_cq, gamma_ckv, eps_ckv, cos, sin, split, end, dtype_kv)

    @lowering
    def fresh_rows(self, x, tokens, dq, dq_scale, uq, uq_scale, up, dkv, dkv_scale, gamma_cq, gamma_ckv, cos, sin,
                   eps_cq, eps_ckv, heads_first, split, end, scale_dtype):  # fmt: skip
        """One call, into memory of its own."""
        made = dict(dtype=gamma_ckv.dtype, device=x.device)
        lead, mode = (*x.shape[:-1], 1), "BSND" if x.dim() == 3 else "TND"
        buffers = (torch.empty((*lead, split), **made), torch.empty((*lead, end - split), **made))
        *found, kv, kr = prolog(
            x, tokens, (dq, uq, dkv), (dq_scale, uq_scale, dkv_scale), up, (gamma_cq, gamma_ckv), cos, sin, buffers,
            heads_first, scale_dtype, rmsnorm_epsilon_cq=eps_cq, rmsnorm_epsilon_ckv=eps_ckv, cache_mode=mode,
        )  # fmt: skip
        return *found, kv, kr
