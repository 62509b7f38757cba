"""Registration of the operators under their real names: torch_npu's schemas if it imports, else equal schemas of ours.

Two definitions of one schema abort the process in C++, which Python cannot catch. So ours are defined at the first
`ensure()`, only where no package has defined its own, and are withdrawn before a later import of torch_npu, or of the
module of another package, defines its own.
"""

# pyright: reportPrivateUsage=false
# Withdrawing definitions is private in PyTorch (Library._destroy).

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from pkgutil import walk_packages
from threading import RLock
from types import MappingProxyType, ModuleType
from typing import Any, Literal

import torch
from torch.library import Library, register_fake

from fusion._torch.operators import OpOverload, has_kernel, schema_of
from fusion.errors import OperatorError
from fusion.operators.legality import unchecked
from fusion.operators.operator import Operator
from fusion.operators.packages import PACKAGES, VENDOR, Package, import_failure, provide_packages

_VENDOR = VENDOR.name
_DEVICES = ("CPU", "CUDA")
"""Dispatch keys that a decomposition may serve as the kernel of; PrivateUse1 belongs to torch_npu."""


def _declared(package: ModuleType) -> dict[str, Operator]:
    names = [each.name for each in walk_packages(package.__path__, f"{package.__name__}.")]
    modules = (importlib.import_module(name) for name in names)
    declared = (value for module in modules for value in vars(module).values() if isinstance(value, Operator))
    return {operator.name: operator for operator in sorted(declared, key=lambda op: op.name)}


_operators = _declared(sys.modules[__package__ or ""])
OPERATORS: Mapping[str, Operator] = MappingProxyType(_operators)
"""Qualified name -> operator, for every `Operator` that a module of this package declares, or a library `provide`s."""


def operator_of(target: Any) -> Operator | None:
    """Return the operator of the overload `target`; None if the pass does not emit it."""
    if not isinstance(target, OpOverload):
        return None
    schema = schema_of(target)
    return OPERATORS.get(f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name)


@dataclass(frozen=True)
class Origin:
    """Owner of the schemas in use (`source`), the reason for it, and the version of torch_npu if that is the owner."""

    source: Literal["torch_npu", "own"]
    reason: str
    version: str | None


@dataclass
class _Registration:
    """Registrations of this process, as libraries of PyTorch by namespace; one, because there is one dispatcher.

    `own` are the names of the operators that have schemas of ours.
    """

    origin: Origin | None = None
    own: set[str] = field(default_factory=set[str])
    definitions: dict[str, Library] = field(default_factory=dict[str, Library])
    kernels: dict[str, Library] = field(default_factory=dict[str, Library])
    lock: RLock = field(default_factory=RLock)


_registration = _Registration()


def ensure() -> Origin:
    """Register in this process what is missing of `OPERATORS`, and return the owner of the schemas; idempotent.

    Imports torch_npu if it is installed. Defines no schema that exists, and adds CPU, CUDA and Meta kernels only
    where there are none. If torch_npu is imported later, its schemas replace ours, and `ensure()` returns it as owner.
    """
    with _registration.lock:
        if _registration.origin is None:
            _settle(_vendor_origin())
        return _settled()


def provide(operators: Iterable[Operator], packages: Iterable[Package] = ()) -> None:
    """Add `operators` of a library to `OPERATORS`, and register them at once if `ensure` has run; add `packages` to
    `PACKAGES`.

    Raises:
        OperatorError: another operator has the name of one of them, or another package that or a namespace.
    """
    with _registration.lock:
        provide_packages(packages)
        for operator in operators:
            known = _operators.get(operator.name)
            if known is operator:
                continue
            if known is not None:
                raise OperatorError(
                    f"providing the operator {operator.name}: another operator of this name is declared already; give "
                    "it a namespace of its own, or start a new process to declare it anew"
                )
            _operators[operator.name] = operator
            if _registration.origin is not None:
                _register(operator)


def decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """Return overload -> decomposition into plain aten for all operators, a table for `make_fx`, AOT or Inductor."""
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
    """Register everything that is missing, and install the import hook for the packages."""
    _registration.origin = origin
    for operator in OPERATORS.values():
        _register(operator)
    if _handover not in sys.meta_path:
        sys.meta_path.insert(0, _handover)


def _register(operator: Operator) -> None:
    """Define the schema of an operator unless it exists, and add the kernels that are missing."""
    if not _exists(operator):
        _define(operator)
    _add_kernels(operator)


def _withdraw(package: Package) -> None:
    """Withdraw all schemas that we defined in the namespaces of `package`, so that it can define its own.

    The CPU and CUDA kernels stay: they keep the dispatcher's entries alive, and with them the overloads that graphs
    and users refer to. Calls through a freed entry would read freed memory.
    """
    for namespace in package.namespaces:
        _registration.own = {each for each in _registration.own if not each.startswith(f"{namespace}::")}
        if namespace in _registration.definitions:
            _registration.definitions.pop(namespace)._destroy()


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
    _registration.own.add(operator.name)


def _add_kernels(operator: Operator) -> None:
    """Register the kernels that `operator` lacks: the decomposition on CPU and CUDA, calls of vendor overloads on NPUs,
    and a Meta kernel."""
    if operator.namespace not in _registration.kernels:
        _registration.kernels[operator.namespace] = Library(operator.namespace, "IMPL")
    library = _registration.kernels[operator.namespace]
    for device in _DEVICES:
        if not has_kernel(operator.name, device):
            library.impl(operator.short, operator.fallback, device)
    if operator.on_host and not has_kernel(operator.name, "PrivateUse1"):
        library.impl(operator.short, partial(run_with_ints, operator), "PrivateUse1")
    if operator.runs_default and not has_kernel(operator.name, "PrivateUse1"):
        library.impl(operator.short, partial(run_by_default, operator), "PrivateUse1")
    imported = _registration.origin is not None and _registration.origin.source == _VENDOR
    # Only once torch_npu is imported: the kernels of newer versions come with the import.
    if imported and operator.older and not has_kernel(operator.name, "PrivateUse1"):
        library.impl(operator.short, partial(run_by_older, operator), "PrivateUse1")
    if not has_kernel(operator.name, "Meta"):  # torch_npu lacks some Meta kernels
        register_fake(operator.name, operator.meta, lib=library)


def run_with_ints(operator: Operator, *args: Any, **kwargs: Any) -> Any:
    """Call torch_npu's own overload of `operator`, with the tensors in `operator.on_host` converted to lists of ints.

    Raises:
        OperatorError: one of these tensors is on the device: reading it would wait for the device without notice.
    """
    given = operator.bind(args, kwargs)
    for name in operator.on_host:
        if isinstance(given[name], torch.Tensor):
            given[name] = _numbers(operator, name, given[name])
    return _default(operator)(**given)


def run_by_default(operator: Operator, *args: Any, **kwargs: Any) -> Any:
    """Call the vendor's default overload of `operator`, and return as many results as the schema of `operator` has: the
    vendor's may return caches as well. Run the decomposition if the package of that overload is not loaded."""
    if not has_default(operator):
        return operator.fallback(*args, **kwargs)
    results = _default(operator)(*args, **kwargs)
    if isinstance(results, torch.Tensor):
        return results
    return tuple(results[: len(schema_of(operator.overload()).returns)])


def run_by_older(operator: Operator, *args: Any, **kwargs: Any) -> Any:
    """Call `operator.older`, in place of an operator that torch_npu lacks; results that it does not return are empty.

    Raises:
        OperatorError: its package is not loaded, or the call sets an argument or needs a result that it does not have.
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
    lacks_results = isinstance(result, torch.Tensor) and isinstance(promised, tuple)
    return (result, *others) if lacks_results else result


def absence(operator: Operator, package: Package) -> str:
    """Import `package`, and return "" if that has registered `operator`, else a text that says what is missing."""
    failure = import_failure(package)
    if failure:
        return failure
    theirs = operator.name.partition(".")[0] if operator.runs_default else operator.name
    name, _, overload = theirs.partition("::")[2].partition(".")
    packet = getattr(getattr(torch.ops, operator.namespace), name, None)
    is_there = theirs not in _registration.own and getattr(packet, overload or "default", None) is not None
    return "" if is_there else f"does not have {name} in the installed version"


def has_default(operator: Operator) -> bool:
    """Return True if the default overload of `operator`, which is the vendor's own, is registered."""
    packet = getattr(getattr(torch.ops, operator.namespace), operator.short.partition(".")[0], None)
    return getattr(packet, "default", None) is not None  # packet.overloads() omits later definitions


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
    """Finder on `sys.meta_path` that withdraws our schemas at the moment at which the module of a package runs."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that the other finders have for the module of a package, with a loader that first withdraws
        our schemas; None for other modules."""
        package = next((each for each in PACKAGES.values() if each.registers == name), None)
        if package is None:
            return None
        others = (finder for finder in list(sys.meta_path) if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._wrap(spec.loader, package)
        return spec

    def _wrap(self, loader: Any, package: Package) -> None:
        """Wrap what runs code of `package`: withdraw our schemas, execute it, and register what it lacks.

        A module in Python runs in `loader.exec_module`, an extension in C++ when it is loaded, in `create_module`.
        """
        # find_spec("torch_npu") alone must change nothing, so schemas are withdrawn when the module is executed.
        steps = ("create_module", "exec_module") if isinstance(loader, ExtensionFileLoader) else ("exec_module",)
        for step in steps:
            setattr(loader, step, partial(_handed_over, package, getattr(loader, step)))


def _handed_over(package: Package, execute: Callable[[Any], Any], given: Any) -> Any:
    """Return `execute(given)`, which registers operators of `package`, with our schemas withdrawn before it and the
    missing ones registered after it."""
    with _registration.lock:
        _withdraw(package)
        try:
            result = execute(given)
        except BaseException as error:
            _settle(_vendor_broken(error) if package is VENDOR else _settled())
            raise
        _settle(_vendor_in_use(given) if package is VENDOR and isinstance(given, ModuleType) else _settled())
        return result


def _settled() -> Origin:
    assert _registration.origin is not None
    return _registration.origin


_handover = _Handover()
