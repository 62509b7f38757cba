"""Equal layers: of layers that do the same between equal neighbours one is searched, and its rewrites are repeated.

A model of 61 layers has two or three kinds of layer. Layers are of one kind if their calls do the same, one by one, and
read corresponding tensors: of their own layer, of the one before, of all layers in common, or inputs of their own. The
kinds may follow each other in any order.
"""

from fusion.stages.layers.correspondence import NotRepeatedError
from fusion.stages.layers.fold import Folded, divide, fold, paired
from fusion.stages.layers.fold_origins import Origins
from fusion.stages.layers.unfold import unfold

__all__ = ["Folded", "NotRepeatedError", "Origins", "divide", "fold", "paired", "unfold"]
