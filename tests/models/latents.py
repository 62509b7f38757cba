"""Models with latent attention, one step at a time: over caches that are there before, and in float64."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from fusion.runtime.verification import relative_error
from fusion.testing import Trial, widen

from .families import Built

PROMPT, STEPS, ROOM = 40, 4, 96


def call(of: Built, mode: str, tokens: int = PROMPT, room: int = ROOM) -> dict[str, Any]:
    """One step over a cache that is there before the graph is captured, filled where the step decodes."""
    ids = torch.randint(3, 90, (2, tokens + 1), generator=torch.Generator().manual_seed(7))
    if mode.endswith("dynamic"):
        cache: Any = transformers.DynamicCache(config=of.config)
    else:
        cache = transformers.StaticCache(config=of.config, max_cache_len=room)
        with torch.no_grad():
            of.model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
        cache.reset()
    if mode.startswith("decode"):
        with torch.no_grad():
            of.model(input_ids=ids[:, :tokens], past_key_values=cache, use_cache=True)
        return dict(input_ids=ids[:, tokens:], past_key_values=cache, use_cache=True)
    return dict(input_ids=ids[:, :tokens], past_key_values=cache, use_cache=True)


def steps(model: Any, run: Any, config: Any, count: int = STEPS) -> tuple[list[Tensor], Any]:
    """A prompt and some steps of given tokens; logits, and the cache."""
    ids = torch.randint(3, 90, (2, PROMPT + count), generator=torch.Generator().manual_seed(5))
    state = call(Built(model, config), "prefill_static")["past_key_values"]
    pieces = [ids[:, :PROMPT], *ids[:, PROMPT:].split(1, dim=1)]
    with torch.no_grad():
        logits = [run(input_ids=each.contiguous(), past_key_values=state, use_cache=True).logits for each in pieces]
    return logits, state


def padded(of: Built, cache: str, tokens: int, side: str, count: int = 5) -> dict[str, Any]:
    """A step of some tokens behind a prompt of which the first sequence is shorter, padded on one `side` if any.

    Without tokens it is the prompt itself, over a cache that is there before if it is static.
    """
    ids = torch.randint(3, 90, (2, PROMPT + tokens), generator=torch.Generator().manual_seed(7))
    mask = torch.ones_like(ids)
    if side:
        mask[0, slice(0, count) if side == "left" else slice(PROMPT - count, PROMPT)] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    kept: Any = transformers.DynamicCache(config=of.config)
    if cache == "static":
        kept = transformers.StaticCache(config=of.config, max_cache_len=ROOM)

    def of_tokens(begin: int, end: int) -> dict[str, Any]:
        given = dict(input_ids=ids[:, begin:end].contiguous(), past_key_values=kept, use_cache=True)
        shown = dict(attention_mask=mask[:, :end], position_ids=positions[:, begin:end].contiguous())
        return given | (shown if side else {})

    if tokens or cache == "static":
        with torch.no_grad():
            of.model(**of_tokens(0, PROMPT if tokens else 1))
    if not tokens:
        kept.reset()
    return of_tokens(PROMPT, PROMPT + tokens) if tokens else of_tokens(0, PROMPT)


def differences(trial: Trial) -> list[float]:
    """Relative errors of all results and inputs of a graph before and after the pass, both run in float64."""
    given = len(trial.captured.inputs)
    results = []
    for graph, inputs in (
        (trial.captured.graph, trial.inputs(wide=True)[:given]),
        (trial.fused, trial.inputs(wide=True)),
    ):
        outputs = widen(graph)(*inputs)
        kept = (*outputs, *inputs[:given])
        results.append([each for each in kept if isinstance(each, Tensor) and each.is_floating_point()])
    return [relative_error(have, want) for want, have in zip(*results, strict=True)]
