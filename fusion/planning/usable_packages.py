"""Packages whose operators a plan may call: torch_npu, those that the user names, and on an NPU the imported ones."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from fusion.operators import PACKAGES, Operator, package_of
from fusion.operators.packages import VENDOR, import_failure, is_installed
from fusion.operators.registration import absence
from fusion.planning.target import Target

log = logging.getLogger("fusion")


@dataclass(frozen=True)
class Usable:
    """Packages, beside torch_npu, whose operators a plan may call: names in order, so that equal ones have equal texts.

    Attributes:
        named: those that the option `packages` names.
        imported: those that this process has imported, if this machine is an NPU.
        on_npu: True if this machine is known to be an NPU.
    """

    named: tuple[str, ...] = ()
    imported: tuple[str, ...] = ()
    on_npu: bool = False

    @staticmethod
    def of(named: Iterable[str]) -> Usable:
        """Return the usable packages of this process, where the user names `named`.

        On an NPU these are imported: only then do their operators have kernels.
        """
        names = tuple(sorted(named))
        imported = tuple(sorted(each.name for each in PACKAGES.values() if each.is_imported and each is not VENDOR))
        if not (names or imported) or not Target.detect().is_npu:
            return Usable(names)
        for name in names:
            failure = import_failure(PACKAGES[name])
            if failure:
                log.warning("the package %s, which the option packages names, %s: decompositions run", name, failure)
        return Usable(names, imported, on_npu=True)

    def refusal(self, operator: Operator) -> str | None:
        """Return the reason why a plan may not call `operator`, which its package gives; None if it may."""
        package = package_of(operator.namespace)
        if package in (None, VENDOR) or package.name in self.named:
            return None
        if package.name in self.imported:
            lack = absence(operator, package)
        else:
            lack = "is not installed" if self.on_npu and not is_installed(package) else "was not named"
        if not lack:
            return None
        return f"{operator.short}: needs the package {package.name}, which {lack}; name it in the option packages"
