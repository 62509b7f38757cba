"""NaN and infinities are passed on: a model that diverges does not look healthy because it was fused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fusion.operators import OPERATORS
from fusion.operators.attention.softmax import Visible, fused_softmax, rounded_softmax, written_softmax
from fusion.routes.expand import attention
from tests.operators.agreement import new, widened
from tests.operators.cases import CASES, Case, flat
from tests.operators.references import REFERENCES
from tests.operators.undocumented import Undocumented

PLANTED = ((0.0, math.nan), (0.4, math.nan), (1.0, math.nan), (0.7, math.inf), (0.2, -math.inf))
"""Where in a tensor, and what."""
_OF_INT8 = (
    "dequant_scale_key", "dequant_offset_key", "key_antiquant_scale", "key_antiquant_offset", "antiquant_scale",
    "antiquant_offset",
)  # fmt: skip
KEYS = ("key", "key_rope", *_OF_INT8)
"""Infinite keys, or what makes them so: a kernel may find that a row whose seen scores are all -inf sees nothing."""


def floats(arguments: dict[str, Any]) -> Iterator[str]:
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            yield name


def planted(case: Case, name: str, share: float, what: float) -> dict[str, Any]:
    """The arguments of a case, `what` standing in the tensor `name`."""
    arguments = case.arguments(torch.float32)
    given = arguments[name]
    tensor = given if given.is_contiguous() else given.clone(memory_format=torch.preserve_format)
    place = torch.unravel_index(torch.tensor(round(share * (tensor.numel() - 1))), tensor.shape)
    tensor[place] = what
    return arguments | {name: tensor}


def expected(case: Case, arguments: dict[str, Any]) -> tuple[Tensor, ...] | None:
    """What plain code gives; None where that has no answer, as for the whole number that NaN rounds to."""
    try:
        return flat(REFERENCES[case.operator](**widened(arguments)))
    except (ValueError, OverflowError, AssertionError, Undocumented):
        return None


@pytest.mark.rotates(12)
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.rotates)], ids=["one", "all"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_not_finite_is_passed_on(case: Case, whole: bool):
    """In each tensor: one that is planted, and for the night all of them."""
    op = OPERATORS[case.name]
    for number, name in enumerate(floats(case.arguments(torch.float32)), start=len(str(case))):
        for share, what in PLANTED if whole else (PLANTED[number % len(PLANTED)],):
            plain = expected(case, planted(case, name, share, what))
            if plain is None or (name in KEYS and math.isinf(what)):
                continue
            arguments = planted(case, name, share, what)
            result = flat(op.fallback(**arguments))
            got = (*new(result, op, arguments), *(arguments[written] for written in op.written))
            for mine, theirs in zip(got, plain, strict=True):
                lost = mine.isfinite() & ~theirs.isfinite() if mine.is_floating_point() else torch.zeros(())
                assert not lost.any(), f"{what} in {name} is lost"


def parts() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(1, heads, 6, 16, generator=generator) for heads in (4, 2, 2))  # pyright: ignore


def plain(q: Tensor, k: Tensor, v: Tensor, shown: Tensor | None) -> Tensor:
    k, v = (each.repeat_interleave(2, 1) for each in (k, v))
    scores = q @ k.transpose(-2, -1) * 0.25
    return (scores if shown is None else scores.masked_fill(~shown, -math.inf)).softmax(-1) @ v


def forms(q: Tensor, k: Tensor, v: Tensor, visible: Visible) -> Iterator[Tensor]:
    """Every decomposition of attention."""
    yield fused_softmax(q, k, v, visible, 0.25)
    yield written_softmax([(q, k)], v, visible, 0.25)[0]
    yield rounded_softmax([(q, k)], v, visible, 0.25, q.dtype)[0]
    yield attention(q, k, v, visible.keys, is_causal=visible.causal, scale=0.25, enable_gqa=True)


CAUSAL = torch.ones(6, 6, dtype=torch.bool).tril()
every_view = pytest.mark.parametrize(
    ("visible", "shown"),
    [(Visible(), None), (Visible(causal=True), CAUSAL), (Visible(CAUSAL[None, None]), CAUSAL)],
    ids=["all", "causal", "mask"],
)


@every_view
@pytest.mark.parametrize("what", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("row", [0, 3, 5])
def test_a_query_that_is_not_finite_gives_nan(visible: Visible, shown: Tensor | None, what: float, row: int):
    q, k, v = parts()
    q[0, 1, row, 7] = what
    rows = plain(q, k, v, shown).isnan()
    assert rows.any(-1).sum() == 1
    for out in forms(q, k, v, visible):
        torch.testing.assert_close(out.isnan(), rows)


@every_view
@pytest.mark.parametrize("row", [0, 3])
def test_a_key_that_is_seen_and_is_not_a_number_gives_nan(visible: Visible, shown: Tensor | None, row: int):
    q, k, v = parts()
    k[0, 1, row, 7] = math.nan
    rows = plain(q, k, v, shown).isnan()
    for out in forms(q, k, v, visible):
        assert not (rows & ~out.isnan()).any()


@pytest.mark.parametrize("batch", ["decode", "every key"])
def test_keys_none_of_which_is_a_number(batch: str):
    q, k, v = parts()
    k = torch.full_like(k, math.nan)
    q, k, v = (q[:, :, :1], k[:, :, :1], v[:, :, :1]) if batch == "decode" else (q, k, v)
    for visible in (Visible(), Visible(torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool))):
        assert all(out.isnan().all() for out in forms(q, k, v, visible))


def test_only_the_mask_hides_a_row():
    """A row without keys is 0 whatever its query is; one whose seen scores are all -inf is NaN."""
    q, k, v = parts()
    q[0, :, 2] = math.nan
    mask = CAUSAL[None, None].clone()
    mask[..., 2, :] = False
    for out in forms(q, k, v, Visible(mask)):
        assert (out[0, :, 2] == 0).all()
        assert out.isfinite().all()
    q, k, _ = parts()
    q[0, :, 2], k[..., 0] = 0.0, 1.0
    q[0, :, 2, 0] = -math.inf
    for out in forms(q, k, v, Visible()):
        assert out[0, :, 2].isnan().all()


def test_a_hidden_first_key_leaves_rows_alone():
    """Rows that do not see it are numbers in code that skips hidden keys; a kernel may read them, but adds no NaN."""
    q, k, v = parts()
    k[..., 0, :] = math.nan
    mask = CAUSAL[None, None].clone()
    mask[..., 0] = False
    for out in (written_softmax([(q, k)], v, Visible(mask), 0.25)[0], attention(q, k, v, mask, enable_gqa=True)):
        assert out.isfinite().all()


def test_values_of_zero_are_no_sign_of_anything():
    q, k, v = parts()
    assert all((out == 0).all() for out in forms(q, k, torch.zeros_like(v), Visible(causal=True)))


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_a_model_that_diverges_shows_it(lower: str):
    """The decomposition of what `plain` is fused to, through the backend."""
    torch._dynamo.reset()
    q, k, v = parts()
    q[0, 1, 3, 7] = math.nan
    run = torch.compile(plain, backend="cann_fusion", options={"target": "host", "lower": lower})
    with torch.no_grad():
        torch.testing.assert_close(run(q, k, v, None).isnan(), plain(q, k, v, None).isnan())
