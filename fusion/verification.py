"""Verification of numbers: the first call of a fused graph is compared with the original graph on the same inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from fusion._torch.tracing import Boxed, boxed
from fusion.errors import VerificationError

# Relative rms error that rounding explains, per dtype: a rewrite moves the points where values are rounded.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}


def verified(original: fx.GraphModule, run: Boxed) -> Boxed:
    """`run`, with its first call compared with `original`: results, and every input that is written to.

    Raises (when called):
        VerificationError: they differ by more than rounding explains; names the result or input that differs most.
    """
    done: list[bool] = []

    def call(*inputs: Any) -> Any:
        if done:
            return run(list(inputs))
        done.append(True)
        copies = [each.clone() if isinstance(each, torch.Tensor) else each for each in inputs]
        expected = original(*copies)
        results = run(list(inputs))
        _compare([("result", expected, results), ("input", copies, list(inputs))])
        return results

    return boxed(call)


def _compare(pairs: Sequence[tuple[str, Sequence[Any], Sequence[Any]]]) -> None:
    worst, where = 0.0, ""
    for what, expected, real in pairs:
        for number, (want, have) in enumerate(zip(expected, real, strict=True)):
            if not isinstance(want, torch.Tensor) or not want.is_floating_point() or not want.numel():
                continue
            excess = relative_error(have, want) / TOLERANCE.get(want.dtype, 8e-2)
            if excess > worst or excess != excess:
                worst, where = excess, f"{what} {number} ({want.dtype}, {list(want.shape)})"
    if worst > 1 or worst != worst:
        raise VerificationError(
            f"verifying a fused graph on its first call: {where} is off by {worst:.3g} times its tolerance; run with "
            "options={'fuel': n} for growing n to find the first guilty rewrite, and report it"
        )


def relative_error(have: torch.Tensor, want: torch.Tensor) -> float:
    """Root mean square of the difference over that of `want`; infinities and NaNs must agree."""
    have, want = have.double(), want.double()
    same = (have == want) | (have.isnan() & want.isnan())
    difference = torch.where(same, 0.0, have - want)
    scale = want[want.isfinite()].norm() if want.isfinite().any() else torch.tensor(0.0)
    return float(difference.norm() / scale.clamp_min(1e-30)) if bool((~same).any()) else 0.0
