"""From how many queries on expanding a latent costs less than absorbing its projections."""

from __future__ import annotations

from dataclasses import replace

from fusion.planning.target import Target
from patterns.latent.attention.absorption_cost import Sizes, break_even

SIZES = Sizes(heads=128, rank=512, width=128, rope=64, values=128)
MACHINE = Target.named("ascend910_93")


def test_a_narrower_latent_is_expanded_later_and_one_that_is_narrower_than_the_heads_never():
    found = [break_even(MACHINE, replace(SIZES, rank=rank)) for rank in (512, 256, 64)]
    assert found[0] is not None
    assert found[1] is None or found[1] > found[0]
    assert found[2] is None
