"""Fake tensors and fake modes."""

# pyright: reportPrivateUsage=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, TypeVar

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
    has_meta,  # pyright: ignore[reportPrivateImportUsage]
    in_kernel_invocation_manager,
    op_implementations_checks,  # pyright: ignore[reportPrivateImportUsage]
    torch_decomp_decompositions,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode

from fusion._torch.nested import leaves, map_only
from fusion._torch.operators import is_composite

__all__ = ["FakeTensor", "FakeTensorMode", "TorchDispatchMode"]  # re-exported from torch

aten = torch.ops.aten


Mode = TypeVar("Mode", bound=FakeTensorMode)


def fake_mode_of(gm: fx.GraphModule) -> FakeTensorMode | None:
    """Return the fake mode in which `gm` was captured, that of the values of its placeholders; None without any.

    Private: `torch._guards.detect_fake_mode`.
    """
    return detect_fake_mode([node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")])


def in_fake_mode(op: Any, mode: FakeTensorMode, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator that calls graphs, such as `cond`, in a fake `mode`, which may be of a derived type.

    torch registers some implementations for all fake modes, and others by the exact type of the mode.
    Private: `torch._higher_order_ops.utils.registered_hop_fake_fns`, `HigherOrderOperator.python_key_table`.
    """
    from torch._higher_order_ops.utils import registered_hop_fake_fns

    if op in registered_hop_fake_fns:
        return FakeTensorMode.__torch_dispatch__(mode, op, [], args, kwargs)
    return op.python_key_table[FakeTensorMode](mode, *args, **kwargs)


def without_fakes() -> AbstractContextManager[Any]:
    """Suspend the active fake mode, so that real tensors are computed. Private: `unset_fake_temporarily`."""
    return unset_fake_temporarily()


def fresh_fake_mode(kind: type[Mode] = FakeTensorMode) -> Mode:
    """Make a fake mode with a shape environment of its own, which accepts real tensors that a function closes over."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return kind(allow_non_fake_inputs=True, shape_env=ShapeEnv())


class CopyMode(FakeCopyMode):
    """Copy mode of explain: tensors become fake; a `CausalBias` stays itself, as its contents are never read."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `func`; `Tensor.__deepcopy__` returns a fake copy, of a `CausalBias` the object itself."""
        from torch.nn.attention.bias import CausalBias  # which loads Dynamo

        if func is torch.Tensor.__deepcopy__ and isinstance(args[0], CausalBias):
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)


OUTSIDE = "a causal bias is made outside of fake mode"
"""Reason of a graph break that occurs only under `real_causal_biases`, not where the model runs."""


@contextmanager
def real_causal_biases() -> Generator[None]:
    """Let `causal_lower_right` and `causal_upper_left` make real tensors inside a fake mode.

    torch refuses to make a subclass by its default constructor there. The memory of a bias is never written to.
    """
    from torch.nn.attention.bias import CausalBias

    kind: Any = CausalBias

    def made(cls: Any, *given: Any) -> Any:
        with unset_fake_temporarily():
            return torch.Tensor.__new__(cls, *given)

    kind.__new__ = torch.compiler.disable(made, reason=OUTSIDE)
    try:
        yield
    finally:
        del kind.__new__


def fake_like(fake: Any) -> torch.Tensor:
    """Make a fake tensor with the shape, strides, dtype and device of `fake`."""
    if not isinstance(fake, FakeTensor):
        return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
    return fake_tensor(fake.fake_mode, fake.shape, fake.stride(), fake.dtype, fake.device)


def fake_tensor(
    mode: FakeTensorMode, shape: Sequence[Any], stride: Sequence[Any], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Make a fake tensor.

    Built directly: running `empty_strided` under the fake mode takes twenty times as long.
    """
    with unset_fake_temporarily():
        meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return _faked(mode, meta, device)


def _faked(mode: FakeTensorMode, meta: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Wrap a `meta` tensor as a fake one of `device`.

    Equivalent to FakeTensor, most of whose time goes into checks of its arguments and attributes that are set one by
    one.
    Private: `torch.Tensor._make_subclass`, and the attributes of a FakeTensor.
    """
    if device.type != "cpu" and device == torch.device(device.type):
        return FakeTensor(mode, meta, device)  # FakeTensor adds the index of the current device
    fake = torch.Tensor._make_subclass(
        FakeTensor, meta, meta.requires_grad, dispatch_device=True, device_for_backend_keys=device
    )
    if mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
    else:
        torch._C._set_throw_on_mutable_data_ptr(fake)
    vars(fake).update(_fresh_attributes(device), fake_mode=mode)
    return fake


@cache
def _fresh_attributes(device: torch.device) -> Mapping[str, Any]:
    """Return the attributes of a new fake tensor of `device`, except its mode."""
    with unset_fake_temporarily():
        mode = FakeTensorMode()
        mode.allow_meta = True
        fresh = FakeTensor(mode, torch.empty(0, device="meta"), device)
    return {name: each for name, each in vars(fresh).items() if name != "fake_mode"}


class FakesMode(TorchDispatchMode):
    """Base of dispatch modes that observe calls on fake tensors while a graph is compiled.

    Such a mode needs no wrapper that disables Dynamo in it, which takes as long as a call.
    Private: `TorchDispatchMode._should_skip_dynamo`.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def without_view_tracking() -> AbstractContextManager[None]:
    """Disable the tracking of view bases, so that one tensor may be the result of several calls.

    Private: `torch._C._ExcludeDispatchKeyGuard`.
    """
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView))


_GUARD = re.compile(r"Guard attempted while ShapeEnv guards are frozen: (.*)")


class SizeAskedError(Exception):
    """Error of code that depends on a symbolic size; its text is the condition that was evaluated."""


@contextmanager
def _unwarned() -> Generator[None, None, None]:
    """Suppress torch's warning of a guard that fails under `without_guards`: a refusal, not a failure."""

    def is_other(record: logging.LogRecord) -> bool:
        return not record.msg.startswith("failed during evaluate_expr")

    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


@contextmanager
def unlogged(name: str = "torch._subclasses.fake_tensor") -> Generator[None, None, None]:
    """Suppress the log `name` of torch, that of operators on fake tensors, where the caller expects errors.

    Private: the name of the logger.
    """
    logger = logging.getLogger(name)
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled


@contextmanager
def without_guards(mode: Any) -> Generator[None, None, None]:
    """Raise inside the context where code in the fake `mode` would add a guard on a symbolic size.

    A lowering that reads a symbolic size as a number would have the graph recompiled for every other size.
    Private: the text of `torch.fx.experimental.symbolic_shapes._ShapeEnvGuardError`, which is repeated in the error of
    an operator that converts an argument to a number.

    Raises:
        SizeAskedError: something depends on a symbolic size.
    """
    env = getattr(mode, "shape_env", None)
    try:
        with nullcontext() if env is None else env.error_on_new_guards(), _unwarned():
            yield
    except RuntimeError as error:
        condition = _GUARD.search(str(error))
        if condition is None:
            raise
        raise SizeAskedError(condition[1]) from error


def run_on_fakes(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call `func` on fake tensors and return its fake results.

    A layer norm with weights of a wider dtype than x has statistics of that dtype; its Meta kernel returns that of x.
    """
    result = _on_fakes(func, args, kwargs)
    if func is not aten.native_layer_norm.default:
        return result
    dtype = next((each.dtype for each in args[2:4] if each is not None), args[0].dtype)
    return (result[0], *(each.to(dtype) for each in result[1:])) if dtype != args[0].dtype else result


def _on_fakes(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call `func`, an operator directly by its Meta kernel where fake mode would run nothing else.

    Fake mode takes five times as long, its cache included.
    Private: `torch._subclasses.fake_tensor`, `FakeTensor._find_common_device`.
    """
    if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
        return args[0].fake_device
    given = leaves(args, kwargs)
    if _makes(func) and kwargs.get("device") is not None and all(map(_is_known, given)):
        return _made(func, args, kwargs)
    if not _is_meta_enough(func) or kwargs.get("device") is not None:
        return _by_fake_mode(func, args, kwargs, given)
    mode = next((each.fake_mode for each in given if isinstance(each, FakeTensor)), None)
    if mode is None or not all(map(_is_known, given)):
        return _by_fake_mode(func, args, kwargs, given)
    try:
        with unset_fake_temporarily():
            device = _common_device(func, given)
            with in_kernel_invocation_manager(mode), torch._C._DisablePythonDispatcher():
                result = func(*args, **kwargs)
            return map_only(torch.Tensor, lambda each: _faked(mode, each, device), result)
    except Exception:
        if func in _SPECIAL_FOR_SYMBOLS:  # fake mode of torch 2.13 views expanded tensors that no kernel views
            raise
        return _by_fake_mode(func, args, kwargs, given)


def _by_fake_mode(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], given: Sequence[Any]
) -> Any:
    """Call `func` in fake mode, with torch's decompositions in Python where sizes are symbolic.

    Decompositions in C++ read sizes as numbers, which would specialise the graph to the sizes of the example.
    """
    symbolic = any(isinstance(size, torch.SymInt) for x in given if isinstance(x, torch.Tensor) for size in x.shape)
    with enable_python_dispatcher() if symbolic else nullcontext():
        return func(*args, **kwargs)


def _made(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a factory `func` in the active fake mode: on the meta device, then labelled with its own device."""
    with unset_fake_temporarily() as mode:
        if isinstance(mode, FakeTensorMode):
            with in_kernel_invocation_manager(mode):
                return _faked(mode, func(*args, **{**kwargs, "device": torch.device("meta")}), kwargs["device"])
    return func(*args, **kwargs)


def _common_device(func: Any, given: Sequence[Any]) -> torch.device:
    devices = {each.fake_device for each in given if isinstance(each, FakeTensor)}
    return devices.pop() if len(devices) == 1 else FakeTensor._find_common_device(func, given)[0]


_SPECIAL_FOR_SYMBOLS = (aten.view.default, aten._unsafe_view.default, aten.select.int, aten.slice.Tensor)
"""Views whose Meta kernels do not support symbolic sizes: fake mode treats only such sizes specially."""


@cache
def _is_meta_enough(func: Callable[..., Any]) -> bool:
    """Return True if fake mode runs the Meta kernel of `func` and nothing else, where all sizes are ints."""
    from torch._decomp import decomposition_table, meta_table

    if not isinstance(func, OpOverload) or func.namespace in ("prim", "prims"):
        return False
    if func._schema.is_mutable or not has_meta(func):
        return False
    if func in _SPECIAL_FOR_SYMBOLS:
        return True
    if any(check(func) for check, _ in op_implementations_checks):
        return False
    by_meta = func in meta_table or func in FakeTensorMode._cpp_meta_supports_symint or torch.Tag.view_copy in func.tags
    decomposed = func in decomposition_table and torch_decomp_decompositions(func)
    return by_meta or not (decomposed or is_composite(func))


_MADE = ("ones", "zeros", "full", "arange", "scalar_tensor")


@cache
def _makes(func: Callable[..., Any]) -> bool:
    """Return True if `func` is a factory, which makes a tensor without reading one."""
    return isinstance(func, OpOverload) and func.namespace == "aten" and func._schema.name.split("::")[-1] in _MADE


def _is_known(argument: Any) -> bool:
    """Return True if `argument` is a fake tensor without symbolic sizes, or neither a tensor nor a symbol."""
    if isinstance(argument, torch.Tensor):
        return isinstance(argument, FakeTensor) and not argument._has_symbolic_sizes_strides
    return not isinstance(argument, (torch.SymInt, torch.SymFloat, torch.SymBool))
