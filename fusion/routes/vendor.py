"""Routes through the vendor's compilers: torchair converts a graph to GE, npugraph_ex captures it."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx

from fusion._torch.operators import COMPOSITES, OpOverload, core_table, schema_of
from fusion._torch.tracing import Boxed, boxed, static_inputs, tracing_apart
from fusion.errors import FusionError
from fusion.operators import OPERATORS, Operator, ensure
from fusion.routes.expand import expand
from fusion.routes.ge_operators import convert_to_ge
from fusion.routes.hidden_writes import handed_over

aten = torch.ops.aten
_OWN_RESULTS = {"npu_mla_prolog_v3": (0, 1, 4, 5, 6), "npu_recurrent_gated_delta_rule": (0,)}
"""Positions, among the results of torchair's converters, of the results that an operator has by its schema."""


def torchair(gm: fx.GraphModule, example_inputs: Sequence[Any], *, config: Any = None) -> Boxed:
    """Convert `gm` to one GE graph by torchair, and return a callable that compiles and runs it.

    `config` is a `torchair.CompilerConfig`; without it a fresh default one, never torch_npu's global backend.
    Composite operators, and operators without a working converter, are expanded first; writes to caches stay in place.
    In the modes of `config` that capture launches instead, nothing is expanded.

    Raises:
        FusionError: torch_npu or torchair cannot be imported.
    """
    vendor = _vendor("torchair", "converting a fused graph to a GE graph")
    if converts_to_ge(config):
        expanded = expand(gm, _forms_with_converter() | handed_over(gm.graph))
    else:
        expanded = gm
        _mark_static(example_inputs)
    _mend_converters(vendor.register_fx_node_ge_converter)
    # The converter takes its fake mode from the tracing context, and would make another one outside of any.
    with tracing_apart(gm):
        return boxed(vendor.get_compiler(config or vendor.CompilerConfig())(expanded, list(example_inputs)))


def converts_to_ge(config: Any) -> bool:
    """Return True if torchair converts graphs to GE with `config`, a `CompilerConfig` or None for a default one.

    In its other modes, "reduce-overhead" and "npugraph_ex", it captures the launches of a graph.
    """
    return config is None or config.mode.value == "max-autotune"


def mend_loaded() -> None:
    """Repair the converters of torchair if it is loaded, as it is where the pass is its guest."""
    loaded = sys.modules.get("torchair._ge_concrete_graph.fx2ge_converter")
    if loaded is not None:
        _mend_converters(loaded.register_fx_node_ge_converter)


def npugraph_ex(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Boxed:
    """Capture `gm` as an NPU graph by npugraph_ex, which launches its operators as they are: none is expanded.

    `options` are npugraph_ex's own, by name, for example `{"force_eager": True}` to run without capturing.

    Raises:
        FusionError: torch_npu or npugraph_ex cannot be imported.
    """
    vendor = _vendor("npugraph_ex", "capturing a fused graph as an NPU graph")
    _complete_configuration(vendor.CompilerConfig)
    _register_in_place()
    _mark_static(example_inputs)
    with tracing_apart(gm):
        return boxed(vendor.compile_fx(gm, list(example_inputs), dict(options or {})))


def _complete_configuration(configuration: Any) -> None:
    """Give the class `configuration` of npugraph_ex the attribute that its compiler sets for one operator.

    Version 2.13.0 switches off `experimental_config.enable_view_optimize` in every graph with
    npu_weight_quant_batchmatmul, and only configurations of torchair have it: each such graph raises.
    """
    if not hasattr(configuration, "experimental_config"):
        configuration.experimental_config = SimpleNamespace(enable_view_optimize=False)


def _register_in_place() -> None:
    """Register with npugraph_ex the operators that write caches and states in place, by their functional forms.

    Calls of the model arrive in functional form, with a copy of the whole cache behind, and npugraph_ex knows three.
    """
    passes = importlib.import_module("npugraph_ex._acl_concrete_graph.graph_pass")
    for functional, in_place in _forms_in_place():
        names = [each.name for each in schema_of(in_place.overload()).arguments]
        if functional.overload() not in passes.inplaceable_npu_ops:
            written = [names.index(each) for each in in_place.written]
            passes.register_inplaceable_npu_op(functional.short, in_place.short, written)


def _forms_in_place() -> Iterator[tuple[Operator, Operator]]:
    """Yield each functional operator of torch_npu whose last results are what its in-place form writes, and that form.

    npugraph_ex keeps the `getitem` of the results, so that the in-place form may not return a single tensor.
    """
    for functional in OPERATORS.values():
        in_place = OPERATORS.get(functional.in_place)
        if in_place is None or not (functional.name.startswith("npu::") and functional.name.endswith("_functional")):
            continue
        declared, returned = (schema_of(each.overload()) for each in (in_place, functional))
        others = len(returned.returns) - len(in_place.written)
        if others == len(declared.returns) != 1:
            yield functional, in_place


def _mark_static(example_inputs: Sequence[Any]) -> None:
    """Mark the inputs that keep their address as torchair's own stage of AOT autograd does.

    A captured graph reads them where they are; it copies all others into memory of its own at every call.
    """
    for position in static_inputs(len(example_inputs)):
        if isinstance(example_inputs[position], Tensor):
            example_inputs[position]._torchair_is_parameter = True


def _vendor(name: str, doing: str) -> Any:
    try:
        importlib.import_module("torch_npu")  # registers both compilers as importable modules
        module = importlib.import_module(name)
        _ = module.CompilerConfig  # a compiler that failed to load raises at its first attribute, not at its import
    except Exception as error:
        raise FusionError(
            f"While {doing}, with {name} of torch_npu: it cannot be imported ({type(error).__name__}: {error}). "
            "Install the torch_npu that fits torch and CANN, and source CANN's set_env.sh; "
            "on a machine without an NPU, lower to Inductor or run eagerly instead."
        ) from error
    return module


def _forms_with_converter() -> dict[OpOverload, Callable[..., Any]]:
    """Map operators whose converter torchair 2.13.0 lacks, or that raises or is wrong, to replacements."""
    ensure()  # registers the overloads of this package
    lengths = {
        getattr(torch.ops.npu, name).tensor_lengths: _with_tensor_lengths(name)
        for name in ("npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2")
    }
    return (
        _decomposed_by_torch()
        | lengths
        | {
            aten.all.dim: _all,
            aten.amax.default: _amax,
            aten.amin.default: _amin,
            aten.complex.default: _complex,
            aten.polar.default: _polar,
            aten.view.dtype: _bits,
            aten.index_copy.default: run_index_copy,
            aten.index_put.default: run_index_put,
            torch.ops.npu.npu_gemma_rms_norm.default: _gemma_rms_norm,
            torch.ops.npu.npu_rotary_mul.default: _rotary_mul,
        }
    )


def _decomposed_by_torch() -> dict[OpOverload, Callable[..., Any]]:
    """Map operators of aten that torchair cannot convert, and core aten lacks, to torch's own decompositions.

    Composites are left out: `expand` decomposes them, one to parts that torchair converts where torch's own is not.
    """
    converter_of = importlib.import_module("torchair._ge_concrete_graph.fx2ge_converter")._get_converter
    table = {op: form for op, form in core_table().items() if op not in COMPOSITES}
    return {op: form for op, form in table.items() if not _converts(converter_of(op))}


def _converts(converter: Any) -> bool:
    """Return True if `converter` does more than raise, as the one of each operator does that GE does not compute."""
    return converter is not None and set(inspect.unwrap(converter).__code__.co_names) != {"NotImplementedError"}


def _mend_converters(register: Callable[..., Any]) -> None:
    """Register converters for operators whose converter is missing, raises, or differs from the schema."""
    importlib.import_module("torchair._ge_concrete_graph.ge_converter.custom")  # else torchair does it later
    _mend_results(register)
    _mend_router(register)
    _convert_latent_line(register)
    convert_to_ge(register)


def _mend_results(register: Callable[..., Any]) -> None:
    """Register converters of operators that write in place with as many results as their schemas have.

    Those of torchair 2.13.0 return the caches and states that are written as well.
    """
    keep: Any = importlib.import_module("torchair.ge._ge_graph").dont_prune_me
    for name, own in _OWN_RESULTS.items():
        operator: Any = getattr(torch.ops.npu, name).default
        theirs = getattr(operator, "_ge_converter", None)
        if theirs is not None and not hasattr(theirs, "mended"):
            register(operator)(_returning(theirs, own, keep))
            operator._ge_converter.mended = True


def _returning(theirs: Callable[..., Any], own: Sequence[int], keep: Callable[..., Any]) -> Callable[..., Any]:
    """Return the converter `theirs` with the results at the positions `own` only, where it returns more."""

    @wraps(theirs)
    def converted(*args: Any, **kwargs: Any) -> Any:
        results = theirs(*args, **kwargs)
        keep(results[0])  # the graph may read what is written only
        if len(results) > len(own):
            results = tuple(results[each] for each in own)
        return results if len(own) > 1 else results[0]

    return converted


def _mend_router(register: Callable[..., Any]) -> None:
    """Register a converter of npu_moe_gating_top_k_softmax_v2 to MoeGatingTopKSoftmaxV2, which its aclnn call runs too.

    Every call raises in torchair 2.13.0: the converter (ge_converter/custom/npu_moe_gating_top_k_softmax_v2.py) passes
    `renorm` to MoeGatingTopKSoftmax, which has none. Nor can torchair's function of the second version be called: it
    takes `finished` by name only, and requires it by position.
    """
    router: Any = torch.ops.npu.npu_moe_gating_top_k_softmax_v2.default
    theirs = getattr(router, "_ge_converter", None)
    if theirs is None or hasattr(theirs, "mended"):
        return
    ge: Any = importlib.import_module("torchair.ge")

    def converted(x: Any, *, k: int = 1, finished: Any = None, renorm: int | None = 0, **others: Any) -> Any:
        if any(others.values()):  # the full softmax: the name of its attribute differs among versions of CANN
            return theirs(x, k=k, finished=finished, renorm=renorm, **others)
        return ge.custom_op(
            "MoeGatingTopKSoftmaxV2",
            inputs={"x": x, "finished": finished},
            outputs=["y", "expert_idx", "softmax_result"],
            attrs={"k": ge.attr.Int(k), "renorm": ge.attr.Int(renorm or 0)},
        )

    register(router)(converted)
    router._ge_converter.mended = True


def _convert_latent_line(register: Callable[..., Any]) -> None:
    """Register a converter of npu_kv_rmsnorm_rope_cache_v2: the older form, which writes in place too, without its
    cache results.
    """
    older: Any = getattr(torch.ops.npu.npu_kv_rmsnorm_rope_cache.default, "_ge_converter", None)
    line: Any = torch.ops.npu.npu_kv_rmsnorm_rope_cache_v2.default
    if older is None or getattr(line, "_ge_converter", None) is not None:
        return
    keep: Any = importlib.import_module("torchair.ge._ge_graph").dont_prune_me

    def converted(*args: Any, **kwargs: Any) -> Any:
        _, _, *rows = older(*args, **kwargs)
        keep(rows[0])  # the graph may read the caches only
        return tuple(rows)

    register(line)(converted)


def _with_tensor_lengths(name: str) -> Callable[..., Any]:
    """Return a function that calls torchair's own operator for lengths in tensors, which only GE has.

    The module of that operator is imported at the first call: the import would replace the kernels registered for it.
    """

    def converted(*args: Any, **kwargs: Any) -> Any:
        importlib.import_module(f"torchair.ops._{name}")
        return getattr(torch.ops.air, name).default(*args, **kwargs)

    return converted


def _complex(real: Tensor, imag: Tensor) -> Tensor:
    return torch.view_as_complex(torch.stack((real, imag), dim=-1))


def _polar(abs: Tensor, angle: Tensor) -> Tensor:
    return _complex(abs * angle.cos(), abs * angle.sin())


def _all(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    return torch.any(torch.logical_not(x), dim, keepdim).logical_not()


def _amax(x: Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> Tensor:
    dims = sorted(each % x.dim() for each in dim or range(x.dim()))
    for each in reversed(dims):
        x = torch.max(x, each, keepdim).values
    return x


def _amin(x: Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
    return -_amax(-x, dim, keepdim) if x.is_floating_point() else NotImplemented


def _bits(x: Tensor, dtype: torch.dtype) -> Any:
    """View the memory of `x` as `dtype`, by shapes on which torch and GE agree.

    Between itemsizes, torch keeps the number of dims, and GE's Bitcast adds or removes a last one.
    """
    wider, last = dtype.itemsize // x.dtype.itemsize, x.shape[-1]
    if wider == 1 or last == max(wider, 1):
        return NotImplemented  # the views returned below are traced with this form too
    shape = (*x.shape[:-1], last * x.dtype.itemsize // dtype.itemsize)
    parts = x.unflatten(-1, (-1, wider)) if wider else x.unsqueeze(-1)
    return aten.view.dtype(parts, dtype).reshape(shape)


def run_index_copy(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """Compute index_copy by npu_scatter_nd_update, which the compiler converts."""
    place = dim % x.dim()
    return _scatter_rows(x, {place: index}, place, source)


def run_index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    """Compute index_put by npu_scatter_nd_update; NotImplemented for sums and for masks."""
    given = [dim for dim, index in enumerate(indices) if index is not None]
    tensors = [index for index in indices if index is not None]
    if accumulate or any(index.dtype == torch.bool for index in tensors):
        return NotImplemented
    spread: list[Tensor] = list(torch.broadcast_tensors(*tensors))  # pyright: ignore
    is_adjacent = given == list(range(given[0], given[0] + len(given)))
    return _scatter_rows(x, dict(zip(given, spread, strict=True)), given[0] if is_adjacent else 0, values)


def _scatter_rows(x: Tensor, indices: Mapping[int, Tensor], at: int, source: Tensor) -> Tensor:
    """Write `source` where `indices`, of equal shapes, by their dims, index `x`, by one npu_scatter_nd_update on `x`.

    `at` is the number of dims of `source` before those of the indices. No view of `x` is taken: GE elides the copy of
    the cache only when the update reads the input directly.
    """
    first = next(iter(indices.values()))
    where, ends = tuple(first.shape), max(indices) + 1
    free = [dim for dim in range(ends) if dim not in indices]
    sizes = [x.shape[dim] for dim in free]
    grid = (*sizes[:at], *where, *sizes[at:])
    axes = {dim: number + len(where) * (number >= at) for number, dim in enumerate(free)}
    coordinates = [
        torch.arange(x.shape[dim], device=x.device, dtype=first.dtype).reshape(_along(axes[dim], len(grid)))
        if dim in axes
        else indices[dim].reshape((*where, *(1 for _ in sizes[at:])))
        for dim in range(ends)
    ]
    rows = torch.stack([part.expand(grid) for part in coordinates], dim=-1).reshape(-1, ends)
    rest = tuple(x.shape[ends:])
    updates = source.expand((*grid, *rest)).reshape((-1, *rest))
    return torch.ops.npu.npu_scatter_nd_update(x, rows, updates.to(x.dtype))


def _along(axis: int, rank: int) -> list[int]:
    return [-1 if place == axis else 1 for place in range(rank)]


def _gemma_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Compute npu_gemma_rms_norm(x, γ) as npu_rms_norm(x, 1 + γ), 1 + γ in float32, which the operator accepts."""
    return torch.ops.npu.npu_rms_norm(x, 1.0 + gamma.float(), epsilon)


def _rotary_mul(x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None) -> Any:
    """Compute the interleaved rotation x·r1 + (-x₁, x₀, -x₃, x₂, …)·r2 in float32.

    Except on A5, the converter drops `rotary_mode` unless `rotate` is given: GE would silently rotate halves. Other
    calls are `NotImplemented`.
    """
    from torchair._utils.check_platform import is_arch35  # pyright: ignore

    if rotary_mode != "interleave" or rotate is not None or is_arch35():
        return NotImplemented
    wide = x.float()
    partner = torch.stack([-wide[..., 1::2], wide[..., ::2]], dim=-1).flatten(-2)
    return (wide * r1 + partner * r2).to(x.dtype)
