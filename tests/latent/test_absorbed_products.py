"""Latents are absorbed whatever stands between the products of attention; expanded where that costs less."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import fx

from fusion import FusionPass, explain, testing
from fusion.library import installed
from fusion.options import Options
from fusion.pipeline import fuse_graph
from fusion.testing import LEVELS, Trial, capture

from . import absorbed_products as corpus

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HOST = Options(target="host", lower="eager")


def tried(form: Callable[..., Any], of: corpus.Setting, options: Options = HOST, biased: bool = False) -> Trial:
    module = corpus.Attention(form, of.dtype, biased)
    captured = capture(module, corpus.inputs(of.dtype, of.of), of.level)
    graph = fx.GraphModule(captured.graph, copy.deepcopy(captured.graph.graph))
    outcome = fuse_graph(graph.graph, installed(), options, captured.facts)
    graph.recompile()
    return Trial(installed(), captured, graph, outcome)


def applied(t: Trial) -> set[str]:
    return {each.match.rule.name for each in t.outcome.chosen}


def settings(forms: tuple[Callable[..., Any], ...]) -> Iterator[Any]:
    """Every way in one setting; in all of them every night."""
    cells = list(product(corpus.SIZES, DTYPES, LEVELS))
    for number, form in enumerate(forms):
        for place, (sizes, dtype, level) in enumerate(cells):
            marks = [] if place == (number * 7) % len(cells) else [pytest.mark.nightly]
            setting = corpus.Setting(corpus.SIZES[sizes], dtype, level)
            name = f"{form.__name__}-{sizes}-{str(dtype).removeprefix('torch.')}-{level}"
            yield pytest.param(form, setting, id=name, marks=marks)


@pytest.mark.parametrize(("form", "of"), settings(corpus.UNROTATED + corpus.PLAIN))
def test_neither_keys_nor_values_are_computed(form: Callable[..., Any], of: corpus.Setting):
    t = tried(form, of)
    assert applied(t) & {"absorbed_products", "latent_attention"}, "\n".join(map(str, t.outcome.refusals))
    testing.means_what_it_says(t)
    testing.emits_valid_calls(t)


@pytest.mark.parametrize(("form", "of"), settings(corpus.LOOKALIKES))
def test_look_alike_is_left_alone(form: Callable[..., Any], of: corpus.Setting):
    t = tried(form, of, biased=form is corpus.biased_layer)
    assert "absorbed_products" not in applied(t)
    testing.means_what_it_says(t)
