"""y = silu(x[.., 0::2]) · x[.., 1::2]: a gate whose lanes alternate with those that it gates."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from fusion import Example, Library, Rule, lowering, pattern, reader, tensor, word
from fusion.graph import Annotation, Graph, Miss, Reading

LANES = word("alternate_lanes", "every second lane of x", x="[*B, D]", start="0 or 1")


@reader(gives=(LANES,))
def alternate_lanes(graph: Graph) -> Iterator[Annotation]:
    """Every second lane of a tensor, from the first or from the second on."""
    for value in list(graph.places):
        if value.op != "slice" or value.attrs[0] != value.rank - 1 or value.attrs[3] != 2:
            continue
        start, width = value.attrs[1], value.arg.shape[-1]
        if start in (0, 1) and value.shape[-1] * 2 == width:
            yield value, Reading("alternate_lanes", {"x": value.arg, "start": start})
        else:
            yield value, Miss("interleaved_swiglu", f"lanes from {start} on are not every second one of {width}")


class InterleavedSwiglu(Rule):
    """The gated activation of a projection in which gate and up alternate."""

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """The meaning: x [*B, 2·H]."""
        return F.silu(x[..., 0::2]) * x[..., 1::2]

    @pattern
    def alternating(self, p, x=tensor("*B D")):
        """Gate first, up second."""
        gate, up = (p.maybe_cast(p.alternate_lanes(x=x, start=start), to=torch.float32) for start in (0, 1))
        return p.as_dtype(p.maybe_cast(p.silu(gate), to=x) * up, like=x)

    @lowering
    def npu(self, x):
        """One operator, behind one copy that sorts the lanes."""
        return torch.ops.npu.npu_swiglu(torch.cat((x[..., 0::2], x[..., 1::2]), -1), -1)


def library() -> Library:
    """For the entry point `fusion.patterns`."""
    return Library((InterleavedSwiglu(),), (alternate_lanes,))


def _rows(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return (torch.linspace(-3, 3, 2 * 3 * 64).reshape(2, 3, 64).to(dtype),)


def examples() -> dict[str, tuple[Example, ...]]:
    """For the entry point `fusion.examples`."""
    return {
        "interleaved_swiglu": (
            Example("gate first", lambda x: x[..., ::2] * x[..., ::2].sigmoid() * x[..., 1::2], _rows),
            Example("gate last", lambda x: x[..., 1::2] * (x[..., ::2].sigmoid() * x[..., ::2]), _rows),
            Example(
                "every third", lambda x: F.silu(x[..., :62:2]) * x[..., 1:62:2], _rows, "are not every second one of 64"
            ),
        )
    }
