"""A target operator as data: schema, decomposition into plain aten, empty results, and limits per chip."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch

from fusion._torch.operators import OpOverload
from fusion.errors import OperatorError
from fusion.operators import calling, legality, limit_texts, named_dims
from fusion.operators.limits import CHIPS, HOST, LOWERINGS, Limit


@dataclass(frozen=True, eq=False)
class Operator:
    """One operator that the pass can emit.

    A chip without a row in `limits` does not have the operator. Limits of every machine have the key `"host"`. Dims get
    their sizes from the arguments in the order of `dims`. A function "of arguments by name" receives those arguments of
    a call that its parameters name.
    """

    schema: str
    """Schema as torch_npu 2.13.0 prints it."""
    compute: Callable[..., Any]
    """Decomposition into plain aten: a function of arguments by name, which rounds like the A2/A3 kernels.

    A parameter `given` receives a mapping of all arguments but those of `uncomputed` and `without_effect`. A parameter
    `put` receives a function that writes rows into a tensor or into its copy (`fusion.operators.cache.pages.Put`);
    `compute` then returns all results, and after them each written tensor that is not among the results.
    """
    dims: Mapping[str, str]
    """Argument, or several as in `"cos sin"` -> named dims, in the notation of `fusion.operators.named_dims`."""
    dtypes: Mapping[str, frozenset[torch.dtype]]
    """Argument, or several -> dtypes that at least one chip accepts."""
    limits: Mapping[str, tuple[Limit | str, ...]]
    """Chip or `"host"` -> predicates over dims and arguments, in the notation of `fusion.operators.limit_texts`."""
    source: str
    """Page of CANN or op-plugin, or kernel source, from which the contract was read."""
    summary: str
    """Formula of the operator, in one line."""
    uncomputed: Mapping[str, str] = field(default_factory=dict[str, str])
    """Argument, or several -> reason why `compute` ignores it; a call that differs from its default is refused."""
    without_effect: frozenset[str] = field(default_factory=frozenset[str])
    """Arguments that change no result: hints for the kernel, and arguments that limits pin to one meaning."""
    outputs: Callable[..., Any] = lambda: ()
    """Function of arguments by name that returns empty results with the shapes, dtypes and strides of torch_npu's Meta
    kernel, without the results that are arguments or copies of `copied`."""
    copied: tuple[str, ...] = ()
    """Arguments of which the operator writes to copies, and returns the copies as its last results."""
    lowerings: frozenset[str] = frozenset(LOWERINGS)
    """Members of `LOWERINGS` that run the operator (torchair: a GE converter exists)."""
    overwrites: frozenset[str] = field(default_factory=frozenset[str])
    """Arguments that the eager kernel overwrites although the schema declares no write: they must be dead after it."""
    in_place: str = ""
    """Name of the operator that writes into the arguments that this one copies, "" if there is none."""
    runs_default: bool = False
    """Return True if this overload is declared by us, and a device runs the vendor's default overload for it: the
    vendor's
    schema does not declare its writes, or belongs to a package that may define it at any time."""
    older: str = ""
    """Qualified name of an operator with the same contract in a package older than torch_npu's, "" if there is none."""
    older_means: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Argument that the `older` operator lacks -> value that it computes with, where that is not the default here."""
    flops: Callable[..., float] | None = None
    """Function of arguments by name that estimates the multiplications and additions of a call; None if the cost of a
    call is that of the bytes that it moves."""
    skipped_bytes: Callable[..., float] | None = None
    """Function of arguments by name that estimates how many bytes of its arguments a call does not read; None if it
    reads all."""
    on_host: frozenset[str] = field(default_factory=frozenset[str])
    """Tensor arguments that an eager launch reads on the host: if these are on the CPU, "eager" runs the operator even
    without being in `lowerings`."""
    fractal: Callable[..., Mapping[str, bool]] | None = None
    """Function of arguments by name that returns argument -> True if a call reads it in FRACTAL_NZ, for the arguments
    whose storage format selects what is computed; None if no format does."""
    either: frozenset[str] = field(default_factory=frozenset[str])
    """Weights that the kernel reads in ND, transposed views included, or in FRACTAL_NZ, which is faster."""
    empty: frozenset[str] = field(default_factory=frozenset[str])
    """Dims that may be 0, as in a tensor that a mode of the operator does not touch; all other dims are positive."""
    moves: bool = False
    """Return True if every float of the results is an element of an argument."""
    rounds: str = ""
    """Intermediate values that the kernel rounds to float16 in calls in float16, "" if there are none."""

    def __post_init__(self) -> None:
        """Expand rows of several arguments to one row each; raise OperatorError for chips, lowerings, arguments or dims
        that do not exist."""
        for name in ("dims", "dtypes", "uncomputed"):
            object.__setattr__(self, name, _row_per_name(getattr(self, name)))
        known = frozenset(self.arguments)
        self._require(set(self.limits) - {HOST, *CHIPS}, "chips", (HOST, *CHIPS))
        self._require(self.lowerings - set(LOWERINGS), "lowerings", LOWERINGS)
        named = self._named | {*self.copied, *self.dims, *self.dtypes, *self.uncomputed}
        named |= self.overwrites | self.on_host | self.either | self.without_effect
        self._require(named - known, "arguments", tuple(known))
        self._require(self.empty - self._sizes, "dims", tuple(self._sizes))
        self._require_an_answer_for_each_argument()

    def _require_an_answer_for_each_argument(self) -> None:
        """Raise OperatorError unless every argument is in exactly one of computed, uncomputed and without_effect."""
        answers = [*self.computed, *self.uncomputed, *self.without_effect]
        wrong = [name for name in self.arguments if answers.count(name) != 1]
        if wrong:
            raise OperatorError(
                f"declaring {self.name}: {', '.join(wrong)} must be named by compute, or stand in uncomputed or in "
                "without_effect, and in one of the three alone"
            )

    @cached_property
    def _named(self) -> frozenset[str]:
        """Arguments that `compute` and `outputs` name as parameters."""
        return calling.named(self.compute) | calling.named(self.outputs)

    @cached_property
    def computed(self) -> tuple[str, ...]:
        """Arguments that the decomposition reads, in the order of the schema."""
        if not calling.takes_mapping(self.compute):
            return tuple(name for name in self.arguments if name in self._named)
        left = self.without_effect | self.uncomputed.keys()
        return tuple(name for name in self.arguments if name not in left)

    @cached_property
    def _sizes(self) -> frozenset[str]:
        """Names of the dims of all arguments, without those like `*B` that stand for several dims."""
        return frozenset[str]().union(*(named_dims.names(text) for text in self.dims.values()))

    def limits_on(self, chip: str) -> tuple[Limit, ...]:
        """Return the limits declared for `chip`; for `HOST` those of every machine, after the defaults of `uncomputed`.

        Raises:
            OperatorError: a limit is outside the grammar, or names a dim or argument that does not exist. Limits are
                parsed here and not at their declaration, because parsing all of them takes a tenth of a second.
        """
        declared = tuple(Limit(limit) if isinstance(limit, str) else limit for limit in self.limits.get(chip, ()))
        limits = (*self._left_at_defaults(), *declared) if chip == HOST else declared
        known = self._sizes | self.arguments.keys()
        for limit in limits:
            named = limit_texts.names(limit.text) | limit_texts.names(limit.when or "True")
            self._require(named - known, f"names in the limit {limit.text!r}", tuple(known))
        return limits

    def _left_at_defaults(self) -> Iterator[Limit]:
        """Yield for each argument of `uncomputed` the limit that it has its default, or is not given if the default is
        None.
        """
        for name, because in self.uncomputed.items():
            default = self.default(name)
            yield Limit(f"not given({name})" if default is None else f"{name} == {default!r}", because=because)

    def default(self, name: str) -> Any:
        """Return the default of the argument `name`, a list as a tuple; None if it has no default."""
        argument = self.arguments[name]
        default = argument.default_value if argument.has_default_value() else None
        return tuple(default) if isinstance(default, list) else default

    def _require(self, unknown: set[str] | frozenset[str], what: str, known: tuple[str, ...]) -> None:
        if unknown:
            raise OperatorError(
                f"declaring {self.name}: {', '.join(sorted(unknown))} are not known {what}; "
                f"use some of {', '.join(sorted(known))}"
            )

    @cached_property
    def _parsed(self) -> Any:
        return calling.parsed(self.schema)

    @cached_property
    def fallback(self) -> Callable[..., Any]:
        """Decomposition into plain aten, as a function with the signature of the schema.

        Raises:
            OperatorError: in a call that the decomposition does not compute; the text names the argument.
        """
        explain = partial(legality.without_elements, self)
        return calling.fallback(self.schema, self.compute, self.copied, self._admitted, explain)

    @cached_property
    def meta(self) -> Callable[..., Any]:
        """Meta kernel: a function with the signature of the schema that returns empty results.

        Raises:
            OperatorError: in a call that the decomposition does not compute; the text names the argument.
        """
        return calling.meta(self.schema, self.outputs, self.copied, self._admitted)

    def _admitted(self, given: calling.Given) -> calling.Given:
        """Return of the arguments `given` of a call those in `computed`.

        Raises:
            OperatorError: the decomposition does not compute the call.
        """
        legality.require_decomposed(self, given)
        return {name: given[name] for name in self.computed}

    @property
    def name(self) -> str:
        """Qualified name as `npu::npu_rms_norm`, with the overload after a dot unless it is the default one."""
        overload = self._parsed.overload_name
        return f"{self._parsed.name}.{overload}" if overload else self._parsed.name

    @property
    def namespace(self) -> str:
        """Namespace of `name`: `npu` for `npu::npu_rms_norm`."""
        return self.name.split("::")[0]

    @property
    def short(self) -> str:
        """`name` without its namespace: `npu_rms_norm` for `npu::npu_rms_norm`."""
        return self.name.split("::")[1]

    @cached_property
    def arguments(self) -> Mapping[str, Any]:
        """Name -> argument of the parsed schema, in its order."""
        return {argument.name: argument for argument in self._parsed.arguments}

    @cached_property
    def written(self) -> tuple[str, ...]:
        """Arguments that the schema declares as mutated, in its order."""
        return tuple(name for name, each in self.arguments.items() if each.alias_info and each.alias_info.is_write)

    def work(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
        """Estimate the multiplications and additions of a call by `flops`; 0 if the operator has none."""
        return self._flops(self.bind(args, kwargs))

    def skipped(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
        """Estimate by `skipped_bytes` how many bytes of its arguments a call leaves unread; 0 without that estimate."""
        return self._skipped_bytes(self.bind(args, kwargs))

    def formats(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, bool]:
        """Return by `fractal` argument -> True if a call reads it in FRACTAL_NZ; empty if no format matters."""
        return {} if self.fractal is None else calling.by_name(self.fractal)(self.bind(args, kwargs))

    @cached_property
    def _skipped_bytes(self) -> Callable[..., float]:
        return calling.by_name(self.skipped_bytes or (lambda: 0.0))

    @cached_property
    def _flops(self) -> Callable[..., float]:
        return calling.by_name(self.flops or (lambda: 0.0))

    def overload(self) -> OpOverload:
        """Return the overload that PyTorch's dispatcher has of this operator.

        Raises:
            OperatorError: it is not registered; `ensure()` registers it.
        """
        name, _, overload = self.short.partition(".")
        packet = getattr(getattr(torch.ops, self.namespace), name, None)
        registered = getattr(packet, overload or "default", None)
        if registered is None:
            raise OperatorError(f"looking up {self.name}: it is not registered; call fusion.operators.ensure() first")
        return registered

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return argument -> value of a call, with defaults, and with torch's numbers for dtypes.

        Raises:
            OperatorError: the call does not fit the schema.
        """
        positional = [name for name, argument in self.arguments.items() if not argument.kwarg_only]
        given = dict(zip(positional, args, strict=False)) | dict(kwargs)
        values = {n: calling.coded(given.get(n, argument.default_value)) for n, argument in self.arguments.items()}
        missing = [n for n, a in self.arguments.items() if n not in given and not a.has_default_value()]
        surplus = set(kwargs) - set(self.arguments) | set(kwargs).intersection(positional[: len(args)])
        if missing or surplus or len(args) > len(positional):
            wrong = ", ".join([*missing, *sorted(surplus)]) or f"{len(args)} positional arguments"
            raise OperatorError(f"calling {self.schema}: {wrong} missing or not expected; pass what the schema names")
        return values


def _row_per_name(rows: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row for several, row in rows.items() for name in several.split()}


def functional(op: Operator, name: str, summary: str, lowerings: frozenset[str] = frozenset()) -> Operator:
    """Return the functional form of `op`, with `name`, `summary` and `lowerings` of its own.

    It writes into copies of the arguments that `op` mutates, and returns the copies; its `in_place` form is `op`.
    """
    schema = calling.functional_schema(op.schema, name)
    own = {"schema": schema, "summary": summary, "lowerings": lowerings}
    return replace(op, copied=op.written, in_place=op.name, runs_default=False, older="", **own)


def in_tensors(
    op: Operator, lengths: tuple[str, ...], dtypes: frozenset[torch.dtype], lowerings: frozenset[str]
) -> Operator:
    """Return the overload `tensor_lengths` of `op`, declared by us, whose arguments `lengths` are tensors of `dtypes`
    instead of lists of ints; an eager launch reads them on the host."""
    schema = op.schema.replace("(", ".tensor_lengths(", 1)
    schema = re.sub(rf"SymInt\[\](\??) ({'|'.join(lengths)})\b", r"Tensor\1 \2", schema)
    accepted = {**op.dtypes, **dict.fromkeys(lengths, dtypes)}
    dims = {**op.dims, **{name: f"Lengths{number}" for number, name in enumerate(lengths)}}
    return replace(op, schema=schema, dims=dims, dtypes=accepted, lowerings=lowerings, on_host=frozenset(lengths))
