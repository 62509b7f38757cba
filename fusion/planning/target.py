"""Targets: kinds of machines, whose chip decides which calls are legal and whose figures decide which pay."""

from __future__ import annotations

import difflib
import importlib.util
import sys
from dataclasses import dataclass

from fusion.errors import OptionError


@dataclass(frozen=True)
class Target:
    """One kind of machine.

    Attributes:
        name: "ascend910b", "ascend910_93", "ascend950" or "host".
        launch: fixed microseconds of one kernel launch.
        bandwidth: bytes per microsecond that a memory-bound kernel moves.
        compute: multiplications and additions per microsecond of a compute-bound product.
        sources: sources of the figures.
    """

    name: str
    launch: float
    bandwidth: float
    compute: float
    sources: str

    @property
    def is_npu(self) -> bool:
        """True for an Ascend chip, with limits of size and dtype."""
        return self.name != "host"

    @staticmethod
    def named(name: str) -> Target:
        """Return the target called `name`.

        Raises:
            OptionError: there is no such target; the message names the nearest.
        """
        if name in TARGETS:
            return TARGETS[name]
        near = difflib.get_close_matches(name, TARGETS, n=1, cutoff=0.3)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise OptionError(f"choosing a target: {name!r} is not known{hint} (targets: auto, {', '.join(TARGETS)})")

    @staticmethod
    def detect() -> Target:
        """Return the target of this machine: its NPU's chip where torch_npu reports one, else the host."""
        soc = _soc_name()
        return next((each for each in TARGETS.values() if soc.lower().startswith(each.name)), TARGETS["host"])

    @staticmethod
    def resolve(name: str) -> Target:
        """Return the target called `name`, that of this machine for "auto"."""
        return Target.detect() if name == "auto" else Target.named(name)


_FIT = "t = 4.4 us + bytes / 1.17 TB/s fits published decode GEMM timings on one A3 die within 3 %"
_CUBE = "70 % of 353.9 T in bfloat16 per die"
TARGETS = {
    "ascend910b": Target("ascend910b", 4.4, 1.0e6, 2.5e8, f"A2, HBM 1.2-1.6 TB/s per die; launch as A3; {_CUBE}"),
    "ascend910_93": Target("ascend910_93", 4.4, 1.17e6, 2.5e8, f"{_FIT}; {_CUBE}"),
    "ascend950": Target("ascend950", 4.4, 1.4e6, 2.5e8, "no published fit; its HBM's bandwidth class, else as A3"),
    "host": Target("host", 5.0, 2.0e4, 6.0e4, "one core of a server: 20 GB/s, 60 GFLOP/s, 5 us for a call"),
}


def _soc_name() -> str:
    """Return the name of the NPU's chip, "" without an NPU."""
    if "torch_npu" not in sys.modules and importlib.util.find_spec("torch_npu") is None:
        return ""
    try:
        import torch_npu  # pyright: ignore[reportMissingImports, reportUnknownVariableType]

        if not torch_npu.npu.is_available():  # pyright: ignore[reportUnknownMemberType]
            return ""
        return str(torch_npu.npu.get_device_name(0))  # pyright: ignore[reportUnknownMemberType]
    except (ImportError, OSError, RuntimeError):
        return ""
