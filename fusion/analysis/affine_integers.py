"""Integers of a mask as affine expressions of its positions: Σ c·position + Σ c·leaf[..] + constant.

Views and gathers are followed to their source. Any value that is not affine in its operands, or may wrap round in its
dtype, is a leaf: an element at known positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch

from fusion.analysis.affine import Affine, Formula, Leaf, number, spread
from fusion.analysis.constant_folding import Folder
from fusion.analysis.dtypes import is_integer
from fusion.analysis.formula_decisions import Extent
from fusion.analysis.intervals import is_exact
from fusion.graph import Value, but_ones
from fusion.graph.proof_steps import must, proof, proven


class Integers(Extent):
    """Evaluation of integer tensors at the positions of a mask with the dims `shape`."""

    def __init__(self, shape: Sequence[Any], folder: Folder) -> None:
        super().__init__(shape)
        self._folder = folder
        self.lengths: set[Any] = set()  # sizes of concatenated pieces: known not to be negative

    def truth(self, x: Value, at: Sequence[Affine]) -> Formula:
        """Evaluate the element x[at] of a boolean tensor as a formula."""
        raise NotImplementedError

    def affine(self, x: Value, at: Sequence[Affine]) -> Affine:
        """Evaluate the element x[at] of an integer tensor as an affine expression; a `Leaf` if it is none."""
        below = self._view(x, at)
        if below is not None:
            return self.affine(*below)
        even = self._folder.steps(x)
        if even is not None:
            return reduce(Affine.__add__, map(Affine.times, at, even[1]), number(even[0]))
        match x.op if is_exact(x) else "":
            case "arange":
                return at[0].times(x.attrs[1]).plus(x.attrs[0])
            case "full":
                return number(int(x.attrs[0]))
            case "number":
                return number(x.attrs[0])
            case "shift":
                return self.affine(x.arg, at).plus(int(x.attrs[0]))
            case "scale" if x.arg.op != "mean":  # N · mean is a sum
                return self.affine(x.arg, at).times(int(x.attrs[0]))
            case "add":
                left, right = (self.affine(each, spread(each, x, at)) for each in x.args)
                return left + right
            case "cast" if is_integer(x.arg):
                return self.affine(x.arg, at)
            case "cast" if x.arg.dtype is torch.bool and isinstance(holds := self.truth(x.arg, at), bool):
                return number(int(holds))
            case "cat" if (expression := self._continued(x, at)) is not None:
                return expression
            case "cumsum" if not (each := self.affine(x.arg, at)).terms:  # constant along the axis
                return at[x.attrs[0]].plus(1).times(each.constant)
            case _:
                return Affine(MappingProxyType({Leaf(x, tuple(at)): 1}))

    def _view(self, x: Value, at: Sequence[Affine]) -> tuple[Value, tuple[Affine, ...]] | None:
        """Return the tensor that `x` is a view or a gather of, and the position in it that x[at] is at.

        None if `x` is neither, or a reshape of more than dims of size 1.
        """
        match x.op:
            case "expand":
                return x.arg, spread(x.arg, x, at)
            case "permute":
                back = {source: place for place, source in enumerate(x.attrs)}
                return x.arg, tuple(at[back[place]] for place in range(x.rank))
            case "slice":
                axis, start, _, step = x.attrs
                moved = at[axis].times(step).plus(start)
                return x.arg, (*at[:axis], moved, *at[axis + 1 :])
            case "narrow":
                axis, start, _ = x.attrs
                return x.arg, (*at[:axis], at[axis].plus(start), *at[axis + 1 :])
            case "reshape":
                if but_ones(x.shape) != but_ones(x.arg.shape):
                    return None
                own = iter([each for each, size in zip(at, x.shape, strict=True) if size != 1])
                return x.arg, tuple(number(0) if size == 1 else next(own) for size in x.arg.shape)
            case "index":
                return self._gathered(x, at)
            case "take":
                source, places = x.args
                lead = source.rank - (x.rank - places.rank) - 1
                return source, (*at[:lead], self.affine(places, at[: places.rank]), *at[places.rank :])
            case _:
                return None

    def _gathered(self, x: Value, at: Sequence[Affine]) -> tuple[Value, tuple[Affine, ...]] | None:
        """Return the tensor that `x` is gathered from, and the position in it that x[at] is at, for source[i, j] or
        source[.., i].

        None for gathers by several, but not all, dims; and unless the indices are proven not to be negative, as those
        count from the end.
        """
        source, indices = x.arg, x.args[1:]
        if x.attrs == tuple(range(source.rank)):
            positions = tuple(self.affine(each, spread(each, x, at)) for each in indices)
        elif len(indices) == 1:
            place, behind = x.attrs[0], x.attrs[0] + indices[0].rank
            positions = (*at[:place], self.affine(indices[0], at[place:behind]), *at[behind:])
        else:
            return None
        taken = [positions[place] for place in x.attrs]
        return (source, positions) if taken and all(self.below_one(e.times(-1)) is True for e in taken) else None

    def _pieces(self, x: Value, at: Sequence[Affine]) -> list[tuple[Value, tuple[Affine, ...]]]:
        """List the pieces of the concatenation `x`, each with the positions `at` relative to it."""
        axis, start, pieces = x.attrs[0], 0, []
        for piece in x.args:
            moved = number(0) if piece.shape[axis] == 1 else at[axis].plus(-start)
            pieces.append((piece, (*at[:axis], moved, *at[axis + 1 :])))
            self.lengths.add(piece.shape[axis])
            start += piece.shape[axis]
        return pieces

    @proof
    def _continued(self, x: Value, at: Sequence[Affine]) -> Affine | None:
        """Evaluate x[at] of the concatenation `x` by the expression of its first piece that has not size 1.

        None unless the expression is proven to hold in all other pieces, or if all have size 1.
        """
        axis, pieces = x.attrs[0], self._pieces(x, at)
        sizes = [piece.shape[axis] for piece, _ in pieces]
        starts = [0, *accumulate(sizes)]
        long = proven(next((place for place, size in enumerate(sizes) if size != 1), None))
        expression = self.affine(*pieces[long])
        for place, each in enumerate(pieces):
            there = (*at[:axis], number(starts[place] - starts[long]), *at[axis + 1 :])
            must(self.affine(*each) == (expression if sizes[place] != 1 else self.affine(pieces[long][0], there)))
        return expression

    def _by_piece(self, formulas: Sequence[Formula], x: Value, at: Sequence[Affine]) -> Formula:
        """Build the formula that is `formulas[n]` where the position `at` is in piece n of the concatenation `x`."""
        axis = x.attrs[0]
        *ends, _ = accumulate(piece.shape[axis] for piece in x.args)
        *firsts, result = formulas
        for end, formula in zip(reversed(ends), reversed(firsts), strict=True):
            result = self.choice(self.below_one(at[axis].plus(1 - end)), formula, result)
        return result
