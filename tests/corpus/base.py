"""What a corpus entry is, and the inputs that all of them share.

Inputs are small multiples of a power of two, so bfloat16, float16, float32 and float64 hold the very same numbers and
one float64 reference serves every dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Form = Callable[..., Any]
Make = Callable[[torch.dtype, int, int], tuple[Form, tuple[Tensor, ...]]]
Reference = Callable[[torch.dtype, int, int], tuple[Tensor, ...]]

RMS_NORM = "npu::npu_rms_norm"
GEMMA_RMS_NORM = "npu::npu_gemma_rms_norm"
ADD_RMS_NORM = "npu::npu_add_rms_norm"
LAYER_NORM = "aten::native_layer_norm"
ADD_LAYER_NORM = "npu::npu_add_layer_norm"
ROTARY_MUL = "npu::npu_rotary_mul"
APPLY_ROTARY = "npu::npu_apply_rotary_pos_emb"
INTERLEAVE_ROPE = "npu::npu_interleave_rope"
SWIGLU = "npu::npu_swiglu"
DYNAMIC_QUANT = "npu::npu_dynamic_quant"
QUANT_MATMUL = "npu::npu_quant_matmul"
ADD_RMS_NORM_QUANT = "npu::npu_add_rms_norm_quant"
RMS_NORM_QUANT = "npu::npu_rms_norm_quant"
WEIGHT_QUANT = "npu::npu_weight_quant_batchmatmul"
SCATTER_RUN = "npu::scatter_update_"
SCATTER_ND = "npu::npu_scatter_nd_update_"
PAGED_WRITE = "atb::_npu_reshape_and_cache"


@dataclass(frozen=True)
class Spelling:
    """One ordinary way to write a family's formula.

    `make(dtype, B, S)` gives the code and its arguments, the same at every call. `expect` counts the operators that a
    rewrite for target "host" emits, `expect_narrow` for 16-bit dtypes where that differs, `as_good`
    another outcome where sizes alone decide; `writes` says that the code changes its arguments.
    `reference(dtype, B, S)` is what `make` must return, computed in float64 by independent code; dtype only matters
    where a default epsilon follows it.
    """

    name: str
    family: str
    make: Make
    expect: Mapping[str, int]
    reference: Reference
    note: str = ""
    expect_narrow: Mapping[str, int] | None = None

    as_good: Mapping[str, int] | None = None
    writes: bool = False

    def expected(self, dtype: torch.dtype) -> list[Mapping[str, int]]:
        """What may be emitted for inputs of `dtype`."""
        first = self.expect if self.expect_narrow is None or dtype.itemsize > 2 else self.expect_narrow
        return [first] if self.as_good is None else [first, self.as_good]


@dataclass(frozen=True)
class LookAlike:
    """Code that resembles a family and must be refused.

    `reason` is a regular expression that the refusal text contains, in any case; "" where nothing has to be refused,
    because another fusion of it is right. `reference` is what the fused
    operator would return: it differs from the code, or is None where the values may agree and the proof is
    what is missing.
    """

    name: str
    family: str
    make: Make
    reason: str
    forbid: tuple[str, ...]
    reference: Reference | None
    note: str = ""


def generator(seed: int) -> torch.Generator:
    """A generator of its own, so that no entry depends on another one or on the global seed."""
    return torch.Generator().manual_seed(seed)


def activations(seed: int, *shape: int) -> Tensor:
    """Float64 [*shape], about normal, multiples of 1/32 in [-4, 4]: exact in every dtype used here."""
    return (torch.randn(*shape, generator=generator(seed), dtype=torch.float64) * 32).round().clamp(-127, 127) / 32


def weights(seed: int, *shape: int, center: float = 1.0) -> Tensor:
    """Float64 [*shape], about center + 0.1 · normal, multiples of 1/64: exact in every dtype used here."""
    return center + (torch.randn(*shape, generator=generator(seed), dtype=torch.float64) * 6.4).round() / 64


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of code that always computes in float32; float64 stays, for the exact comparison."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def build(form: Form, args: tuple[Tensor, ...], parameters: tuple[Tensor, ...]) -> tuple[Form, tuple[Tensor, ...]]:
    """Give parameters to a module class through its constructor, and to a plain function as further arguments."""
    if not isinstance(form, type):
        return form, (*args, *parameters)
    module: nn.Module = form(*parameters)
    return module.eval().requires_grad_(False), args


def look_alike(
    family: str,
    form: Form,
    reason: str,
    forbid: tuple[str, ...],
    inputs: Callable[[int, int], tuple[Tensor, ...]],
    meaning: Callable[..., Tensor | tuple[Tensor, ...]] | None,
    note: str = "",
) -> LookAlike:
    """`form` takes the float64 `inputs` in the dtype; `meaning` is the fused operator on the same inputs."""

    def make(dtype: torch.dtype, B: int, S: int):
        return form, tuple(t.to(dtype) if t.is_floating_point() else t for t in inputs(B, S))

    def fused(dtype: torch.dtype, B: int, S: int) -> tuple[Tensor, ...]:
        assert meaning is not None
        outputs = meaning(*inputs(B, S))
        return outputs if isinstance(outputs, tuple) else (outputs,)

    reference = fused if meaning else None
    return LookAlike(f"{family}/not/{form.__name__}", family, make, reason, forbid, reference, note)
