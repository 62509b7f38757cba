"""Every entry of the corpus and every example gives as a guest of Inductor what it gives in eager, by day a share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from fusion.frontend.library import installed
from fusion.operators import PACKAGES
from fusion.routes import cpu_gpu
from fusion.testing import DTYPES, Captured, capture, captured
from tests.corpus.entries import LOOKALIKES, SPELLINGS
from tests.corpus.test_corpus import SHAPES
from tests.lowering.guests import HOOKS, check
from tests.support.tried import cases

pytestmark = pytest.mark.rotates(48)

TARGETS = ("host", "ascend910_93")
ENTRIES = (*SPELLINGS, *LOOKALIKES)
REFUSED_BY_TORCH = {"weight_only_linear/not/scale_of_tokens", "weight_only_linear/not/gated"}
"""A plain compile raises: Inductor takes a factor of each token for a scale of each channel."""


def of_corpus(entry: Any, dtype: torch.dtype, shape: tuple[int, int]) -> Captured:
    form, args = entry.make(dtype, *shape)
    return capture(form, args)


def settings() -> Iterator[Any]:
    """One setting of each entry and example; dtypes, shapes, hooks and targets change from one to the next."""
    every: list[Any] = [
        (entry.name, partial(of_corpus, entry, shape=SHAPES[number % 4]), {}) for number, entry in enumerate(ENTRIES)
    ]
    for rule, each in cases(installed().rules):
        options = {"packages": set(PACKAGES), "opt_in": {rule.name} if rule.opt_in else set()}
        every.append((f"{rule.name}-{each.name}", partial(captured, each), options))
    for number, (name, make, options) in enumerate(every):
        dtype, hook = DTYPES[number % len(DTYPES)], HOOKS[number % len(HOOKS)]
        target = TARGETS[number // 2 % len(TARGETS)]
        if name not in REFUSED_BY_TORCH:
            label = f"{name}-{str(dtype).removeprefix('torch.')}-{hook.replace('_custom', '')}-{target}"
            yield pytest.param(partial(make, dtype=dtype), hook, target, options, id=label)


@pytest.mark.parametrize(("make", "hook", "target", "options"), settings())
def test_guest_computes_what_eager_does(make: Callable[[], Captured], hook: str, target: str, options: dict[str, Any]):
    check(make(), hook, target, **options)


@pytest.mark.rotates
@pytest.mark.skipif(not cpu_gpu.has_compiler("cpu"), reason="needs a C++ compiler and Python.h")
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("name", ["rms_norm/hf_llama", "rope_half/hf_llama", "cache_write/scatter"])
def test_guest_with_kernels_of_inductor(name: str, hook: str):
    (entry,) = (each for each in SPELLINGS if each.name == name)
    assert check(of_corpus(entry, torch.bfloat16, (2, 3)), hook, "host", kernels=True)
