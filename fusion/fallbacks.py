"""Fallbacks of the fused operators: code that is written for an NPU runs on any machine, by plain aten."""

from __future__ import annotations

import difflib
import sys
from contextlib import suppress
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from fusion.errors import NoRulesError
from fusion.frontend.library import installed
from fusion.operators import OPERATORS, Origin, ensure
from fusion.operators.packages import VENDOR

_WHERE = "docs/handwritten.md lists what runs without an NPU"


def install(torch_npu: bool = True) -> Origin:
    """Register a decomposition of every declared operator that has no kernel on the CPU, and return the owner of the
    schemas; idempotent.

    Operators are those that `cann-fusion ops` lists, of all its packages, and those of installed packages of others.
    Each computes what its kernel computes, rounds where that rounds, and raises `fusion.errors.OperatorError` for a
    call that is not decomposed. They have Meta kernels too, for `torch.compile` and `torch.export`.

    Args:
        torch_npu: True to let `import torch_npu` give a stand-in for the package where it does not import: its
            functions are those operators, and everything else that is read of it raises AttributeError. An installed
            torch_npu that imports is never replaced.
    """
    with suppress(NoRulesError):
        installed()
    origin = ensure()
    if torch_npu and origin.source == "own":
        _put_stand_in()
    return origin


def _put_stand_in() -> None:
    """Put the stand-in for torch_npu into `sys.modules`, with all operators that are declared by now."""
    module = sys.modules.setdefault(VENDOR.name, _StandIn(VENDOR.name))
    if isinstance(module, _StandIn):
        module.fill()


class _StandIn(ModuleType):
    """Module in place of torch_npu, with the operators of CANN as functions, those of ATB as those of `atb`, and `npu`,
    which has no device.

    The functions are attributes, not made on demand: Dynamo reads the `__dict__` of a module.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, f"Stand-in for {name}, which does not import here: {_WHERE}.")
        self.__spec__ = ModuleSpec(name, None)
        self.__version__ = "0"
        self.atb, self.npu = (_Part(f"{name}.{part}") for part in ("atb", "npu"))
        vars(self.npu).update(is_available=lambda: False, device_count=lambda: 0)

    def fill(self) -> None:
        """Set an attribute for each operator of the namespaces of torch_npu, by the name that Python has for it."""
        for operator in OPERATORS.values():
            if operator.namespace not in VENDOR.namespaces:
                continue
            name = operator.short.partition(".")[0]
            packet = getattr(getattr(torch.ops, operator.namespace), name)
            setattr(self if operator.namespace == "npu" or name.startswith("_") else self.atb, name, packet)

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError with the nearest operators: only missing attributes come here."""
        raise _missing(f"{self.__name__}.{name}", self.__dict__)


class _Part(ModuleType):
    """Submodule of the stand-in for torch_npu, with nothing but what is set."""

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError with the nearest names: only missing attributes come here."""
        raise _missing(f"{self.__name__}.{name}", self.__dict__)


def _missing(name: str, known: dict[str, Any]) -> AttributeError:
    public = [each for each in known if not each.startswith("__")]
    near = difflib.get_close_matches(name.rpartition(".")[2], public, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return AttributeError(f"reading {name}: torch_npu does not import here, and its stand-in lacks it; {hint}{_WHERE}")
