"""Equal layers: of those that meet equal neighbours one is searched, and what came of it is repeated in the others.

A model of 61 layers has two or three kinds of layer. Layers are of one kind if their calls do the same, one by one, and
read the same places: of their own layer, of the one before, of what all layers share, or of inputs of their own. They
may follow each other in any order.
"""

from fusion.stages.layers.correspondence import NotRepeatedError
from fusion.stages.layers.fold import Folded, divide, fold, paired
from fusion.stages.layers.origins import Origins
from fusion.stages.layers.unfold import unfold

__all__ = ["Folded", "NotRepeatedError", "Origins", "divide", "fold", "paired", "unfold"]
