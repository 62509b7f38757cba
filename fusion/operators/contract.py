"""A target operator as data: schema, plain decomposition, output tensors, and what each chip accepts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch

from fusion._torch.operators import OpOverload
from fusion.errors import OperatorError
from fusion.operators import calling, legality, predicates
from fusion.operators import dims as named_dims
from fusion.operators.limits import CHIPS, HOST, LOWERINGS, Limit


@dataclass(frozen=True, eq=False)
class Operator:
    """One operator that the pass can emit.

    `limits` maps a chip to what its kernel asks for; a chip that is absent does not have the operator. What every
    machine asks for stands under `"host"`. The arguments' dims are read in the order of `dims`.
    """

    schema: str
    """As torch_npu 2.13.0 prints it."""
    compute: Callable[..., Any]
    """The operator in plain aten, of the arguments of the schema that it names; rounds like the A2/A3 kernels.

    With a parameter `given` it takes a mapping of all arguments but those of `uncomputed` and `without_effect`; with
    `put`, which writes rows into a tensor, it returns all results, then every tensor that rows were put into.
    """
    dims: Mapping[str, str]
    """Argument, or several, `"cos sin"` -> named dims, in the notation of `fusion.operators.dims`."""
    dtypes: Mapping[str, frozenset[torch.dtype]]
    """Argument, or several -> dtypes that some chip accepts."""
    limits: Mapping[str, tuple[Limit | str, ...]]
    """Chip -> predicates over dims and attributes, in the notation of `fusion.operators.predicates`."""
    source: str
    """The CANN or op-plugin page, or the kernel source, that the contract was read from."""
    summary: str
    """The formula, in one line."""
    uncomputed: Mapping[str, str] = field(default_factory=dict[str, str])
    """Argument, or several -> why `compute` ignores it: a call in which it differs from its default is refused."""
    without_effect: frozenset[str] = field(default_factory=frozenset[str])
    """Arguments that change no result: hints of the kernel, and those of which limits leave one meaning."""
    outputs: Callable[..., Any] = lambda: ()
    """Empty results, like torch_npu's Meta kernel: shape, dtype, strides; without arguments and what is `copied`."""
    copied: tuple[str, ...] = ()
    """Arguments whose copies, which the operator writes to, are its last results."""
    lowerings: frozenset[str] = frozenset(LOWERINGS)
    """Which of `LOWERINGS` can take the operator (torchair: it has a GE converter)."""
    overwrites: frozenset[str] = field(default_factory=frozenset[str])
    """Arguments that the eager kernel writes into although the schema does not say so: they must be dead afterwards."""
    in_place: str = ""
    """Name of the operator that computes the same into the tensors that this one copies, "" where there is none."""
    runs_default: bool = False
    """Whether this overload is ours, of which a device runs the vendor's default one: that one hides what it writes, or
    is of a package that may define it at any time."""
    older: str = ""
    """Qualified name by which a package older than torch_npu's operator has the same contract, "" for none."""
    older_means: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What that one computes with where it does not name an argument, if that is not the default."""
    flops: Callable[..., float] | None = None
    """Multiplications and additions of a call, of what it names; None where the bytes that it moves decide."""
    unread: Callable[..., float] | None = None
    """Bytes of what a call is given that it does not read, of what it names; None where it reads all."""
    on_host: frozenset[str] = field(default_factory=frozenset[str])
    """Tensors that a launch outside `lowerings` reads on the host: with those there, "eager" takes the operator too."""
    fractal: Callable[..., Mapping[str, bool]] | None = None
    """Arguments whose storage format a call goes by, with whether it reads them in FRACTAL_NZ, of what it names; None
    where no format decides."""
    either: frozenset[str] = field(default_factory=frozenset[str])
    """Weights that the kernel reads in ND, a transposed view too, as well as in FRACTAL_NZ, which it reads faster."""
    empty: frozenset[str] = field(default_factory=frozenset[str])
    """Dims that may be 0: of a tensor that a mode of the operator leaves alone. All others have elements."""
    moves: bool = False
    """True if all floats that the operator gives are elements of its arguments."""
    rounds: str = ""
    """Values that the kernel computes on the way and rounds to float16 beside float16, "" where there are none."""

    def __post_init__(self) -> None:
        """Give each of several names of a row its own; refuse a declaration that speaks of what is not known."""
        for name in ("dims", "dtypes", "uncomputed"):
            object.__setattr__(self, name, _by_name(getattr(self, name)))
        known = frozenset(self.arguments)
        self._require(set(self.limits) - {HOST, *CHIPS}, "chips", (HOST, *CHIPS))
        self._require(self.lowerings - set(LOWERINGS), "lowerings", LOWERINGS)
        named = self._named | {*self.copied, *self.dims, *self.dtypes, *self.uncomputed}
        spoken = named | self.overwrites | self.on_host | self.either | self.without_effect
        self._require(spoken - known, "arguments", tuple(known))
        self._require(self.empty - self._sizes, "dims", tuple(self._sizes))
        self._require_an_answer_for_each_argument()

    def _require_an_answer_for_each_argument(self) -> None:
        """Raise OperatorError unless every argument is one of computed, uncomputed and without effect."""
        answers = [*self.computed, *self.uncomputed, *self.without_effect]
        wrong = [name for name in self.arguments if answers.count(name) != 1]
        if wrong:
            raise OperatorError(
                f"declaring {self.name}: {', '.join(wrong)} must be named by compute, or stand in uncomputed or in "
                "without_effect, and in one of the three alone"
            )

    @cached_property
    def _named(self) -> frozenset[str]:
        """The arguments that compute and outputs name in their signatures."""
        return calling.named(self.compute) | calling.named(self.outputs)

    @cached_property
    def computed(self) -> tuple[str, ...]:
        """The arguments that the decomposition computes, in the order of the schema."""
        if not calling.takes_mapping(self.compute):
            return tuple(name for name in self.arguments if name in self._named)
        left = self.without_effect | self.uncomputed.keys()
        return tuple(name for name in self.arguments if name not in left)

    @cached_property
    def _sizes(self) -> frozenset[str]:
        """The dims that the arguments have."""
        return frozenset[str]().union(*(named_dims.names(text) for text in self.dims.values()))

    def limits_on(self, chip: str) -> tuple[Limit, ...]:
        """What the operator asks for on a chip, or on every machine for `HOST`.

        Raises:
            OperatorError: a limit is not of the grammar, or speaks of what is not known. That is found when limits are
                asked, not where they are declared: to parse them all takes a tenth of a second.
        """
        declared = tuple(Limit(limit) if isinstance(limit, str) else limit for limit in self.limits.get(chip, ()))
        found = (*self._left_at_defaults(), *declared) if chip == HOST else declared
        known = self._sizes | self.arguments.keys()
        for limit in found:
            spoken = predicates.names(limit.text) | predicates.names(limit.when or "True")
            self._require(spoken - known, f"names in the limit {limit.text!r}", tuple(known))
        return found

    def _left_at_defaults(self) -> Iterator[Limit]:
        """Yield the limits that hold uncomputed arguments at their defaults."""
        for name, because in self.uncomputed.items():
            default = self.default(name)
            yield Limit(f"not given({name})" if default is None else f"{name} == {default!r}", because=because)

    def default(self, name: str) -> Any:
        """Return the default of the argument `name`; None if it has none, lists as tuples."""
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
        """The operator in plain aten, with the arguments of the schema.

        Raises:
            OperatorError: the decomposition does not compute the call; the text names the argument.
        """
        explain = partial(legality.without_elements, self)
        return calling.fallback(self.schema, self.compute, self.copied, self._admitted, explain)

    @cached_property
    def meta(self) -> Callable[..., Any]:
        """Empty results, with the arguments of the schema.

        Raises:
            OperatorError: the decomposition does not compute the call; the text names the argument.
        """
        return calling.meta(self.schema, self.outputs, self.copied, self._admitted)

    def _admitted(self, given: calling.Given) -> calling.Given:
        """Return the arguments of `given` that are computed; raise OperatorError if the call is not."""
        legality.require_decomposed(self, given)
        return {name: given[name] for name in self.computed}

    @property
    def name(self) -> str:
        """Qualified name, `npu::npu_rms_norm`, with the overload after a dot unless it is the default one."""
        overload = self._parsed.overload_name
        return f"{self._parsed.name}.{overload}" if overload else self._parsed.name

    @property
    def namespace(self) -> str:
        """`npu` in `npu::npu_rms_norm`."""
        return self.name.split("::")[0]

    @property
    def short(self) -> str:
        """`npu_rms_norm` in `npu::npu_rms_norm`."""
        return self.name.split("::")[1]

    @cached_property
    def arguments(self) -> Mapping[str, Any]:
        """Name -> argument of the schema, in the order of the schema."""
        return {argument.name: argument for argument in self._parsed.arguments}

    @cached_property
    def written(self) -> tuple[str, ...]:
        """Arguments that the schema says are written to, in its order."""
        return tuple(name for name, each in self.arguments.items() if each.alias_info and each.alias_info.is_write)

    def work(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
        """The `flops` of a call, 0 where there are none."""
        return self._flops(self.bind(args, kwargs))

    def left(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
        """The `unread` of a call, 0 where there is none."""
        return self._unread(self.bind(args, kwargs))

    def formats(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, bool]:
        """The `fractal` arguments of a call, none where no format decides."""
        return {} if self.fractal is None else calling.by_name(self.fractal)(self.bind(args, kwargs))

    @cached_property
    def _unread(self) -> Callable[..., float]:
        return calling.by_name(self.unread or (lambda: 0.0))

    @cached_property
    def _flops(self) -> Callable[..., float]:
        return calling.by_name(self.flops or (lambda: 0.0))

    def overload(self) -> OpOverload:
        """The dispatcher's operator; `OperatorError` before `ensure()` has registered it."""
        name, _, overload = self.short.partition(".")
        packet = getattr(getattr(torch.ops, self.namespace), name, None)
        found = getattr(packet, overload or "default", None)
        if found is None:
            raise OperatorError(f"looking up {self.name}: it is not registered; call fusion.operators.ensure() first")
        return found

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Argument -> value of a call, defaults included; `OperatorError` when the call does not fit the schema."""
        positional = [name for name, argument in self.arguments.items() if not argument.kwarg_only]
        given = dict(zip(positional, args, strict=False)) | dict(kwargs)
        values = {n: calling.coded(given.get(n, argument.default_value)) for n, argument in self.arguments.items()}
        missing = [n for n, a in self.arguments.items() if n not in given and not a.has_default_value()]
        surplus = set(kwargs) - set(self.arguments) | set(kwargs).intersection(positional[: len(args)])
        if missing or surplus or len(args) > len(positional):
            wrong = ", ".join([*missing, *sorted(surplus)]) or f"{len(args)} positional arguments"
            raise OperatorError(f"calling {self.schema}: {wrong} missing or not expected; pass what the schema names")
        return values


def _by_name(rows: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row for several, row in rows.items() for name in several.split()}


def functional(op: Operator, name: str, summary: str, lowerings: frozenset[str] = frozenset()) -> Operator:
    """The operator `name`, which gives copies of what `op` writes, and runs as `op` wherever it can."""
    schema = calling.functional_schema(op.schema, name)
    said = {"schema": schema, "summary": summary, "lowerings": lowerings}
    return replace(op, copied=op.written, in_place=op.name, runs_default=False, older="", **said)


def in_tensors(
    op: Operator, lengths: tuple[str, ...], dtypes: frozenset[torch.dtype], lowerings: frozenset[str]
) -> Operator:
    """An overload of ours that takes in tensors what `op` takes in `lengths`."""
    schema = op.schema.replace("(", ".tensor_lengths(", 1)
    schema = re.sub(rf"SymInt\[\](\??) ({'|'.join(lengths)})\b", r"Tensor\1 \2", schema)
    accepted = {**op.dtypes, **dict.fromkeys(lengths, dtypes)}
    dims = {**op.dims, **{name: f"Lengths{number}" for number, name in enumerate(lengths)}}
    return replace(op, schema=schema, dims=dims, dtypes=accepted, lowerings=lowerings, on_host=frozenset(lengths))
