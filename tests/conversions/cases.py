"""Graphs that are converted: every example that fuses, and a prefill and a decode step of every model family."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from tests.goldens.cases import Case, every

COMPILERS = ("torchair", "npugraph_ex")
_STEPS = ("prefill sdpa", "decode_static sdpa")


@cache
def numbered() -> tuple[Case, ...]:
    """Return all cases, in the order of their numbers: models, whose texts are kept, before examples."""
    return (*_models(), *(each for each in every() if _is_fused_example(each)))


def is_kept(case: Case) -> bool:
    """Return True if the text of `case` is kept as a golden."""
    return case.file.startswith("model_")


def _models() -> Iterator[Case]:
    for case in every():
        only_step = case.name.startswith("prefill ") and case.file in _FAMILIES_OF_ONE_STEP
        if is_kept(case) and (case.name in _STEPS or only_step):
            yield case


_FAMILIES_OF_ONE_STEP = ("model_DeepseekV4", "model_Doge", "model_MiniMaxM3VL")


def _is_fused_example(case: Case) -> bool:
    return case.file.startswith("example_") and not case.name.endswith("(to be refused)")
