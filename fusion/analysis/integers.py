"""Integers of a mask as affine expressions over its own positions: Σ c·position + Σ c·leaf[..] + constant.

A tensor that only passes on elements of another is looked through. What cannot be followed is a leaf: a tensor that is
read at known positions. An expression is followed as far as no dtype on the way is proven to make it wrap round.
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
from fusion.analysis.extents import Extent
from fusion.analysis.intervals import is_exact
from fusion.graph import Value, but_ones
from fusion.graph.proof import must, proof, proven


class Integers(Extent):
    """Evaluates integers at the positions of one mask, whose dims have these sizes."""

    def __init__(self, shape: Sequence[Any], folder: Folder) -> None:
        super().__init__(shape)
        self._folder = folder
        self.lengths: set[Any] = set()  # of what is joined: sizes, which are not negative

    def truth(self, x: Value, at: Sequence[Affine]) -> Formula:
        """A tensor of booleans at these positions."""
        raise NotImplementedError

    def affine(self, x: Value, at: Sequence[Affine]) -> Affine:
        """A tensor of whole numbers at these positions."""
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
            case "scale" if x.arg.op != "mean":  # of which a sum is made
                return self.affine(x.arg, at).times(int(x.attrs[0]))
            case "add":
                left, right = (self.affine(each, spread(each, x, at)) for each in x.args)
                return left + right
            case "cast" if is_integer(x.arg):
                return self.affine(x.arg, at)
            case "cast" if x.arg.dtype is torch.bool and isinstance(holds := self.truth(x.arg, at), bool):
                return number(int(holds))
            case "cat" if (one := self._run_on(x, at)) is not None:
                return one
            case "cumsum" if not (each := self.affine(x.arg, at)).terms:  # of what is the same at every position
                return at[x.attrs[0]].plus(1).times(each.constant)
            case _:
                return Affine(MappingProxyType({Leaf(x, tuple(at)): 1}))

    def _view(self, x: Value, at: Sequence[Affine]) -> tuple[Value, tuple[Affine, ...]] | None:
        """Where a value only passes on elements of another: that one, and the positions there."""
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
                kept = [each for each, size in zip(at, x.shape, strict=True) if size != 1]
                if but_ones(x.shape) != but_ones(x.arg.shape):
                    return None
                sizes = iter(kept)
                return x.arg, tuple(number(0) if size == 1 else next(sizes) for size in x.arg.shape)
            case "index":
                return self._gathered(x, at)
            case "take":
                source, places = x.args
                own = source.rank - (x.rank - places.rank) - 1
                return source, (*at[:own], self.affine(places, at[: places.rank]), *at[places.rank :])
            case _:
                return None

    def _gathered(self, x: Value, at: Sequence[Affine]) -> tuple[Value, tuple[Affine, ...]] | None:
        """x[i, j] or x[.., i], none of which counts from the end, as masks read padding and their rows."""
        source, found = self._indexed(x, at)
        taken = [found[place] for place in x.attrs if found]
        return (source, found) if taken and all(self.below_one(e.times(-1)) is True for e in taken) else None

    def _indexed(self, x: Value, at: Sequence[Affine]) -> tuple[Value, tuple[Affine, ...]]:
        """Where an index for every dim of x, or for one, reads it, if none counts from the end; () for others."""
        source, indices = x.arg, x.args[1:]
        if x.attrs == tuple(range(source.rank)):
            return source, tuple(self.affine(each, spread(each, x, at)) for each in indices)
        if len(indices) != 1:
            return source, ()
        place, behind = x.attrs[0], x.attrs[0] + indices[0].rank
        return source, (*at[:place], self.affine(indices[0], at[place:behind]), *at[behind:])

    def _pieces(self, x: Value, at: Sequence[Affine]) -> list[tuple[Value, tuple[Affine, ...]]]:
        """What is joined, each piece with the positions in it."""
        axis, start, found = x.attrs[0], 0, []
        for piece in x.args:
            moved = number(0) if piece.shape[axis] == 1 else at[axis].plus(-start)
            found.append((piece, (*at[:axis], moved, *at[axis + 1 :])))
            self.lengths.add(piece.shape[axis])
            start += piece.shape[axis]
        return found

    @proof
    def _run_on(self, x: Value, at: Sequence[Affine]) -> Affine | None:
        """Whole numbers that are joined and go on as one expression: those of the first piece of several rows."""
        axis, pieces = x.attrs[0], self._pieces(x, at)
        sizes = [piece.shape[axis] for piece, _ in pieces]
        starts = [0, *accumulate(sizes)]
        long = proven(next((place for place, size in enumerate(sizes) if size != 1), None))
        found = self.affine(*pieces[long])
        for place, each in enumerate(pieces):
            there = (*at[:axis], number(starts[place] - starts[long]), *at[axis + 1 :])
            must(self.affine(*each) == (found if sizes[place] != 1 else self.affine(pieces[long][0], there)))
        return found

    def _of_pieces(self, formulas: Sequence[Formula], x: Value, at: Sequence[Affine]) -> Formula:
        """The formula of each piece where that piece stands."""
        axis = x.attrs[0]
        *ends, _ = accumulate(piece.shape[axis] for piece in x.args)
        *firsts, found = formulas
        for end, formula in zip(reversed(ends), reversed(firsts), strict=True):
            found = self.choice(self.below_one(at[axis].plus(1 - end)), formula, found)
        return found
