"""Dense attention over a latent is fused in every ordinary spelling, also in the style of published inference code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch

from fusion import testing
from fusion.frontend.library import installed
from fusion.options import Options
from fusion.stages.canonicalise import canonicalise
from fusion.stages.read import read
from fusion.testing import LEVELS, Trial, capture

from . import latent_attention as corpus

HOST = Options(target="host", lower="eager")
LATENT = {"latent_attention"}


def tried(form: Any, args: tuple[Any, ...], level: testing.Level) -> Trial:
    return testing.trial_of(capture(form, args, level), HOST)


def applied(t: Trial) -> list[str]:
    return [each.match.rule.name for each in t.outcome.chosen]


def reads_a_latent(t: Trial) -> bool:
    """Whether keys are read as projected from a latent, though it costs less here to leave them so."""
    graph, _ = read(canonicalise(t.captured.graph.graph, t.captured.facts), installed().readers)
    return bool(graph.readings.all("latent_keys"))


def settings() -> Iterator[Any]:
    """Yield every spelling in every mode at every level."""
    for form, mode, level in product(corpus.SPELLINGS, corpus.MODES, LEVELS):
        yield pytest.param(form, mode, level, id=f"{form.__name__}-{mode}-{level}")


@pytest.mark.rotates(12)
@pytest.mark.parametrize(("form", "mode", "level"), settings())
def test_spelling_attends_to_the_latent(form: Callable[..., Any], mode: str, level: testing.Level):
    of = corpus.MODES[mode]
    t = tried(of.run(form), of.inputs(torch.bfloat16), level)
    assert "latent_attention" in applied(t) or reads_a_latent(t), "\n".join(map(str, t.outcome.refusals))
    testing.means_what_it_says(t)
    testing.emits_valid_calls(t)


@pytest.mark.rotates(12)
@pytest.mark.parametrize(("form", "reason"), corpus.LOOKALIKES, ids=lambda each: getattr(each, "__name__", ""))
def test_look_alike_is_no_latent_attention(form: Callable[..., Any], reason: str):
    of = corpus.MODES["speculative"]
    t = tried(of.run(form), of.inputs(torch.bfloat16), "composite")
    assert not LATENT & set(applied(t))
    reasons = [each.reason for each in t.outcome.refusals]
    assert not reason or any(reason in each for each in reasons), reasons
    testing.means_what_it_says(t)


@pytest.mark.rotates(12)
@pytest.mark.parametrize(("absorbs", "lora", "mode"), list(product((True, False), (True, False), ("prompt", "step"))))
def test_published_style_keeps_its_order(absorbs: bool, lora: bool, mode: str):
    """Rotated neighbours stay neighbours in the cache; without gains of norms, a rotation and a write, no prolog."""
    tokens, start = (6, 0) if mode == "prompt" else (1, 9)
    block = corpus.Block(absorbs, torch.bfloat16, lora)
    x = corpus.activations(30, corpus.B, tokens, corpus.HIDDEN).to(torch.bfloat16)
    t = tried(block, (x, start, corpus.freqs(start, tokens)), "composite")
    names = applied(t)
    assert not any("prolog" in each for each in names)
    testing.means_what_it_says(t)
    fitting = {"latent_attention", "attention"} if absorbs else {"attention"}  # of small sizes either is as good
    assert fitting.intersection(names), "\n".join(map(str, t.outcome.refusals))
    assert names.count("rope") == 2


def test_queries_that_come_absorbed_attend_to_the_latent():
    def form(q, latent, rope, up):
        keys = torch.cat((latent, rope), -1)[:, None]
        return (q @ keys.mT * 0.1).softmax(-1) @ torch.einsum("btc,nce->bnte", latent, up)

    sizes = (2, 4, 3, 96), (2, 32, 64), (2, 32, 32), (4, 64, 16)
    given = (corpus.activations(seed, *size).to(torch.bfloat16) for seed, size in enumerate(sizes))
    t = tried(form, tuple(given), "composite")
    assert applied(t) == ["latent_attention"]
    testing.means_what_it_says(t)
