"""Options of the pass, frozen and checked."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from torch.fx.immutable_collections import immutable_dict

from fusion.errors import OptionError
from fusion.facts import KINDS, window
from fusion.operators.profiles import expand_profiles
from fusion.planning.target import Target

PREPACK = ("share", "copy")
LOWER = ("auto", "eager", "inductor", "torchair", "npugraph_ex")
MODES = ("default", "lite", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""Modes of `torch.compile`, which are those of Inductor."""
HINTS = ("prefetch", "super_kernel")
LENGTHS = ("auto", "host")
PLAN_CACHE = ("disk", "memory", "off")
PLAN_CACHE_VARIABLE = "CANN_FUSION_PLAN_CACHE"


@dataclass(frozen=True)
class Options:
    """Options of fusing a model.

    Attributes:
        target: the chip that fusions are planned for: "auto", "ascend910b", "ascend910_93", "ascend950" or "host".
        lower: the compiler that runs the fused graph here: "auto", "eager", "inductor", "torchair" or "npugraph_ex".
        plan_lower: the compiler that would run it on the target; "" for torchair on an Ascend target, else for `lower`.
        mode: mode of Inductor, as in `torch.compile(mode=...)`; other compilers have no such modes.
        rules: names of the only rules to use; empty for all.
        disable: names of rules and of operators not to use, e.g. {"rope", "npu_swiglu"}.
        opt_in: names of rules to use that are off by default: their operators are no part of torch_npu, or are compiled
            for one model. `cann-fusion rules` lists them.
        packages: names of the packages, beside torch_npu, whose operators the target has: {"cann_ops_transformer"}.
            Where this machine is an NPU, those that are imported count too, and the name of a rule in `opt_in` stands
            for its packages. `cann-fusion ops` lists them. "torch_npu==2.10" plans for that version of torch_npu, and a
            profile such as "vllm_ascend-0.26" stands for the version and the packages that this release installs.
        unsafe: names of rules whose guard is skipped (limits of operators still apply).
        assume: kinds of the attention masks among the arguments: {"attention_mask": "causal"}, "padding" or
            "window:n" (n keys, the query's own among them). Checked at every call; a call with another mask runs the
            unfused graph. A mask inside an argument has a path: "attention_mask.full_attention", "masks[0]".
        lengths: "host" allows eager launches to synchronise the device, once a step, to read lengths as integers;
            "auto" uses only operators that need no such read.
        fuel: most rewrites to make, to find a wrong one by bisection; None for all.
        verify: compare the first call of every fused graph with the original graph, judged by float64, and name the
            rewrite that is wrong. A guest (`FusionPass`) observes no calls and ignores it.
        hints: hints that torchair hands to GE, none by default: "prefetch" of the weights that a call waits for, and
            "super_kernel" scopes around decode layers whose calls are all fused or products. They change no number,
            and may cost time: measure them.
        prepack: "share" makes Parameters that are joined views of the joined tensor, so that no weight is stored twice;
            "copy" stores both.
        plan_cache: cache of plans, and of the rewrites of complete graphs, for later compilations: "disk" (the user's
            cache folder, for later processes too), "memory" or "off"; by default $CANN_FUSION_PLAN_CACHE or "disk".
        progress: show a line on the terminal where compiling takes more than five seconds; never in CI.
        dump_dir: folder for the graph after each stage, as text; "" for none.
        expect: fusions that the model must have, as a TOML file or a mapping of the same content (docs/expect.md);
            a graph that lacks one gives an `ExpectationWarning`. A guest (`FusionPass`) ignores it.
    """

    target: str = "auto"
    lower: str = "auto"
    plan_lower: str = ""
    mode: str = "default"
    rules: frozenset[str] = frozenset()
    disable: frozenset[str] = frozenset()
    opt_in: frozenset[str] = frozenset()
    packages: frozenset[str] = frozenset()
    unsafe: frozenset[str] = frozenset()
    assume: Mapping[str, str] = immutable_dict()
    lengths: str = "auto"
    fuel: int | None = None
    verify: bool = False
    hints: frozenset[str] = frozenset()
    prepack: str = "share"
    plan_cache: str = ""
    progress: bool = True
    dump_dir: str = ""
    expect: str | Mapping[str, Any] = ""

    def __post_init__(self) -> None:
        """Check each value by its type and content, and normalise collections."""
        for name, checked in _CHECKS.items():
            object.__setattr__(self, name, checked(name, getattr(self, name)))

    @staticmethod
    def of(given: Any, **more: Any) -> Options:
        """Make Options of `given` (Options, a mapping of names to values, or None), updated by `more`.

        Raises:
            OptionError: a name or a value is not known; the message names the nearest.
        """
        if not isinstance(given, Options | Mapping | None):
            raise OptionError(
                f"reading options: {given!r} is no mapping; give a mapping of names to values, such as "
                "{'target': 'ascend910_93'}, or fusion.Options(...)"
            )
        known = [each.name for each in fields(Options)]
        check_names("option", [*(() if isinstance(given, Options) else given or ()), *more], known)
        if isinstance(given, Options):
            return replace(given, **more) if more else given
        return Options(**{**(given or {}), **more})

    def key(self) -> tuple[Any, ...]:
        """Return all values that a rewrite may depend on, hashable and in a fixed order."""
        values = (getattr(self, each.name) for each in fields(self) if each.name != "expect")
        return tuple(
            tuple(sorted(v.items())) if isinstance(v, Mapping) else tuple(sorted(v)) if isinstance(v, frozenset) else v
            for v in values
        )


def check_names(
    what: str,
    names: Iterable[Any],
    known: Iterable[str],
    meant: str = "",
    listed: Iterable[str] | None = None,
    doing: str = "reading options",
) -> None:
    """Raise `OptionError` for the first of `names` that is not `known`.

    Args:
        what: the kind of name, for the message.
        names: the given names.
        known: the accepted names.
        meant: hint in the message; "" for the nearest known names.
        listed: the known names that the message lists; None for all.
        doing: the beginning of the message.
    """
    known = list(known)
    unknown = next((each for each in sorted(names, key=str) if each not in known), None)
    if unknown is None:
        return
    near = difflib.get_close_matches(str(unknown), known, n=2, cutoff=0.5)
    hint = meant or (f"did you mean {' or '.join(map(repr, near))}? " if near else "")
    accepted = ", ".join(filter(None, known if listed is None else listed))
    raise OptionError(f"{doing}: {unknown!r} is not a known {what}; {hint}known: {accepted}")


def _wrong(option: str, given: object, wanted: str) -> OptionError:
    kind = "" if given is None else f" of type {type(given).__name__}"
    return OptionError(f"setting option {option}: {given!r}{kind} is not accepted; give {wanted}")


def _target(option: str, given: Any) -> str:
    if not isinstance(given, str):
        raise _wrong(option, given, "the name of a target, such as 'ascend910_93', or 'auto' for this machine")
    Target.resolve(given)
    return given


def _one_of(known: tuple[str, ...], option: str, given: Any) -> str:
    if not isinstance(given, str):
        raise _wrong(option, given, f"one of {', '.join(map(repr, known))}")
    check_names(f"value of option {option}", [given], known)
    return given


def _plan_cache(option: str, given: Any) -> str:
    default = os.environ.get(PLAN_CACHE_VARIABLE)
    if given == "" and default is not None:
        return _one_of(PLAN_CACHE, f"{option}, which ${PLAN_CACHE_VARIABLE} sets", default)
    return _one_of(PLAN_CACHE, option, given if given != "" else PLAN_CACHE[0])


def _names(option: str, given: Any) -> frozenset[str]:
    names = [given] if isinstance(given, str) else given
    examples = {"packages": "{'cann_ops_transformer'}", "hints": "{'prefetch'}"}
    example = examples.get(option, "{'rms_norm'}")
    wanted = f"names, such as {example}, or leave {option} out"
    if isinstance(names, Mapping) or not isinstance(names, Iterable):
        raise _wrong(option, given, wanted)
    listed: list[Any] = list(names)
    for each in listed:
        if not isinstance(each, str):
            raise _wrong(option, each, f"{wanted}; hand rules over as the argument `rules` of fusion.FusionBackend")
    return frozenset(listed)


def _packages(option: str, given: Any) -> frozenset[str]:
    return expand_profiles(_names(option, given))


def _assumptions(option: str, given: Any) -> Mapping[str, str]:
    wanted = "a mapping of arguments to kinds of masks, such as {'attention_mask': 'causal'}"
    if not isinstance(given, Mapping):
        raise _wrong(option, given, wanted)
    for name, kind in given.items():
        if not isinstance(name, str) or not name:
            raise _wrong(option, name, f"{wanted}; an argument is named by its path, as 'attention_mask'")
        if not isinstance(kind, str):
            raise _wrong(option, kind, f"{wanted}; a mask inside an argument has a path, as '{name}.full_attention'")
        _check_assumption(name, kind)
    return immutable_dict(given)


def _check_assumption(name: str, kind: str) -> None:
    if kind in KINDS[:2] or window(kind):
        return
    near = difflib.get_close_matches(kind, KINDS, n=1, cutoff=0)[0]
    raise OptionError(
        f"setting option assume: {kind!r} is nothing that can be assumed of {name!r}; did you mean {near!r}? "
        f"Give one of {', '.join(KINDS)}, where n is the positive number of keys that a query sees"
    )


def _fuel(option: str, given: Any) -> int | None:
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int):
        raise _wrong(option, given, "the number of rewrites allowed, or None for all")
    if given < 0:
        raise OptionError(f"setting option fuel: {given} is negative; give the number of rewrites allowed")
    return given


def _hints(option: str, given: Any) -> frozenset[str]:
    names = _names(option, given)
    check_names(f"value of option {option}", names, HINTS)
    return names


def _flag(option: str, given: Any) -> bool:
    if not isinstance(given, bool):
        raise _wrong(option, given, "True or False")
    return given


def _folder(option: str, given: Any) -> str:
    if not isinstance(given, str | os.PathLike | None):
        raise _wrong(option, given, "the path of a folder")
    return str(given) if given else ""


def _expectations(option: str, given: Any) -> str | Mapping[str, Any]:
    if isinstance(given, Mapping):
        return immutable_dict(given)
    if not isinstance(given, str | os.PathLike | None):
        raise _wrong(option, given, "the path of a TOML file, or a mapping, such as {'fusions': {'attention': 2}}")
    return str(given) if given else ""


_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "target": _target,
    "lower": partial(_one_of, LOWER),
    "plan_lower": partial(_one_of, ("", *LOWER)),
    "mode": partial(_one_of, MODES),
    **dict.fromkeys(("rules", "disable", "opt_in", "unsafe"), _names),
    "packages": _packages,
    "assume": _assumptions,
    "lengths": partial(_one_of, LENGTHS),
    "fuel": _fuel,
    "verify": _flag,
    "hints": _hints,
    "prepack": partial(_one_of, PREPACK),
    "plan_cache": _plan_cache,
    "progress": _flag,
    "dump_dir": _folder,
    "expect": _expectations,
}
"""For each option, the function that checks a value and returns it normalised."""
