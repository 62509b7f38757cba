"""Registration of the operator by its package, as an extension does it when it is imported."""

import torch

LIBRARY = torch.library.Library("own_kernels", "DEF")
LIBRARY.define("squared_relu(Tensor x) -> Tensor")
LIBRARY.impl("squared_relu", lambda x: torch.empty_like(x), "Meta")
