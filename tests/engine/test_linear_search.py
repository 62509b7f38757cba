"""Stacks of layers of several kinds: as much is searched of long ones as of short ones, and the same comes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from fusion import pipeline
from fusion.planning.fake_execution import Fakes
from fusion.stages import match as matching
from fusion.stages import select as selecting
from fusion.testing import Captured, capture

from .folding import CHIP, check_as_searched_in_full, fused
from .graphs import norm, rotate

B, S, N, D, WIDTH = 2, 4, 2, 64, 128
TARGETS = {"host": replace(CHIP, target="host", plan_cache="off"), "a3": replace(CHIP, plan_cache="off")}


class Layer(nn.Module):
    """One layer of one kind.

    Attributes:
        kind: D is dense with full attention, L dense with a window, R recurrent, E with experts in a loop, C with
            attention to what an encoder gave, Q with normalised queries and keys.
    """

    def __init__(self, kind: str, width: int = WIDTH, scale: float = D**-0.5) -> None:
        super().__init__()
        self.kind, self.scale = kind, scale
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        experts = 3 if kind == "E" else 1
        self.gates, self.ups = (
            nn.ModuleList(nn.Linear(width, 96, bias=False) for _ in range(experts)) for _ in range(2)
        )
        self.downs = nn.ModuleList(nn.Linear(96, width, bias=False) for _ in range(experts))
        self.router = nn.Linear(width, experts, bias=False)
        self.before, self.after = (nn.Parameter(torch.rand(width)) for _ in range(2))
        self.query, self.key = (nn.Parameter(torch.rand(D)) for _ in range(2))

    def mixed(self, h: Tensor, given: dict[str, Tensor]) -> Tensor:
        """Return what `h` [B, S, width] takes from other tokens."""
        if self.kind == "R":
            return torch.cumsum(self.k(h) * torch.sigmoid(self.v(h)), 1)
        memory = given["memory"] if self.kind == "C" else h
        q, k, v = (
            of(x).unflatten(-1, (-1, D)).transpose(1, 2) for of, x in ((self.q, h), (self.k, memory), (self.v, memory))
        )
        if self.kind == "Q":
            q, k = norm(q, self.query), norm(k, self.key)
        if self.kind != "C":
            q, k = (rotate(each, given["cos"], given["sin"]) for each in (q, k))
        mask = {"C": None, "L": given["window"]}.get(self.kind, given["mask"])
        y = scaled_dot_product_attention(q, k, v, mask, scale=self.scale)
        return y.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, given: dict[str, Tensor]) -> Tensor:
        x = x + self.o(self.mixed(norm(x, self.before), given))
        h = norm(x, self.after)
        experts = [down(silu(gate(h)) * up(h)) for gate, up, down in zip(self.gates, self.ups, self.downs, strict=True)]
        if self.kind != "E":
            return x + experts[0]
        weights = torch.softmax(self.router(h), -1)
        for number, each in enumerate(experts):
            x = x + weights[..., number, None] * each
        return x


class Stack(nn.Module):
    """Layers one behind the other, with a projection where the next one is of another width."""

    def __init__(self, layers: Sequence[Layer], encoder: Sequence[Layer] = ()) -> None:
        super().__init__()
        self.encoder, self.layers = nn.ModuleList(encoder), nn.ModuleList(layers)
        self.last = nn.Parameter(torch.rand(layers[-1].before.shape[0]))
        wider = [(one.before.shape[0], two.before.shape[0]) for one, two in pairwise(layers)]
        self.bridges = nn.ModuleDict(
            {str(number): nn.Linear(*each) for number, each in enumerate(wider, 1) if each[0] != each[1]}
        )

    def forward(self, x: Tensor, memory: Tensor, positions: Tensor) -> Tensor:
        angles = positions[:, None] * torch.exp(-torch.arange(D // 2) / 8.0)
        table = torch.cat((angles, angles), -1)[None, None].to(x.dtype)
        apart = positions[:, None] - positions[None]
        given = {"cos": table.cos(), "sin": table.sin(), "mask": apart >= 0, "window": (apart >= 0) & (apart < 2)}
        for layer in self.encoder:
            memory = layer(memory, given)
        given["memory"] = memory
        for number, layer in enumerate(self.layers):
            x = self.bridges[str(number)](x) if str(number) in self.bridges else x
            x = layer(x, given)
        return norm(x, self.last)


def kinds(text: str) -> list[Layer]:
    return [Layer(kind) for kind in text]


def _shared_by_pairs(count: int) -> Stack:
    layers = kinds("D" * count)
    for one, two in zip(layers[::2], layers[1::2], strict=False):
        two.q, two.k = one.q, one.k
    return Stack(layers)


def _others_at_the_ends(count: int) -> Stack:
    return Stack([Layer("D", scale=0.25), *kinds("D" * count), Layer("R")])


def _one_of_another_scale(count: int) -> Stack:
    return Stack([*kinds("DDDDD"), Layer("D", scale=0.25), *kinds("D" * count)])


STACKS: dict[str, tuple[Callable[[int], Stack], tuple[int, ...]]] = {
    "dense": (lambda count: Stack(kinds("D" * count)), (8, 24)),
    "normalised": (lambda count: Stack(kinds("Q" * count)), (8, 24)),
    "dense first, then experts": (lambda count: Stack(kinds("DDD" + "E" * count)), (12, 24)),
    "local and global 5:1": (lambda count: Stack(kinds("LLLLLD" * count)), (4, 6)),
    "local and global alternating": (lambda count: Stack(kinds("LD" * count)), (6, 12)),
    "recurrent 3:1": (lambda count: Stack(kinds("RRRD" * count)), (4, 8)),
    "attention to an encoder": (lambda count: Stack(kinds("DDC" * count)), (5, 10)),
    "encoder and decoder": (lambda count: Stack(kinds("DC" * count), kinds("D" * count)), (8, 16)),
    "towers": (lambda count: Stack([Layer("D", width) for width in (64, 128) for _ in range(count)]), (8, 16)),
    "weights of all": (lambda count: Stack([Layer("D")] * count), (8, 24)),
    "weights of pairs": (_shared_by_pairs, (12, 24)),
    "others at the ends": (_others_at_the_ends, (8, 24)),
    "one of another scale": (_one_of_another_scale, (8, 24)),
}
BY_DAY = ("local and global alternating",)
GRID = [
    pytest.param(name, target, marks=() if name in BY_DAY else pytest.mark.rotates)
    for name in STACKS
    for target in TARGETS
]


def captured(stack: Stack) -> Captured:
    torch.manual_seed(0)
    width = stack.layers[0].before.shape[0]  # type: ignore[index]
    memory = torch.randn(B, S, WIDTH)
    return capture(
        stack.requires_grad_(False).bfloat16(),
        (torch.randn(B, S, width).bfloat16(), memory.bfloat16(), torch.arange(S)),
    )


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count what a search does: nodes read, values tried, plans recorded, covers set up."""
    found = Counter[str]()

    def counting(owner: Any, name: str, count: Callable[..., int] = lambda *_: 1) -> None:
        does = getattr(owner, name)

        def counted(*given: Any) -> Any:
            found[name] += count(*given)
            return does(*given)

        monkeypatch.setattr(owner, name, counted)

    counting(pipeline, "canonicalise", lambda source, _: len(source.nodes))
    counting(matching.Search, "_try")
    counting(matching.Search, "_join")
    counting(Fakes, "record")
    counting(selecting, "_Way")
    return found


@pytest.mark.rotates(11)
@pytest.mark.parametrize(("name", "target"), GRID)
def test_of_long_stacks_as_much_is_searched_as_of_short_ones(
    name: str, target: str, work: Counter[str], monkeypatch: pytest.MonkeyPatch
):
    make, counts = STACKS[name]
    found: list[dict[str, int]] = []
    for count in counts:
        of = captured(make(count))
        work.clear()
        _, outcome = fused(of, False, monkeypatch, TARGETS[target])
        assert outcome.chosen
        found.append(dict(work))
    assert found[1] == found[0]


@pytest.mark.rotates(7)
@pytest.mark.parametrize(("name", "target"), GRID)
def test_stacks_become_what_each_layer_would(name: str, target: str, monkeypatch: pytest.MonkeyPatch):
    make, (count, _) = STACKS[name]
    check_as_searched_in_full(captured(make(count)), monkeypatch, options=TARGETS[target])
