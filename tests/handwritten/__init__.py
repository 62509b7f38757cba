"""Code as it is written for an NPU, run on the CPU by fallbacks: `torch_npu` here is what its authors import."""

from __future__ import annotations

import sys

from fusion import fallbacks

ORIGIN = fallbacks.install()
import torch_npu  # noqa: E402  # pyright: ignore[reportMissingImports]

__all__ = ["ORIGIN", "torch_npu"]

if ORIGIN.source == "own":  # other tests of this process must not meet the stand-in
    del sys.modules["torch_npu"]
