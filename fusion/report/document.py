"""The document of a report: everything that its text, its JSON and its HTML page say, as frozen records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fusion.errors import Failure
from fusion.report.trace import Call, Line


@dataclass(frozen=True)
class Cost:
    """Launches on data, and their predicted microseconds."""

    launches: int = 0
    us: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.launches + other.launches, self.us + other.us)


@dataclass(frozen=True)
class Origin:
    """Lines of one module, in the order of the file.

    Attributes:
        module: path of the module, layers folded.
        lines: the lines.
    """

    module: str
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Rewrite:
    """Equal rewrites of one rule in equal layers.

    Attributes:
        rule: name of the rule.
        lowering: name of the lowering.
        calls: the fused operators that it calls, with their number; the operators of PyTorch where it calls none.
        replaced: number of replaced launches by operator, in one layer.
        module: path of the module of the first result, layers folded.
        times: number of rewrites.
        origins: the lines that became the calls.
        saved: launches and microseconds that all of them save.
        remark: the rule's remark on the choice, or "".
        roots: names of the rewrites in the traces.
    """

    rule: str
    lowering: str
    calls: Mapping[str, int]
    replaced: Mapping[str, int]
    module: str
    times: int
    origins: tuple[Origin, ...]
    saved: Cost
    remark: str = ""
    roots: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Left:
    """Equal launches that no rewrite replaced, in equal layers.

    Attributes:
        op: the operator.
        module: path of the module, layers folded.
        times: number of launches.
        line: line of the model; None where nothing is recorded.
        us: predicted microseconds of all of them.
        bytes: bytes that all of them move.
        rule: rule that would fuse them, if a refusal names one.
        reason: reason of that refusal; "" where none is known.
        made_by: rule whose rewrite made the launch; "" for one of the model.
        copies: the inputs that they copy or copy to, such as caches.
        names: names of the calls in the traces.
    """

    op: str
    module: str
    times: int
    line: Line | None
    us: float
    bytes: float
    rule: str = ""
    reason: str = ""
    made_by: str = ""
    copies: tuple[str, ...] = ()
    names: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Copied:
    """Equal copies of inputs at every call, in equal layers.

    Attributes:
        kind: "weight", "state" (such as a cache) or "input".
        op: the operator that copies.
        inputs: names of the inputs.
        module: path of the module, layers folded.
        times: number of copies.
        line: line of the model; None where nothing is recorded.
        us: predicted microseconds of all of them.
        bytes: bytes that all of them move.
        cure: what was found, and what avoids the copies.
    """

    kind: str
    op: str
    inputs: tuple[str, ...]
    module: str
    times: int
    line: Line | None
    us: float
    bytes: float
    cure: str


@dataclass(frozen=True)
class Change:
    """A fusion that was refused with one reason in equal layers: something to change in the model.

    Attributes:
        rule: name of the rule; "" where no installed rule would fuse the place.
        op: operator at which it was refused.
        reason: the reason.
        target: the other target whose limit refused; "" for that of the report.
        module: path of the module, layers folded.
        times: number of places.
        line: line to blame, of the first place.
        launches: launches that stay at all places.
        us: predicted microseconds that the fusion would save at all places.
        is_planned: True if `us` is that of a planned lowering, else it is an upper bound.
        fused_otherwise: True if another rewrite fused the place.
        is_mendable: True unless no change of the model makes the fusion.
        names: names of the launches that stay, in the traces.
    """

    rule: str
    op: str
    reason: str
    target: str
    module: str
    times: int
    line: Line | None
    launches: int
    us: float
    is_planned: bool
    fused_otherwise: bool
    is_mendable: bool = True
    names: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Module:
    """Costs of a module with its submodules, before and after, summed over equal layers.

    Attributes:
        path: its path, layers folded; "" for code outside of modules.
        name: its name in the module around it.
        depth: number of modules around it.
        times: number of modules.
        before: costs of its calls before; replaced calls count for the module of the first result.
        after: costs of its calls after.
        bookkeeping: its calls after on positions, masks and counts alone.
        modules: paths of the modules and submodules.
    """

    path: str
    name: str
    depth: int
    times: int
    before: Cost
    after: Cost
    bookkeeping: int
    modules: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Layers:
    """Equal layers.

    Attributes:
        path: their common path, `model.layers.1-59`.
        numbers: their numbers as ranges.
        times: number of layers.
        before: mean costs of one layer before.
        after: mean costs of one layer after.
        usual: numbers of the most frequent layers with the same stem; "" for these themselves.
        differences: launches after that one of those layers has not, "+OP in MODULE", or has more, "-OP in MODULE".
        first: path of the first of them.
    """

    path: str
    numbers: str
    times: int
    before: Cost
    after: Cost
    usual: str
    differences: tuple[str, ...]
    first: str


@dataclass(frozen=True)
class Scope:
    """Calls of one of several equal layers, or those outside of layers, before and after.

    Attributes:
        path: path of the layers, folded; "" for calls outside of layers.
        times: number of layers.
        before: the calls before.
        after: the calls after.
    """

    path: str
    times: int
    before: tuple[Call, ...]
    after: tuple[Call, ...]


@dataclass(frozen=True)
class Stored:
    """Prepared tensors that are stored for one reason: their number and additional bytes."""

    how: str
    tensors: int
    bytes: int


@dataclass(frozen=True)
class Memory:
    """Memory of prepared weights.

    Attributes:
        stored: the tensors by reason.
        bytes: additional bytes.
        parameter_bytes: bytes of the Parameters that the graphs read.
        not_prepared: tensors that are not prepared, and the reasons.
        is_stale_after_data: True if writes through `.data` are not seen by copies on a device.
    """

    stored: tuple[Stored, ...]
    bytes: int
    parameter_bytes: int
    not_prepared: tuple[str, ...]
    is_stale_after_data: bool


@dataclass(frozen=True)
class Break:
    """Place at which Python leaves the graphs: its code is in none of them.

    Attributes:
        where: `file:line` in the model's code; the first line of a function that is not traced.
        reason: the reason, in one line.
        function: the name of a function that is not traced, although its callees are; "" for a break between graphs.
    """

    where: str
    reason: str
    function: str = ""


@dataclass(frozen=True)
class Interruption:
    """Error of the model, or of tracing it, which ended the tracing.

    Attributes:
        error: type and message, in one line.
        where: `file:line` in the model's code.
        advice: advice to the user, or "".
        traceback: the traceback as Python prints it.
    """

    error: str
    where: str
    advice: str = ""
    traceback: str = field(default="", repr=False)

    def __str__(self) -> str:
        parts = self.error, f"at {self.where}" * bool(self.where), f"({self.advice})" * bool(self.advice)
        return " ".join(filter(None, parts))


@dataclass(frozen=True)
class Expected:
    """Equal regions of the model in which its author expects a fusion, see `fusion.region`.

    Attributes:
        rule: the rule that is expected to fuse.
        name: name of the function or class that is a region, or "with" for a `with` block.
        where: `file:line` of the first call in it.
        times: number of regions.
        is_met: True if the rule fused calls of the regions.
        state: the fusions in them, and the first reason why the rule is not one of them.
    """

    rule: str
    name: str
    where: str
    times: int
    is_met: bool
    state: str


@dataclass(frozen=True)
class Document:
    """Content of a report.

    Attributes:
        model: name of the class or function that was traced; "" if it is not known.
        target: name of the target.
        graphs: number of graphs.
        before: cost of all calls before.
        after: cost of all calls after.
        ops: number of emitted operators by qualified name.
        packages: package of each operator in `ops` that torch_npu does not have.
        changes: refused fusions, those first that would save most.
        hidden: number of refusals that are left out, because their places fused otherwise.
        rewrites: the rewrites, those first that save most.
        left: launches that stay, those first that take longest.
        copied: copies of caches, states, weights and other inputs among them, by the compiler that is planned for.
        modules: costs by module, each before its submodules.
        layers: equal layers.
        scopes: calls by layer.
        expected: the regions in which a fusion is expected.
        assumptions: kind of mask that rewrites rely on, by the path of the argument.
        guesses: number of values that Python read from data, by `file:line`.
        breaks: places at which Python leaves the graphs.
        interruption: the error that ended the call before all of it was traced.
        notes: remarks on the call that was traced.
        failures: errors in the pass, each with the number of its graph.
        memory: memory of prepared weights.
        result_copies: copies per call that give results the strides that they have in the model.
        host_reads: times that a call waits for the device to read lengths.
    """

    model: str
    target: str
    graphs: int
    before: Cost
    after: Cost
    ops: Mapping[str, int]
    packages: Mapping[str, str]
    changes: tuple[Change, ...]
    hidden: int
    rewrites: tuple[Rewrite, ...]
    left: tuple[Left, ...]
    copied: tuple[Copied, ...]
    modules: tuple[Module, ...]
    layers: tuple[Layers, ...]
    scopes: tuple[Scope, ...]
    expected: tuple[Expected, ...]
    assumptions: Mapping[str, str]
    guesses: Mapping[str, int]
    breaks: tuple[Break, ...]
    interruption: Interruption | None
    notes: tuple[str, ...]
    failures: tuple[tuple[int, Failure], ...]
    memory: Memory
    result_copies: int
    host_reads: int
