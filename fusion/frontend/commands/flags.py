"""Flags that several commands take, as records: those of `Options`, and those of the call that is traced."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer

from fusion.errors import OptionError
from fusion.frontend.commands.loading import loaded
from fusion.frontend.library import completed, installed
from fusion.language import Library, Rule
from fusion.options import LENGTHS, LOWER, PLAN_CACHE, PREPACK, Options, check_names

TARGET = "ascend910_93"
WITHOUT_FLAG: Mapping[str, str] = {
    "mode": "the mode of Inductor changes nothing of a report",
    "hints": "the compiler on the device reads them, and a command runs none",
    "verify": "it compares numbers, and a command runs no model",
    "expect": "the command `cann-fusion expect check` is for it",
}
"""Options that no flag sets, with the reasons."""
_HUB = "Hugging Face models (hf:...)"
_CALL = "The call"


def _flag(help: str, *names: str, panel: str | None = None, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


def _one_of(values: Sequence[str]) -> str:
    return f"[{'|'.join(values)}]"


@dataclass(frozen=True)
class OptionFlags:
    """Flags that set the fields of `Options` of the same names."""

    target: Annotated[
        str | None,
        _flag(
            "Chip to plan for: ascend910b (A2), ascend910_93 (A3), ascend950, or host, this machine.",
            show_default=TARGET,
        ),
    ] = None
    lower: Annotated[str, _flag("Compiler that runs the fused graph on this machine.", metavar=_one_of(LOWER))] = "auto"
    plan_lower: Annotated[
        str,
        _flag("Compiler that would run it on the target: torchair there unless you say otherwise.", metavar="COMPILER"),
    ] = ""
    rules: Annotated[
        list[str] | None,
        _flag(
            "Use only this rule: a name that `cann-fusion rules` lists, or module:attribute (file.py:attribute) for "
            "rules of your own; for these beside the installed ones, name a library such as "
            "`fusion.installed() + [MyRule()]`. May be repeated.",
        ),
    ] = None
    disable: Annotated[list[str] | None, _flag("Do without this rule or operator. May be repeated.")] = None
    opt_in: Annotated[
        list[str] | None,
        _flag("Use this rule, which is off otherwise; `cann-fusion rules` says which are. May be repeated."),
    ] = None
    packages: Annotated[
        list[str] | None,
        _flag(
            "Plan for operators of this package too; `cann-fusion ops` lists the packages; torch_npu==2.10 plans for "
            "that version of torch_npu; vllm_ascend-0.26 for the packages of that release. May be repeated."
        ),
    ] = None
    unsafe: Annotated[
        list[str] | None,
        _flag("Do not ask the guard of this rule, at your own risk; limits of operators hold. May be repeated."),
    ] = None
    assume: Annotated[
        list[str] | None,
        _flag(
            "Kind of an attention mask among the arguments: attention_mask=causal, =padding or =window:512. "
            "Each call is checked for it. May be repeated.",
            metavar="NAME=KIND",
        ),
    ] = None
    lengths: Annotated[
        str,
        _flag("host allows one wait for the device a step, to read lengths as numbers.", metavar=_one_of(LENGTHS)),
    ] = "auto"
    fuel: Annotated[
        int | None, _flag("Make at most so many rewrites: a bisection by it finds a guilty one.", metavar="N")
    ] = None
    prepack: Annotated[
        str,
        _flag("Weights that a rewrite joins: share makes them views, copy holds both.", metavar=_one_of(PREPACK)),
    ] = "share"
    plan_cache: Annotated[
        str,
        _flag(
            "Where plans are kept for later runs; disk unless $CANN_FUSION_PLAN_CACHE says otherwise.",
            metavar=_one_of(PLAN_CACHE),
        ),
    ] = ""
    progress: Annotated[bool, _flag("Show a line where tracing takes more than five seconds.")] = True
    dump_dir: Annotated[str, _flag("Folder for the graphs before and after, as text.", "--dump", metavar="FOLDER")] = ""

    def options(self, target: str = TARGET) -> Options:
        """Return the options that the flags set; `target` is that where no flag names one.

        Raises:
            OptionError: a value is not accepted.
        """
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        handed = self.library() is not None
        given |= {
            "target": self.target or target,
            "rules": frozenset[str]() if handed else frozenset(self.rules or ()),
            "assume": dict(map(_assumption, self.assume or ())),
        }
        return Options(**{name: value for name, value in given.items() if value is not None})

    def library(self) -> Library | None:
        """Return the rules that `--rules` hands over, None if it names installed rules alone, or none.

        Raises:
            OptionError: a rule cannot be loaded, or is not known.
            RuleError: it is declared wrongly.
        """
        named = self.rules or ()
        if not any(":" in each for each in named):
            return None
        by_name: dict[str, Rule] = {rule.name: rule for rule in installed().rules}
        check_names("rule", [each for each in named if ":" not in each], by_name)
        handed = [_rules(each) if ":" in each else by_name[each] for each in named]
        base = next((each for each in handed if isinstance(each, Library)), None)
        library = completed(()) if base is None else base
        for each in handed:
            library = library if each is base else library + each
        return library


@dataclass(frozen=True)
class CallFlags:
    """Flags that describe the call of a model that is traced."""

    input: Annotated[
        list[str] | None,
        _flag(
            "Argument of the model: bf16[2,16,256], or by name x=i64[1,32]. In place of the arguments that a factory "
            "returns; makes a function with parameters the model. May be repeated.",
            panel=_CALL,
            metavar="[NAME=]DTYPE[SHAPE]",
        ),
    ] = None
    dynamic: Annotated[
        bool | None,
        _flag(
            "Trace with symbolic sizes, or with those of the arguments alone, as torch.compile(dynamic=...).",
            "--dynamic/--static",
            panel=_CALL,
            show_default="as torch decides",
        ),
    ] = None
    mode: Annotated[
        str, _flag("Trace a prefill, or a decode: one token behind a cache.", metavar="[prefill|decode]", panel=_HUB)
    ] = "prefill"
    layers: Annotated[int, _flag("Number of layers, one of every kind first.", panel=_HUB)] = 2
    dtype: Annotated[str, _flag("Floating dtype of the weights.", metavar="[bf16|f16|f32]", panel=_HUB)] = "bf16"
    attn: Annotated[
        str,
        _flag(
            "Attention of the model: by scaled_dot_product_attention, or written out.",
            metavar="[sdpa|eager]",
            panel=_HUB,
        ),
    ] = "sdpa"
    batch: Annotated[int, _flag("Number of sequences.", panel=_HUB)] = 1
    seq: Annotated[int, _flag("Tokens of a prefill.", panel=_HUB)] = 32
    context: Annotated[int, _flag("Length of the cache in tokens.", panel=_HUB)] = 256
    cache: Annotated[str, _flag("Cache that the call is given.", metavar="[static|dynamic|none]", panel=_HUB)] = (
        "static"
    )
    tiny: Annotated[
        bool, _flag("Small real weights, in place of fake tensors of real sizes.", "--tiny", panel=_HUB)
    ] = False


_CODE = "hf:<model type>; package.module:name or path/to/file.py:name, a function or a module class"
ModelName = Annotated[
    str, typer.Argument(help=f"{_CODE}; or program.pt2 of torch.export.", metavar="MODEL", show_default=False)
]
ModelCode = Annotated[str, typer.Argument(help=f"{_CODE}.", metavar="MODEL", show_default=False)]
Traceback = Annotated[bool, typer.Option("--traceback", help="Where the model fails: print the whole traceback.")]


def with_flags(command: Callable[..., None], without: Collection[str] = ()) -> Callable[..., None]:
    """Replace the parameters of a command that are records of flags by a parameter for each flag, for typer.

    Args:
        command: the command.
        without: flags that the command does not offer: they have their defaults.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters = inspect.signature(command).parameters.values()
    records = {each.name: hints[each.name] for each in parameters if is_dataclass(hints[each.name])}
    hinted = {name: get_type_hints(kind, include_extras=True) for name, kind in records.items()}
    flags = {name: {flag: each[flag] for flag in each if flag not in without} for name, each in hinted.items()}

    def call(**given: Any) -> None:
        made = {name: kind(**{flag: given.pop(flag) for flag in flags[name]}) for name, kind in records.items()}
        command(**made, **given)

    named = [each.replace(annotation=hints[each.name]) for each in parameters if each.name not in records]
    more = [
        inspect.Parameter(flag, inspect.Parameter.KEYWORD_ONLY, default=getattr(kind, flag), annotation=hint)
        for name, kind in records.items()
        for flag, hint in flags[name].items()
    ]
    keyword = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in named]
    signature = inspect.Signature([*keyword, *more])
    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__annotations__ = {name: each.annotation for name, each in signature.parameters.items()}
    return call


def _assumption(text: str) -> tuple[str, str]:
    name, equals, kind = text.partition("=")
    if not equals:
        raise OptionError(
            f"reading options: --assume {text!r} has no kind of mask; write NAME=KIND, such as attention_mask=causal"
        )
    return name, kind


def _rules(place: str) -> object:
    """Load the rule, the class of a rule, the rules or the library that `place` names."""
    given: object = loaded(place, f"loading rules from {place}")
    return given() if isinstance(given, type) and issubclass(given, Rule) else given
