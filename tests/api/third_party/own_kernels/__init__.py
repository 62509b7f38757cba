"""An operator of a package of its own, and the rule that emits it; `own_kernels.library` registers the operator."""

import torch
from torch import Tensor

from fusion import Operator, Package, Rule, lowering, pattern, tensor

HALF = frozenset({torch.bfloat16, torch.float16})
PACKAGE = Package("own_kernels", ("own_kernels",), "kernels of this test", "this test", module="own_kernels.library")
SQUARED_RELU = Operator(
    schema="own_kernels::squared_relu(Tensor x) -> Tensor",
    compute=lambda x: x.float().relu().square().to(x.dtype),
    outputs=lambda x: torch.empty_like(x),
    dims={"x": "*B D"},
    dtypes={"x": HALF},
    limits={"host": (), "ascend910_93": ("D % 16 == 0",)},
    source="this test",
    summary="y = relu(x)²",
)


class SquaredRelu(Rule):
    """The squared ReLU of Primer."""

    def reference(self, x: Tensor) -> Tensor:
        """Square the ReLU of x [*B, D]."""
        return x.relu().square()

    @pattern
    def written(self, p, x=tensor("*B D")):
        """relu(x)²."""
        return p.square(p.op("relu", x))

    @lowering
    def own(self, x):
        """The operator of the package."""
        return torch.ops.own_kernels.squared_relu(x)


operators = (SQUARED_RELU, PACKAGE)
rules = (SquaredRelu(),)
