"""Equal layers: three of a run stand for all while the graph is searched, and what came of the middle one is repeated.

A model of 61 layers has two or three kinds of layer. Layers are equal if their nodes do the same, one by one, and read
the same places: of their own layer, of the one before, of what all layers share, or of inputs of their own.
"""

from fusion.stages.layers.correspondence import NotRepeatedError
from fusion.stages.layers.fold import Folded, fold
from fusion.stages.layers.origins import Origins
from fusion.stages.layers.unfold import unfold

__all__ = ["Folded", "NotRepeatedError", "Origins", "fold", "unfold"]
