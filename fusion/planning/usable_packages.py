"""Packages whose operators a plan may call: torch_npu, those that the user names, and on an NPU the imported ones.

Of torch_npu the version counts that the user names, else the imported one.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from fusion.operators import PACKAGES, Operator, ensure, package_of
from fusion.operators.packages import VENDOR, import_failure, is_installed
from fusion.operators.registration import absence
from fusion.operators.vendor_versions import PREFIX, lack, minor, version_named, versions
from fusion.planning.target import Target

log = logging.getLogger("fusion")


@dataclass(frozen=True)
class Usable:
    """Packages, beside torch_npu, whose operators a plan may call: names in order, so that equal ones have equal texts.

    Attributes:
        named: those that the option `packages` names.
        imported: those that this process has imported, if this machine is an NPU.
        on_npu: True if this machine is known to be an NPU.
        version: version of torch_npu, such as "2.10"; "" for that by which operators are declared.
    """

    named: tuple[str, ...] = ()
    imported: tuple[str, ...] = ()
    on_npu: bool = False
    version: str = ""

    @staticmethod
    def of(named: Collection[str]) -> Usable:
        """Return the usable packages of this process, where the user names `named`.

        On an NPU these are imported: only then do their operators have kernels.
        """
        version = version_named(named) or minor(ensure().version)
        names = tuple(sorted(each for each in named if not each.startswith(PREFIX)))
        imported = tuple(sorted(each.name for each in PACKAGES.values() if each.is_imported and each is not VENDOR))
        if not (names or imported) or not Target.detect().is_npu:
            return Usable(names, version=version)
        for name in names:
            failure = import_failure(PACKAGES[name])
            if failure:
                log.warning("the package %s, which the option packages names, %s: decompositions run", name, failure)
        return Usable(names, imported, on_npu=True, version=version)

    def refusal(self, operator: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
        """Return the reason why a plan may not call `operator` with `args` and `kwargs`: its package is not usable, or
        not in a version that takes the call; None if it may."""
        package = package_of(operator.namespace)
        if package is VENDOR:
            return self._older(operator, args, kwargs)
        if package is None or package.name in self.named:
            return None
        if package.name in self.imported:
            lack = absence(operator, package)
        else:
            lack = "is not installed" if self.on_npu and not is_installed(package) else "was not named"
        if not lack:
            return None
        return f"{operator.short}: needs the package {package.name}, which {lack}; name it in the option packages"

    def _older(self, operator: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
        """Return the reason why `version` of torch_npu cannot run the call; None if it can."""
        if self.version not in versions():
            return None
        given = operator.bind(args, kwargs)
        return lack(self.version, operator, given, frozenset([*list(operator.arguments)[: len(args)], *kwargs])) or None
