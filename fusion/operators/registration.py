"""Real operator names in every process: torch_npu's own schemas where it imports, the same ones of ours elsewhere.

Two owners of one schema end the process in C++, beyond Python's reach. So ours are defined on the first `ensure()`,
only when torch_npu does not import, and given back before a later import of torch_npu defines its own.
"""

# pyright: reportPrivateUsage=false
# Taking definitions back is private in PyTorch.

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import ModuleSpec
from pkgutil import walk_packages
from threading import RLock
from types import MappingProxyType, ModuleType
from typing import Any, Literal

import torch
from torch.library import Library, register_fake

from fusion._torch.operators import OpOverload, has_kernel, schema_of
from fusion.errors import OperatorError
from fusion.operators.contract import Operator
from fusion.operators.legality import unchecked

_VENDOR = "torch_npu"
_DEVICES = ("CPU", "CUDA")
"""Where a decomposition may serve as the kernel; PrivateUse1 is torch_npu's."""


def _declared(package: ModuleType) -> Mapping[str, Operator]:
    names = [each.name for each in walk_packages(package.__path__, f"{package.__name__}.")]
    modules = (importlib.import_module(name) for name in names)
    found = (value for module in modules for value in vars(module).values() if isinstance(value, Operator))
    return MappingProxyType({operator.name: operator for operator in sorted(found, key=lambda op: op.name)})


OPERATORS: Mapping[str, Operator] = _declared(sys.modules[__package__ or ""])
"""Qualified name -> operator, for every `Operator` that a module of this package declares."""


def operator_of(target: Any) -> Operator | None:
    """The operator that a call to `target` is of, overload included; None for what the pass does not emit."""
    if not isinstance(target, OpOverload):
        return None
    schema = schema_of(target)
    return OPERATORS.get(f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name)


@dataclass(frozen=True)
class Origin:
    """Whose schemas are in use, why, and the version of torch_npu if it is torch_npu's."""

    source: Literal["torch_npu", "own"]
    reason: str
    version: str | None


@dataclass
class _Registration:
    """What this process has registered: PyTorch's dispatcher is one per process, and so is this."""

    origin: Origin | None = None
    definitions: dict[str, Library] = field(default_factory=dict[str, Library])
    kernels: dict[str, Library] = field(default_factory=dict[str, Library])
    lock: RLock = field(default_factory=RLock)


_registration = _Registration()


def ensure() -> Origin:
    """Register what is missing of `OPERATORS` in this process and say whose schemas are in use; repeatable.

    Imports torch_npu if it is installed. Defines no schema that exists, and adds CPU, CUDA and Meta kernels only
    where there are none. A torch_npu that is imported later takes over, and `ensure()` then says so.
    """
    with _registration.lock:
        if _registration.origin is None:
            _settle(_vendor_origin())
        assert _registration.origin is not None
        return _registration.origin


def decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """Operator -> decomposition in plain aten: a table for `make_fx`, AOT or Inductor."""
    ensure()
    return {operator.overload(): operator.fallback for operator in OPERATORS.values()}


def _vendor_origin() -> Origin:
    if _VENDOR not in sys.modules and importlib.util.find_spec(_VENDOR) is None:
        return Origin("own", f"{_VENDOR} is not installed", None)
    try:
        return _vendor_in_use(importlib.import_module(_VENDOR))
    except (ImportError, OSError, RuntimeError) as error:
        return _vendor_broken(error)


def _vendor_in_use(module: ModuleType) -> Origin:
    return Origin("torch_npu", f"{_VENDOR} is imported", getattr(module, "__version__", None))


def _vendor_broken(error: BaseException) -> Origin:
    return Origin("own", f"{_VENDOR} is installed but does not import: {type(error).__name__}: {error}", None)


def _settle(origin: Origin) -> None:
    """Register everything that is missing, and be ready to hand over if the schemas are ours."""
    _registration.origin = origin
    for operator in OPERATORS.values():
        if not _exists(operator):
            _define(operator)
        _add_kernels(operator)
    if origin.source == "own":
        sys.meta_path.insert(0, _handover)


def _withdraw() -> None:
    """Take back every definition of ours, so that torch_npu finds its names free.

    The CPU and CUDA kernels stay: they keep the dispatcher's entries alive, and with them the operators that graphs
    and users already hold. Freed entries would be used again, as garbage.
    """
    if _handover in sys.meta_path:
        sys.meta_path.remove(_handover)
    while _registration.definitions:
        _registration.definitions.popitem()[1]._destroy()


def _exists(operator: Operator) -> bool:
    name, _, overload = operator.short.partition(".")
    packet = getattr(getattr(torch.ops, operator.namespace), name, None)
    return packet is not None and (overload or "default") in packet.overloads()


def _define(operator: Operator) -> None:
    if operator.namespace not in _registration.definitions:
        _registration.definitions[operator.namespace] = Library(operator.namespace, "FRAGMENT")
    library = _registration.definitions[operator.namespace]
    library.define(operator.schema.split("::", 1)[1])
    library.impl(operator.short, operator.fallback, "CompositeExplicitAutograd")
    register_fake(operator.name, operator.meta, lib=library)


def _add_kernels(operator: Operator) -> None:
    if operator.namespace not in _registration.kernels:
        _registration.kernels[operator.namespace] = Library(operator.namespace, "IMPL")
    library = _registration.kernels[operator.namespace]
    for device in _DEVICES:
        if not has_kernel(operator.name, device):
            library.impl(operator.short, operator.fallback, device)
    if operator.on_host and not has_kernel(operator.name, "PrivateUse1"):
        library.impl(operator.short, partial(told_in_numbers, operator), "PrivateUse1")
    if operator.runs_default and not has_kernel(operator.name, "PrivateUse1"):
        library.impl(operator.short, partial(run_by_default, operator), "PrivateUse1")
    imported = _registration.origin is not None and _registration.origin.source == _VENDOR
    if imported and operator.older and not has_kernel(operator.name, "PrivateUse1"):  # not before: theirs come with it
        library.impl(operator.short, partial(run_by_older, operator), "PrivateUse1")
    if not has_kernel(operator.name, "Meta"):  # torch_npu gives some no shapes for fake tensors
        register_fake(operator.name, operator.meta, lib=library)


def told_in_numbers(operator: Operator, *args: Any, **kwargs: Any) -> Any:
    """torch_npu's own overload of an operator, which takes numbers for what `operator` takes in tensors on the host.

    Raises `OperatorError` for a tensor on the device: to read it would wait for the device, unseen.
    """
    given = operator.bind(args, kwargs)
    for name in operator.on_host:
        if isinstance(given[name], torch.Tensor):
            given[name] = _numbers(operator, name, given[name])
    return _default(operator)(**given)


def run_by_default(operator: Operator, *args: Any, **kwargs: Any) -> Any:
    """What the vendor's own overload of an operator gives, without the caches that it may return as well.

    Where the package that has it is not loaded, the decomposition.
    """
    if not has_default(operator):
        return operator.fallback(*args, **kwargs)
    results = _default(operator)(*args, **kwargs)
    if isinstance(results, torch.Tensor):
        return results
    return tuple(results[: len(schema_of(operator.overload()).returns)])


def run_by_older(operator: Operator, *args: Any, **kwargs: Any) -> Any:
    """What the older spelling of an operator gives, where torch_npu does not have it; results that it lacks are empty.

    Raises `OperatorError` where its package is not there, or it does not name what the call is about.
    """
    space, _, name = operator.older.partition("::")
    older = getattr(getattr(getattr(torch.ops, space), name, None), "default", None)
    if older is None:
        raise OperatorError(
            f"launching {operator.name}: this torch_npu does not have it, and no package that is loaded has the older "
            f"{operator.older}; install a torch_npu that has it, or plan without it: disable={{{operator.short!r}}}"
        )
    given = operator.bind(args, kwargs)
    named = {each.name for each in schema_of(older).arguments}
    meant = {name: each.default_value for name, each in operator.arguments.items()} | dict(operator.older_means)
    lost = [name for name, value in given.items() if name not in named and value != meant[name]]
    with unchecked():  # the kernel computes the call, not the decomposition
        promised = operator.meta(**given)
    others = promised[1:] if isinstance(promised, tuple) else ()
    lost += [f"result {number}" for number, each in enumerate(others, 1) if each.numel()]
    if lost:
        raise OperatorError(
            f"launching {operator.name} by the older {operator.older}: it has no {', '.join(lost)}; install a "
            "torch_npu that has the operator itself"
        )
    result = older(**{name: value for name, value in given.items() if name in named})
    whole = isinstance(result, torch.Tensor) and isinstance(promised, tuple)
    return (result, *others) if whole else result


def has_default(operator: Operator) -> bool:
    """Whether the vendor's own overload of an operator is there."""
    packet = getattr(getattr(torch.ops, operator.namespace), operator.short.partition(".")[0], None)
    return getattr(packet, "default", None) is not None  # a packet does not list what was defined after it


def _default(operator: Operator) -> OpOverload:
    return getattr(getattr(torch.ops, operator.namespace), operator.short.partition(".")[0]).default


def _numbers(operator: Operator, name: str, value: torch.Tensor) -> list[int]:
    if value.device.type != "cpu":
        raise OperatorError(
            f"launching {operator.name}, with {name} on {value.device}: to read it there would wait for the device. "
            "Lower the graph to torchair, or plan it for eager with the option lengths='host'"
        )
    return value.tolist()


class _Handover:
    """Finder on `sys.meta_path`: gives our schemas back in the moment in which torch_npu is executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the other finders have for torch_npu, with a loader that hands over; None for other modules."""
        if name != _VENDOR:
            return None
        others = (finder for finder in list(sys.meta_path) if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._wrap(spec.loader)
        return spec

    def _wrap(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # Looking for torch_npu must change nothing, so the hand-over waits until it is executed.
            with _registration.lock:
                _withdraw()
                try:
                    execute(module)
                except BaseException as error:
                    _settle(_vendor_broken(error))
                    raise
                _settle(_vendor_in_use(module))

        loader.exec_module = exec_module


_handover = _Handover()
