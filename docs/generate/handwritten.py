"""Parts of the page on hand-written code: the operators that run without an NPU, and what they do not compute."""

from __future__ import annotations

from docs.generate.markdown import code, table
from fusion.frontend.catalogue import OperatorEntry, operator_entries, package_entries


def operators() -> str:
    """Return a table for each package: each operator, how Python calls it, and the arguments for which it raises."""
    return "\n".join(_package(each.name) for each in package_entries() if _entries(each.name)) + "\n"


def _package(name: str) -> str:
    rows = [(code(_spelling(each)), _raising(each)) for each in _entries(name)]
    return f"### Of {code(name)}\n\n{table(('operator', 'raises where set'), rows)}"


def _entries(package: str) -> list[OperatorEntry]:
    """List the operators of `package` that are called as on an NPU: no functional forms and no overloads of graphs."""
    own = (".functional", ".in_place", ".tensor_lengths", ".lse")
    entries = (each for each in operator_entries() if each.package == package)
    return [each for each in entries if not each.name.endswith((*own, "_functional"))]


def _spelling(entry: OperatorEntry) -> str:
    """Return the expression by which Python code calls the operator."""
    space, _, name = entry.name.partition("::")
    name = name.partition(".")[0]
    if space == "npu":
        return f"torch_npu.{name}"
    return f"torch.ops.{space}.{name}"


def _raising(entry: OperatorEntry) -> str:
    return ", ".join(map(code, entry.uncomputed)) or "-"
