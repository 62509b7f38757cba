"""Other versions of torch_npu than the one that the operators are declared by: operators and arguments they lack.

`vendor_versions.json` has them by version and operator. It is written of the schemas in the wheels
(`python -m tests.operators.wheel_versions`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fusion.operators.operator import Operator

PREFIX = "torch_npu=="
"""Beginning of the name of a version in the option `packages`."""


@dataclass(frozen=True)
class Older:
    """Differences of an operator in one version of torch_npu.

    Attributes:
        is_absent: True if that version does not have the operator.
        lacks: arguments that it does not have.
        requires: arguments that must be tensors there, and may be None here.
        defaults: arguments with another default there.
    """

    is_absent: bool = False
    lacks: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    defaults: tuple[str, ...] = ()


@cache
def versions() -> Mapping[str, Mapping[str, Older]]:
    """Return version -> qualified name of an operator -> its differences; equal operators have no entry."""
    table = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return {
        version: {name: Older(**{key: _frozen(value) for key, value in row.items()}) for name, row in rows.items()}
        for version, rows in table.items()
    }


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def version_named(packages: Iterable[str]) -> str:
    """Return the version of torch_npu that one of `packages` names, such as "2.10"; "" if none does."""
    return next((each.removeprefix(PREFIX) for each in packages if each.startswith(PREFIX)), "")


def minor(version: str | None) -> str:
    """Cut a `version`, such as "2.10.0.post2", to the two numbers by which `versions` lists it; "" for None."""
    return ".".join((version or "").split(".")[:2])


def lack(version: str, operator: Operator, given: Mapping[str, Any], written: frozenset[str]) -> str:
    """Return the reason why torch_npu of this `version` cannot run a call of `operator`, "" if it can.

    Args:
        version: a version of `versions`, or another one, which counts as the one that operators are declared by.
        operator: the operator.
        given: the value of each argument of the call.
        written: the arguments that the call itself gives, and does not leave at their defaults.
    """
    vendors = operator.name if operator.name in versions().get(version, {}) else _vendors_form(operator)
    row = versions().get(version, {}).get(vendors)
    if row is None:
        return ""
    if row.is_absent:
        return f"{operator.short}: torch_npu {version} does not have it; plan for a newer one in the option packages"
    lacking = [name for name in row.lacks if given[name] != operator.default(name)]
    lacking += [name for name in row.requires if given[name] is None]
    lacking += [name for name in row.defaults if name not in written]
    if not lacking:
        return ""
    what = ", ".join(lacking)
    return (
        f"{what}: it is given otherwise than torch_npu {version} takes it in {operator.short}; plan for a newer one in "
        "the option packages"
    )


def _vendors_form(operator: Operator) -> str:
    """Name the operator of the vendor that an overload of ours calls."""
    name, _, overload = operator.name.partition(".")
    return name if overload in ("functional", "in_place", "tensor_lengths") else operator.name
