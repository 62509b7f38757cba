"""GLM-5's sparse attention over a paged cache, in plain PyTorch: that of DeepSeek-V3.2 with sizes of its own.

The indexer rotates pairs, as attention does, and the second layer attends to the keys that the first one lists.
"""

import torch
from deepseek_v32 import Indexer, Model, Sizes, pairs_rotated, show

SIZES = Sizes(q_lora=2048, nope=192, value=256)


class PairsIndexer(Indexer):
    rotated = staticmethod(pairs_rotated)


def build(of: Sizes = SIZES) -> Model:
    return Model(of, PairsIndexer(of), None).bfloat16().eval()


def main() -> None:
    torch.manual_seed(0)
    show(build())


if __name__ == "__main__":
    main()
