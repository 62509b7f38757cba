"""The pass in other compilers, one function for each: `inductor`, `export`, `torchair`, `npugraph_ex`, `vllm`.

Each takes what configures the other compiler, if it hands that over, then `options` and `rules` as
`fusion.FusionBackend` does.
"""

from fusion.frontend.exported import fuse_exported as export
from fusion.frontend.integrations.ascend import npugraph_ex, torchair
from fusion.frontend.integrations.hosts import inductor, vllm

__all__ = ["export", "inductor", "npugraph_ex", "torchair", "vllm"]
