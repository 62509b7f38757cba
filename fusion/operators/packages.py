"""Packages that register operators with PyTorch: their namespaces, and the module whose import registers them."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from fusion.errors import OperatorError


@dataclass(frozen=True)
class Package:
    """A Python package that registers operators when it is imported.

    Attributes:
        name: name of the distribution, as the option `packages` takes it.
        namespaces: namespaces of its operators under `torch.ops`, which no other package fills.
        summary: content, in one line.
        source: repository.
        module: module whose import registers the operators; "" for the module called `name`.
    """

    name: str
    namespaces: tuple[str, ...]
    summary: str
    source: str
    module: str = ""

    @property
    def registers(self) -> str:
        """Name of the module whose import registers the operators."""
        return self.module or self.name

    @property
    def is_imported(self) -> bool:
        """True if this process has imported the module that registers the operators."""
        return self.registers in sys.modules


VENDOR = Package(
    "torch_npu",
    ("npu", "atb"),
    "operators of CANN for PyTorch, and those of ATB, its transformer library",
    "https://gitcode.com/Ascend/op-plugin",
)

_packages = {
    each.name: each
    for each in (
        VENDOR,
        Package(
            "cann_ops_transformer",
            ("cann_ops_transformer",),
            "operators of the repository ops-transformer: hyper-connections, compressed sparse attention",
            "https://gitcode.com/cann/ops-transformer",
        ),
        Package(
            "custom_ops",
            ("custom",),
            "operators of the recipes for inference",
            "https://gitcode.com/cann/cann-recipes-infer, ops/ascendc",
        ),
        Package(
            "custom_pypto",
            ("custom_pypto",),
            "layers of DeepSeek-V3.2 of the recipes for inference, written in PyPTO",
            "https://gitcode.com/cann/cann-recipes-infer, ops/pypto",
        ),
        Package(
            "vllm_ascend",
            ("_C_ascend",),
            "operators that vLLM on Ascend builds",
            "https://github.com/vllm-project/vllm-ascend, csrc",
            module="vllm_ascend.vllm_ascend_C",
        ),
    )
}
PACKAGES: Mapping[str, Package] = MappingProxyType(_packages)
"""Name -> package, for every package of this module, or that a library provides."""


def package_of(namespace: str) -> Package | None:
    """Return the package of `PACKAGES` that registers the operators of `namespace`; None if there is none."""
    return next((each for each in _packages.values() if namespace in each.namespaces), None)


def provide_packages(packages: Iterable[Package]) -> None:
    """Add the `packages` of a library to `PACKAGES`.

    Raises:
        OperatorError: another package has the name or a namespace of one of them.
    """
    for package in packages:
        others = [each for each in _packages.values() if each != package]
        clash = next((each for each in others if _clash(each, package)), None)
        if clash is not None:
            raise OperatorError(
                f"providing the package {package.name} with the namespaces {', '.join(package.namespaces)}: the "
                f"package {clash.name} has the same name or one of these namespaces; rename it"
            )
        _packages[package.name] = package


def _clash(one: Package, other: Package) -> bool:
    return one.name == other.name or not set(one.namespaces).isdisjoint(other.namespaces)


def is_installed(package: Package) -> bool:
    """Return True if the module of `package` is imported, or can be found; its import may fail nonetheless."""
    outer = package.registers.partition(".")[0]
    return outer in sys.modules or importlib.util.find_spec(outer) is not None


@cache
def import_failure(package: Package) -> str:
    """Import the module of `package`, once per process, and return "", or what is wrong with it as a text."""
    if not is_installed(package):
        return "is not installed"
    try:
        importlib.import_module(package.registers)
    except Exception as error:  # any: the import runs code of others
        return f"is installed but does not import: {type(error).__name__}: {error}"
    return ""
