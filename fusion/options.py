"""Options: everything that a user can decide about the pass, frozen and checked."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch.fx.immutable_collections import immutable_dict

from fusion.errors import OptionError
from fusion.facts import KINDS, window
from fusion.target import Target

PREPACK = ("share", "copy")
LOWER = ("auto", "eager", "inductor", "torchair", "npugraph_ex")
LENGTHS = ("auto", "host")
PLAN_CACHE = ("disk", "memory", "off")
PLAN_CACHE_VARIABLE = "CANN_FUSION_PLAN_CACHE"


@dataclass(frozen=True)
class Options:
    """How a model is fused.

    Attributes:
        target: the chip that fusions are planned for: "auto", "ascend910b", "ascend910_93", "ascend950" or "host".
        lower: who runs the fused graph here: "auto", "eager", "inductor", "torchair" or "npugraph_ex".
        plan_lower: who would run it on the target; "" for torchair on an Ascend target, else for `lower`.
        rules: names of the only rules to use; empty for all.
        disable: names of rules and of operators not to use, e.g. {"rope", "npu_swiglu"}.
        opt_in: names of rules to use that are off otherwise: what they emit is no part of torch_npu, or is compiled for
            one model. `cann-fusion rules` says which these are.
        unsafe: names of rules whose guard is not asked (limits of operators still are).
        assume: what the attention masks among the arguments are: {"attention_mask": "causal"}, "padding" or
            "window:n" (n keys, the query's own among them). Checked at every call; where it does not hold, the
            unfused graph runs. A mask inside an argument has a path: "attention_mask.full_attention", "masks[0]".
        lengths: "host" allows eager launches to wait for the device, once a step, to read lengths as integers; "auto"
            uses what needs none.
        fuel: at most so many rewrites, to find the guilty one; None for all.
        verify: compare the first call of every fused graph with the original graph.
        prepack: "share" makes Parameters that are joined views of the joined tensor, so that nothing is held twice;
            "copy" keeps them beside it.
        plan_cache: where plans, and what has come of whole graphs, are kept for later compilations: "disk" (the user's
            cache folder, for later processes too), "memory" or "off"; $CANN_FUSION_PLAN_CACHE, where that is set.
        progress: show a line on the terminal where compiling takes more than five seconds; never in CI.
        dump_dir: folder for the graph after each stage, as text; "" for none.
    """

    target: str = "auto"
    lower: str = "auto"
    plan_lower: str = ""
    rules: frozenset[str] = frozenset()
    disable: frozenset[str] = frozenset()
    opt_in: frozenset[str] = frozenset()
    unsafe: frozenset[str] = frozenset()
    assume: Mapping[str, str] = immutable_dict()
    lengths: str = "auto"
    fuel: int | None = None
    verify: bool = False
    prepack: str = "share"
    plan_cache: str = ""
    progress: bool = True
    dump_dir: str = ""

    def __post_init__(self) -> None:
        """Normalise collections and check every value that can be checked here."""
        for name in ("rules", "disable", "opt_in", "unsafe"):
            given = getattr(self, name)
            object.__setattr__(self, name, frozenset((given,)) if isinstance(given, str) else frozenset(given))
        object.__setattr__(self, "assume", immutable_dict(self.assume))
        object.__setattr__(self, "dump_dir", str(self.dump_dir or ""))
        object.__setattr__(self, "plan_cache", self.plan_cache or os.environ.get(PLAN_CACHE_VARIABLE, "disk"))
        Target.resolve(self.target)
        launchers = ("lower", self.lower, LOWER), ("plan_lower", self.plan_lower or "auto", LOWER)
        others = ("lengths", LENGTHS), ("prepack", PREPACK), ("plan_cache", PLAN_CACHE)
        for name, value, known in (*launchers, *((each, getattr(self, each), known) for each, known in others)):
            check_names(f"value of option {name}", [value], known)
        for name, kind in self.assume.items():
            _check_assumption(name, kind)
        if self.fuel is not None and self.fuel < 0:
            raise OptionError(f"setting option fuel: {self.fuel} is negative; give the number of rewrites allowed")

    @staticmethod
    def of(given: Options | Mapping[str, Any] | None, **more: Any) -> Options:
        """Options from what a user gave: nothing, options, or a mapping of names to values.

        Raises:
            OptionError: a name or a value is not known; the message names the nearest.
        """
        if isinstance(given, Options):
            return given
        values = {**dict(given or {}), **more}
        check_names("option", values, [each.name for each in fields(Options)])
        return Options(**values)

    def key(self) -> tuple[Any, ...]:
        """All values, hashable and in a fixed order."""
        values = (getattr(self, each.name) for each in fields(self))
        return tuple(
            tuple(sorted(v.items())) if isinstance(v, Mapping) else tuple(sorted(v)) if isinstance(v, frozenset) else v
            for v in values
        )


def _check_assumption(name: str, kind: str) -> None:
    if kind in KINDS[:2] or window(str(kind)):
        return
    near = difflib.get_close_matches(str(kind), KINDS, n=1, cutoff=0)[0]
    raise OptionError(
        f"setting option assume: {kind!r} is nothing that can be assumed of {name!r}; did you mean {near!r}? "
        f"Give one of {', '.join(KINDS)}, where n is the positive number of keys that a query sees"
    )


def check_names(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise `OptionError` for the first name that is not known, with the nearest ones."""
    known = list(known)
    for name in sorted(names):
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=2, cutoff=0.5)
            hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
            raise OptionError(f"reading options: {name!r} is not a known {what}; {hint}known: {', '.join(known)}")
