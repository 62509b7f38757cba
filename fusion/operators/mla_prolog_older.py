"""The two older prologs of latent attention: fewer sizes, no latent of the queries among the results.

Their schemas hide that they write both caches, so nothing would keep such a call where it stands. Emitted are overloads
of ours instead: one whose schema declares the writes, which a device runs by the vendor's own, and a functional one.
"""

from __future__ import annotations

from torch import Tensor

from fusion.operators.calling import Given
from fusion.operators.contract import A2_A3, Limit, Operator, functional
from fusion.operators.dtypes import BFLOAT16, INT64
from fusion.operators.mla_prolog import MLA_PROLOG_V3
from fusion.operators.mla_prolog_numbers import computed
from fusion.operators.pages import Put

_QUANTISED = ("dequant_scale_x", "dequant_scale_w_dq", "dequant_scale_w_uq_qr", "dequant_scale_w_dkv_kr",
              "quant_scale_ckv", "quant_scale_ckr", "smooth_scales_cq")  # fmt: skip


def _computed(put: Put, given: Given) -> tuple[Tensor, ...]:
    query, rope, _, _, _, *caches = computed(put, MLA_PROLOG_V3.bind((), given))
    return query, rope, *caches


def _outputs(given: Given) -> tuple[Tensor, ...]:
    query, rope, *_ = MLA_PROLOG_V3.meta(**given)
    return query, rope


_DIMS = {
    "token_x": "T He / B S He",
    "weight_dq": "He Hcq",
    "weight_uk": "N D Hckv",
    "rope_sin rope_cos": "T Dr / B S Dr",
    "weight_uq_qr": "Hcq Huq",
    "weight_dkv_kr": "He Hkv",
    "rmsnorm_gamma_cq": "Hcq",
    "rmsnorm_gamma_ckv": "Hckv",
    "kv_cache": "Blocks Size 1 Hckv",
    "kr_cache": "Blocks Size 1 Dr",
    "cache_index": "T / B S",
}
_HOST = (
    *(Limit(f"not given({name})", because="quantisation is not decomposed") for name in _QUANTISED),
    "cache_mode in ('PA_BSND', 'PA_NZ')",
    "Huq == N * (D + Dr)",
    "Hkv == Hckv + Dr",
    "Dr % 2 == 0",
    Limit("Hckv % 16 == 0 and Dr % 16 == 0", when="cache_mode == 'PA_NZ'", because="a line of NZ holds 16 elements"),
)
_KERNEL = (
    "He == 7168",
    "Hcq == 1536",
    "Hckv == 512",
    "D == 128",
    "Dr == 64",
    "Size in (16, 128)",
    Limit("B <= 65536", when="rank(token_x) == 3"),
)
_FIRST = (*_KERNEL, "N in (32, 64, 128)", Limit("S <= 1", when="rank(token_x) == 3"))
_SECOND = (*_KERNEL, "N in (1, 2, 4, 8, 16, 32, 64, 128)", Limit("S <= 16", when="rank(token_x) == 3"))
_SUMMARY = (
    "query and query_rope of npu_mla_prolog_v3 without factors, its lines written to both caches; {what} of ours, "
    "because the vendor's schema hides the writes"
)


def _both(name: str, source: str, kernel: tuple[Limit | str, ...]) -> tuple[Operator, Operator]:
    writing = Operator(
        schema=(
            f"npu::{name}.in_place(Tensor token_x, Tensor weight_dq, Tensor weight_uq_qr, Tensor weight_uk, "
            "Tensor weight_dkv_kr, Tensor rmsnorm_gamma_cq, Tensor rmsnorm_gamma_ckv, Tensor rope_sin, "
            "Tensor rope_cos, Tensor cache_index, Tensor(a!) kv_cache, Tensor(b!) kr_cache, *, "
            "Tensor? dequant_scale_x=None, Tensor? dequant_scale_w_dq=None, Tensor? dequant_scale_w_uq_qr=None, "
            "Tensor? dequant_scale_w_dkv_kr=None, Tensor? quant_scale_ckv=None, Tensor? quant_scale_ckr=None, "
            "Tensor? smooth_scales_cq=None, float rmsnorm_epsilon_cq=1.0000000000000001e-05, "
            'float rmsnorm_epsilon_ckv=1.0000000000000001e-05, str cache_mode="PA_BSND") -> (Tensor, Tensor)'
        ),
        compute=_computed,
        outputs=_outputs,
        dims=_DIMS,
        dtypes=dict.fromkeys(_DIMS, BFLOAT16) | {"cache_index": INT64},
        limits={"host": _HOST, **dict.fromkeys(A2_A3, kernel)},
        lowerings=frozenset({"eager", "npugraph_ex"}),  # GE sees no order between such a call and what reads its caches
        flops=MLA_PROLOG_V3.flops,
        source=source,
        summary=_SUMMARY.format(what="an overload"),
        hides_writes=True,
    )
    summary = _SUMMARY.format(what="copies of the caches are results 2 and 3; an overload")
    return writing, functional(writing, f"npu::{name}.functional", summary)  # what runs is always the form in place


MLA_PROLOG, MLA_PROLOG_FUNCTIONAL = _both(
    "npu_mla_prolog", "op-plugin: torch_npu.npu_mla_prolog, whose page allows 32, 64 or 128 heads, one token", _FIRST
)
MLA_PROLOG_V2, MLA_PROLOG_V2_FUNCTIONAL = _both(
    "npu_mla_prolog_v2", "op-plugin: torch_npu.npu_mla_prolog_v2, whose page allows 16 tokens", _SECOND
)
