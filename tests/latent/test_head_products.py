"""Which products read as those of each head with a matrix of its own, and why others do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from tests.latent.test_int8_readings import understood

B, N, S, K, M = 2, 4, 3, 8, 6


class Heads(nn.Module):
    """A product with a Parameter, of which something is made."""

    def __init__(self, form: Callable[..., Tensor], *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape), requires_grad=False)
        self.form = form

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        return self.form(x, self.weight, *more)


def turned(x: Tensor, weight: Tensor) -> Tensor:
    """Heads stand behind tokens before the product, and behind it."""
    return (x.transpose(1, 2) @ weight).transpose(1, 2)


def summed(x: Tensor, weight: Tensor) -> Tensor:
    """The same in one step."""
    return torch.einsum("bsnk,nkm->bsnm", x, weight)


def told(form: Callable[..., Tensor], given: Sequence[int], *shape: int, dynamic: bool = False) -> tuple[int, set[str]]:
    """How many products are read, and the reasons why others are none."""
    found = understood(Heads(form, *shape), (torch.randn(*given),), dynamic)[0].readings
    return len(found.all("head_product")), {each.reason for _, each in found.missed("head_product")}


@pytest.mark.parametrize("form", [turned, summed])
def test_a_matrix_of_each_head_is_one(form: Callable[..., Tensor]):
    assert told(form, (B, S, N, K), N, K, M) == (1, set())


OTHERS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "one head": (turned, (B, S, 1, K), (1, K, M)),
    "one matrix for all heads": (turned, (B, S, N, K), (1, K, M)),
    "rows without heads": (lambda x, w: (x @ w).transpose(0, 1), (S, K), (N, K, M)),
    "groups of heads": (lambda x, w: (x.mT @ w).transpose(1, 2), (B, 2, N, K, S), (N, K, M)),
}


@pytest.mark.parametrize("case", OTHERS.values(), ids=OTHERS)
def test_other_products_are_none(case: tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...]]):
    form, given, weight = case
    assert told(form, given, *weight) == (0, set())


def test_a_matrix_for_each_sequence_is_told_of_parameters_alone():
    count, (reason,) = told(turned, (B, S, N, K), B, N, K, M)
    assert count == 0
    assert "each sequence has matrices of its own" in reason
    found = understood(turned, (torch.randn(B, S, N, K), torch.randn(B, N, K, M)))[0].readings
    assert not found.missed("head_product")


def test_a_result_of_another_dtype_is_cast_behind_it():
    graph, _ = understood(Heads(lambda x, w: summed(x, w).bfloat16(), N, K, M), (torch.randn(B, S, N, K),))
    assert [value.dtype for value, _ in graph.readings.all("head_product")] == [torch.float32]


def test_a_result_of_several_symbolic_sizes_is_not_arranged():
    def form(x: Tensor, weight: Tensor) -> Tensor:
        return summed(x, weight).reshape(x.shape[0] * 2, N // 4, x.shape[1] * 2, M)

    assert "several symbolic sizes" in str(told(form, (B, S, N, K), N, K, M, dynamic=True)[1])
