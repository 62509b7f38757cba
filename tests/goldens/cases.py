"""What is recorded: the corpus, pieces in the manner of repositories, every example of a rule, every model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from typing import Any

import torch

from fusion.frontend.library import installed
from fusion.testing import Captured, capture, captured
from tests.attention import attention, attention_heads, attention_masks, lookalikes_attention
from tests.corpus.entries import LOOKALIKES, SPELLINGS
from tests.latent import latent_attention
from tests.models import indexers
from tests.models.families import CONFIGS, MODES, OTHER_SELECTIONS, build
from tests.repositories.pieces import PIECES
from tests.sparse.test_sparse_attention import LOOKALIKES as LISTED_LOOKALIKES
from tests.sparse.test_sparse_attention import SPELLINGS as LISTED
from tests.support.tried import cases

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """One graph.

    Attributes:
        file: the file of its text.
        name: its name there.
        captured: traces it.
        opt_in: the rules that are switched on for it.
    """

    file: str
    name: str
    captured: Callable[[], Captured]
    opt_in: frozenset[str] = frozenset()


def every() -> Iterator[Case]:
    """All cases, those of one file together."""
    yield from _entries()
    yield from _attention()
    yield from _latent_attention()
    yield from _sparse_attention()
    yield from _repositories()
    yield from _examples()
    yield from _models()


def _traced(function: Callable[..., Any], inputs: Callable[[], tuple[Any, ...]]) -> Captured:
    return capture(function, inputs())


def _made(make: Callable[..., Any]) -> Captured:
    return capture(*make(DTYPE, 2, 3))


def _entries() -> Iterator[Case]:
    for entry in (*SPELLINGS, *LOOKALIKES):
        yield Case(f"corpus_{entry.family}", entry.name.partition("/")[2], partial(_made, entry.make))


def _attention() -> Iterator[Case]:
    kept = (attention.SPELLINGS, attention_masks.SPELLINGS, lookalikes_attention.LOOKALIKES)
    for entry in (*chain(*kept), *attention_heads.SPELLINGS, *attention_heads.LOOKALIKES):
        yield Case("corpus_attention", entry.name, partial(_traced, entry.form, partial(entry.inputs, DTYPE)))


def _latent_attention() -> Iterator[Case]:
    forms = (*latent_attention.SPELLINGS, *(form for form, _ in latent_attention.LOOKALIKES))
    for form, (name, mode) in product(forms, latent_attention.MODES.items()):
        traced = partial(_traced, mode.run(form), partial(mode.inputs, DTYPE))
        yield Case("corpus_latent_attention", f"{form.__name__} {name}", traced)


def _sparse_attention() -> Iterator[Case]:
    for before, entries in (("", LISTED), ("not/", LISTED_LOOKALIKES)):
        for each in entries:
            for mode in each.modes:
                yield Case("corpus_sparse_attention", f"{before}{each.name} {mode}", partial(_block, each, mode))


def _block(entry: Any, mode: str) -> Captured:
    return capture(entry.make(mode, DTYPE), entry.inputs(mode, DTYPE))


def _repositories() -> Iterator[Case]:
    for piece in PIECES:
        yield Case(piece.file, piece.name, partial(piece.captured, DTYPE))


def _examples() -> Iterator[Case]:
    for rule, example in cases(installed().rules):
        name = f"{example.name}{' (to be refused)' if example.refusal else ''}"
        switched = frozenset({rule.name} if rule.opt_in else ())
        yield Case(f"example_{rule.name}", name, partial(captured, example, DTYPE), switched)


def _models() -> Iterator[Case]:
    for family, mode, code in product(CONFIGS, MODES, ("sdpa", "eager")):
        yield Case(f"model_{family}", f"{mode} {code}", partial(_step, family, mode, code))

    for (name, of), mode in product(indexers.INDEXED.items(), indexers.MODES):
        yield Case(indexers.FILE, f"{name} {mode}", partial(of.captured, mode, DTYPE))

    for family in ("DeepseekV4", "Doge", "MiniMaxM3VL"):  # the others are several graphs
        code, _ = OTHER_SELECTIONS[family]
        yield Case(f"model_{family}", f"prefill {code}", partial(_step, family, "prefill", code, 64))


def _step(family: str, mode: str, code: str, tokens: int = 12) -> Captured:
    built = build(family, DTYPE, code)
    return capture(built.model, (), dynamic=None, **built.step(mode, tokens=tokens))
