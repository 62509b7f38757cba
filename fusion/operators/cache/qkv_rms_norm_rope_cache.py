"""QK norm, RoPE and cache writes of grouped-query attention in one kernel.

    [q ‖ k ‖ v] = qkv, per head    q_out = rope(norm(q) γ_q)    k_cache[slot] = rope(norm(k) γ_k)    v_cache[slot] = v

RoPE is by halves. An int8 cache takes int8(row / scale + offset), scale and offset per head and channel, of a row that
is not rounded before. Pages are in NZ, with its dims explicit: [Block, Nk · D / L, Size, L].
"""

from __future__ import annotations

from torch import Tensor

from fusion.operators import encodings
from fusion.operators.cache.pages import Put, stored
from fusion.operators.calling import Given
from fusion.operators.dtype_sets import FLOAT32, HALVES, INT8, INT64, compute_dtype
from fusion.operators.limits import A2_A3, Limit
from fusion.operators.norm.norms import normalised
from fusion.operators.operator import Operator, functional
from fusion.operators.rotary.rope import half

_CACHES = ("k", "v")


def _heads(given: Given) -> tuple[Tensor, Tensor, Tensor]:
    """Compute rotated queries [T, Nq, D], rotated keys [T, Nk, D] and plain values [T, Nk, D], not rounded."""
    qkv, eps = given["qkv"], given["epsilon"]
    wide, width = compute_dtype(qkv), given["q_gamma"].shape[0]
    q, k, v = qkv.to(wide).unflatten(-1, (-1, width)).split(list(given["head_nums"]), dim=1)
    cos, sin = (given[name].to(wide).unsqueeze(1) for name in ("cos", "sin"))
    q, k = (half(normalised(x, given[gain], eps), cos, sin, wide) for x, gain in ((q, "q_gamma"), (k, "k_gamma")))
    return q, k, v


def _encoded(rows: Tensor, given: Given, name: str) -> Tensor:
    """Convert `rows` to the dtype of the cache `name`: quantised to int8 if it has a scale, else rounded."""
    scale, offset = given[f"{name}_scale"], given[f"{name}_offset"]
    if scale is None:
        return rows.to(given["qkv"].dtype)
    scaled = rows / scale.to(rows.dtype)
    return encodings.INT8.stored(scaled if offset is None else scaled + offset.to(rows.dtype))


def _computed(put: Put, given: Given) -> tuple[Tensor, ...]:
    """Write queries to `q_out`, and keys and values to both caches; return them after three scalar zeros, in place of
    the rows before quantisation, which no legal call requests."""
    q, *both = _heads(given)
    caches: list[Tensor] = []
    for name, heads in zip(_CACHES, both, strict=True):
        cache = given[f"{name}_cache"]
        caches.append(put(cache, *stored(cache, _encoded(heads, given, name), given["index"], "PA_NZ")))
    nothing = (given["qkv"].new_zeros(()) for _ in range(3))
    return *nothing, put(given["q_out"], None, q.flatten(1)), *caches


_SHAPES = (
    "W == Q + KLines * KLine + VLines * VLine",
    "KLines * KLine == VLines * VLine",
    "length(qkv_size) == 4 and length(head_nums) == 3",
    Limit("item(head_nums, 0) * D == Q and item(head_nums, 1) * D == KLines * KLine", because="heads are counted"),
    "item(head_nums, 1) == item(head_nums, 2)",
    Limit("item(qkv_size, 0) * item(qkv_size, 1) == T and item(qkv_size, 2) * D == W", because="it tells dims of qkv"),
    "item(qkv_size, 3) == D",
    Limit("Nk * D == KLines * KLine", when="given(k_scale) or given(v_scale)"),
    "D % 2 == 0",
    Limit("is_output_qkv == False", because="the page gives no rows before they are quantised"),
    "cache_mode == 'PA_NZ'",
    *(Limit(f"dtype({name}_cache) == 'int8'", when=f"given({name}_scale)") for name in _CACHES),
    *(Limit(f"dtype({name}_cache) != 'int8'", when=f"not given({name}_scale)") for name in _CACHES),
    *(Limit(f"not given({name}_offset)", when=f"not given({name}_scale)") for name in _CACHES),
)
_KERNEL = (
    Limit("D == 128", because="D is the width of a head"),
    *(f"dtype({name}) == dtype(qkv)" for name in ("q_gamma", "k_gamma", "cos", "sin", "q_out")),
    *(Limit(f"dtype({name}_cache) == dtype(qkv)", when=f"not given({name}_scale)") for name in _CACHES),
    *(
        Limit(f"{name.upper()}Line == {lanes}", when=when.format(name), because=f"a line of NZ holds {lanes}")
        for name in _CACHES
        for lanes, when in ((32, "given({}_scale)"), (16, "not given({}_scale)"))
    ),
    Limit("Q % (KLines * KLine) == 0", because="each head of keys serves as many of queries"),
    "Size % 32 == 0",
    Limit("Blocks * Size >= T", because="there is a row for every token"),
)
_SUMMARY = (
    "[q ‖ k ‖ v] = qkv by head_nums; q_out = round(rope(norm(q) · q_gamma)), k_cache[slot] = round(rope(norm(k) · "
    "k_gamma)), v_cache[slot] = v, norm(x) = x / sqrt(mean(x²) + epsilon) and halves rotated in float32; "
    "whole numbers: int8(row / scale + offset); a negative slot is skipped"
)
QKV_RMS_NORM_ROPE_CACHE = Operator(
    schema=(
        "npu::npu_qkv_rms_norm_rope_cache(Tensor qkv, Tensor q_gamma, Tensor k_gamma, Tensor cos, Tensor sin, "
        "Tensor index, Tensor(a!) q_out, Tensor(b!) k_cache, Tensor(c!) v_cache, int[4] qkv_size, int[3] head_nums, *, "
        "Tensor? k_scale=None, Tensor? v_scale=None, Tensor? k_offset=None, Tensor? v_offset=None, "
        'float epsilon=9.9999999999999995e-07, str cache_mode="PA_NZ", bool is_output_qkv=False) '
        "-> (Tensor, Tensor, Tensor)"
    ),
    compute=_computed,
    without_effect=frozenset({"qkv_size", "cache_mode", "is_output_qkv"}),
    outputs=lambda qkv: tuple(qkv.new_empty(()) for _ in range(3)),
    dims={
        "q_gamma k_gamma": "D",
        "qkv": "T W",
        "cos sin": "T D",
        "index": "T",
        "q_out": "T Q",
        "k_cache": "Blocks KLines Size KLine",
        "v_cache": "Blocks VLines Size VLine",
        "k_scale v_scale k_offset v_offset": "Nk D",
    },
    dtypes={
        "qkv q_gamma k_gamma cos sin q_out": HALVES,
        "k_cache v_cache": HALVES | INT8,
        "k_scale v_scale k_offset v_offset": FLOAT32,
        "index": INT64,
    },
    limits={"host": _SHAPES, **dict.fromkeys(A2_A3, _KERNEL)},
    lowerings=frozenset({"eager", "npugraph_ex"}),  # torchair's converter gives six results, the schema has three
    source=(
        "ops-transformer posembedding/qkv_rms_norm_rope_cache (its page, tiling and kernel: nothing is rounded between "
        "norm, rotation and quantisation; pages of multiples of 32 whatever they hold); op-plugin: "
        "QkvRmsNormRopeCacheKernelNpuOpApi"
    ),
    summary=_SUMMARY,
)
QKV_RMS_NORM_ROPE_CACHE_FUNCTIONAL = functional(
    QKV_RMS_NORM_ROPE_CACHE,
    "npu::npu_qkv_rms_norm_rope_cache_functional",
    f"with copies of q_out and both caches as results 3 to 5: {_SUMMARY}",
    frozenset({"torchair"}),
)
