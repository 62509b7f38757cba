"""Grouped-query attention of one query row of each sequence over pages, of atb: out = softmax(scale_value · q kᵀ) v.

query [T, N, D]      key_cache [Blocks, Size, M, D]      block_table [T, P]      context_lens [T], on the host
"""

from __future__ import annotations

from torch import Tensor

from fusion._torch.tensors import count, hint
from fusion.operators.attention.fused_infer_attention import Attention, computed
from fusion.operators.attention.visibility import Band
from fusion.operators.cache.pages import Put
from fusion.operators.calling import Given
from fusion.operators.dtype_sets import HALVES, INT32
from fusion.operators.flops import longest, scores
from fusion.operators.limits import A2_A3, Limit
from fusion.operators.operator import Operator, functional


def _attended(put: Put, query: Tensor, out: Tensor, given: Given) -> tuple[Tensor]:
    """Compute the attention of `query`, and write it by `put` to `out`; a row of a sequence without keys stays as it
    is.
    """
    keys, values = (given[name].flatten(2) for name in ("key_cache", "value_cache"))
    lengths, heads = given["context_lens"], given["num_kv_heads"]
    call = Attention(
        query.unsqueeze(1), keys, values, layout="BSND", heads=given["num_heads"], kv_heads=heads,
        scale=given["scale_value"], band=Band(), lengths=(None, lengths.to(query.device)), table=given["block_table"],
    )  # fmt: skip
    rows, some = computed(call)[0].squeeze(1), lengths.to(query.device).reshape(-1, 1, 1) > 0
    return (put(out, None, rows.where(some, out)),)


def _flops(given: Given) -> float:
    """Estimate the multiplications and additions: q · k and p · v of every query row with all keys of the longest
    context.
    """
    query, page = given["query"], given["key_cache"].shape[1]
    keys = longest(given["context_lens"], given["block_table"].shape[1] * page)
    return scores(count(query) / hint(query.shape[-1]) * keys, 2 * query.shape[-1])


_ALIKE = ("key_cache", "value_cache", "out")
_HOST: tuple[Limit | str, ...] = (
    "N == num_heads",
    "M == num_kv_heads",
    Limit("N % M == 0", because="key heads are shared by as many query heads each"),
)
_KERNEL: tuple[Limit | str, ...] = (
    *(f"dtype({name}) == dtype(query)" for name in _ALIKE),
    Limit("Size % 16 == 0 and Size <= 128", because="so its page and its tiling ask for"),
    Limit("D < 256 and Size * D <= 16384", because="a page of a head fits in the memory of a core"),
)
_FORMULA = "round(softmax(scale_value · q kᵀ) v), in float32, over the first context_lens[t] keys of each row's pages"

PAGED_ATTENTION = Operator(
    schema=(
        "atb::_npu_paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, int num_kv_heads, "
        "int num_heads, float scale_value, Tensor block_table, Tensor context_lens, Tensor(a!) out, *, "
        "Tensor? workspace=None) -> ()"
    ),
    compute=_attended,
    uncomputed={"workspace": "the operator allocates its own"},
    dims={
        "query out": "T N D",
        "key_cache value_cache": "Blocks Size M D",
        "block_table": "T P",
        "context_lens": "T",
    },
    dtypes={"query key_cache value_cache out": HALVES, "block_table context_lens": INT32},
    limits={"host": _HOST, **dict.fromkeys(A2_A3, _KERNEL)},
    lowerings=frozenset(),
    on_host=frozenset({"context_lens"}),
    flops=_flops,
    source=(
        "op-plugin: test_atb_paged_attention.py, torch_npu.atb docs of _npu_paged_attention_v2; ATB: "
        "PagedAttentionOperation, its checks, tiling and kernel, which skips a row without keys; no Meta in 2.13.0"
    ),
    summary=f"out = {_FORMULA}; a row without keys is left as it is",
)
PAGED_ATTENTION_FUNCTIONAL = functional(  # an overload of ours: only the in-place form is launched
    PAGED_ATTENTION, "atb::_npu_paged_attention.functional", f"a copy of out with {_FORMULA}"
)
