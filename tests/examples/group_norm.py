"""Group norms in front of silu, and results that something else reads as well."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fusion import Example
from tests.examples.inputs import tensors

IMAGE = tensors((2, 16, 4, 6), (16,), (16,))


def activated(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, groups: int = 4) -> Tensor:
    """As in a residual block of a diffusion model."""
    return F.silu(F.group_norm(x, groups, weight, bias, 1e-6))


def by_sigmoid(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """As in an autoencoder, silu written out."""
    h = F.group_norm(x, 4, weight, bias, 1e-6)
    return h * h.sigmoid()


EXAMPLES = (
    Example("an image", activated, IMAGE),
    Example("silu written out", by_sigmoid, IMAGE),
    Example("a weight alone", activated, tensors((2, 16, 4, 6), (16,))),
    Example("no weight, one group", lambda x: activated(x, groups=1), tensors((2, 8, 10))),
)

TRIED = {"group_norm_silu": EXAMPLES}
