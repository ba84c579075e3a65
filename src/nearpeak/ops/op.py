"""`Op` and `Trace`: executed operations as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

from nearpeak.ops.fast_init import fast_init
from nearpeak.ops.graph import GraphReplay
from nearpeak.ops.lifetimes import Lifetimes
from nearpeak.ops.tensor import Tensor

Phase = Literal["forward", "backward", "optimizer"]
StorageKind = Literal["parameter", "buffer", "input", "intermediate"]
Origin = Literal["torch", "host", "inductor", "triton", "partial", "unknown"]
"""What runs an op: an operator of torch's dispatcher; an operator on tensors in host memory, beside ops on a device; a
kernel that Inductor generated; a Triton kernel that the code launches itself. In a trace file also "partial", an
operator of which the file shows a part, and "unknown", one of which it does not show enough."""

_NAME_PREFIXES: dict[Origin, str] = {
    "host": "host.",
    "inductor": "inductor.",
    "triton": "triton.",
    "partial": "least.",
    "unknown": "unknown.",
}


def name_with_origin(origin: Origin, name: str) -> str:
    """The name of an op that is not an operator of torch's dispatcher.

    >>> name_with_origin("triton", "add_kernel")
    'triton.add_kernel'
    """
    return _NAME_PREFIXES[origin] + name


def origin_of_name(name: str) -> Origin:
    """The origin of an op by its name, for files that have names alone.

    >>> origin_of_name("inductor.triton_poi_fused_add_0"), origin_of_name("aten.add.Tensor")
    ('inductor', 'torch')
    """
    return next((origin for origin, prefix in _NAME_PREFIXES.items() if name.startswith(prefix)), "torch")


def name_without_origin(name: str) -> str:
    """What an op is called where it comes from.

    >>> name_without_origin("least.aten::_fused_adamw_"), name_without_origin("aten.add.Tensor")
    ('aten::_fused_adamw_', 'aten.add.Tensor')
    """
    return name.removeprefix(_NAME_PREFIXES.get(origin_of_name(name), ""))


_GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch", "hipGraphLaunch")


def is_graph_launch(name: str) -> bool:
    """Whether an op, or a call of the runtime, launches a CUDA or HIP graph.

    >>> is_graph_launch("unknown.hipGraphLaunch"), is_graph_launch("aten.add.Tensor")
    (True, False)
    """
    return name_without_origin(name).startswith(_GRAPH_LAUNCHES)


class OpSignature:
    """The identity of an op apart from its storages, its position and its flags.

    The recorder makes these for ops on fake tensors, `classify_ops` for others.
    """

    __slots__ = ("memos",)

    def __init__(self) -> None:
        self.memos: dict[tuple[bool, bool], dict[str, Any]] = {}
        """Memoized facts of ops with this signature, by their flags: see `nearpeak.ops.op_classes`."""


class _HasSignature:
    """Has room for a note: the signature of the op and the numbers of its storages.

    A copy of an op, by `dataclasses.replace` or otherwise, does not have it.
    """

    __slots__ = ("form",)

    form: tuple[OpSignature, tuple[int, ...]]


class Turn(NamedTuple):
    """A turn of a loop of the user's code."""

    loop: str
    """The line of the loop: "train.py:40". Of a loop of torch's own, that of the user's function that it calls."""
    number: int
    """Of the loop: there may be several at one line."""
    run: int
    """The number of this run of the loop, in which no two loops of a trace agree."""
    turn: int
    line: str
    """The line that runs in the function of the loop, or in the function that torch's loop calls."""


@fast_init
@dataclass(frozen=True, slots=True, kw_only=True)
class Op(_HasSignature):
    """One executed operation.

    `arguments` has the arguments by the names of the operator's schema, defaults included: a `Tensor`, a list of them
    as a tuple, a number, a bool, a string (dtypes, layouts and devices are strings: "bfloat16", "cuda"), None, or a
    tuple of those.
    """

    name: str
    """Namespace, operator and overload: "aten.add.Tensor"; of another origin than torch as `name_with_origin` gives."""
    arguments: Mapping[str, Any]
    outputs: tuple[Tensor, ...]
    mutated: tuple[str, ...] = ()
    """Names of the arguments that it writes: `self` of an in-place operator, `out` of an out variant."""
    phase: Phase = "forward"
    module: str = ""
    """Path of the module that ran it: "model.layers.0.mlp"."""
    source: str = ""
    """The line of the user's code, or of an installed package: "train.py:41"."""
    tf32_products: bool = False
    """Whether float32 matrix products ran in tf32, by torch's flags at that moment."""
    tf32_convolutions: bool = True
    recomputed: bool = False
    """Whether it ran a forward again inside a backward pass, as activation checkpointing does; False in a trace file,
    which does not tell."""
    origin: Origin = "torch"
    caller: str = ""
    """Where `source` is of an installed package: the line of the user's own that called the package."""
    turns: tuple[Turn, ...] = ()
    """The loops around it, the outermost first; of a backward op, those around the forward op behind it."""

    @property
    def place(self) -> str:
        """The line of the user's code, or the module if the line is not known."""
        return self.source or self.module

    @property
    def packet(self) -> str:
        """The name without its overload: "aten.add"."""
        return self.name.rpartition(".")[0]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """All tensors among the arguments, in order."""
        tensors: list[Tensor] = []
        for value in self.arguments.values():
            if type(value) is Tensor:
                tensors.append(value)
            elif type(value) is tuple or type(value) is list:
                tensors.extend(_tensors(value))
        return tuple(tensors)

    @property
    def written(self) -> tuple[Tensor, ...]:
        """The tensors that it writes: its results and what it mutates. A resized `out` counts as its result."""
        storages = {tensor.storage for tensor in self.outputs}
        return (*self.outputs, *(tensor for tensor in self.tensors(*self.mutated) if tensor.storage not in storages))

    def tensors(self, *arguments: str) -> tuple[Tensor, ...]:
        """The tensors of these arguments, each a tensor, a list of them, None or absent."""
        return tuple(tensor for name in arguments for tensor in _tensors(self.arguments.get(name)))

    def tensor(self, argument: str) -> Tensor:
        """The tensor that is passed as `argument`; a KeyError or TypeError of ours where it is none."""
        value = self.arguments[argument]
        if not isinstance(value, Tensor):
            raise TypeError(f"{self.name}: the argument {argument!r} is {value!r}, not a tensor")
        return value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """One piece of memory and where it comes from. Whatever is no intermediate exists before the trace."""

    bytes: float
    kind: StorageKind
    name: str = ""
    """Of a parameter or buffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenOptimizer:
    """The class of an optimizer that took a step."""

    name: str
    """As code writes it: "torch.optim.Adam"."""
    options: frozenset[str] = frozenset()
    """Those of "fused" and "foreach" that it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """A batch of sequences that were padded to one length, by the values that were seen."""

    length: int
    """Of every row, padding included."""
    lengths: tuple[int, ...]
    """Those of the rows without their padding, in ascending order."""
    stride: int
    """Between two places of a row, in elements of the storage."""

    @property
    def longest(self) -> int:
        """The length of the longest row without its padding."""
        return self.lengths[-1]

    @property
    def mean(self) -> float:
        """The mean length of the rows without their padding."""
        return sum(self.lengths) / len(self.lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleKeys:
    """The keys of an attention from the first to the last one that a mask shows to any query, of any row."""

    keys: int
    """Of the attention, hidden ones included."""
    first: int
    end: int
    """One past the last."""

    @property
    def count(self) -> int:
        """The number of keys in this range."""
        return self.end - self.first

    @property
    def hidden_share(self) -> float:
        """The share of the keys that is outside of it."""
        return 1 - self.count / self.keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Nonzeros:
    """The elements of a matrix that are not zero, by a sample of its rows."""

    MOST: ClassVar[float] = 0.1
    """With a larger share, products of these elements alone take as long as those of all."""

    share: float
    """Of all elements."""
    per_row: float
    """Their mean number in a row."""
    most_in_row: int
    ones: bool
    """Whether all of them are 1."""

    @property
    def is_one_hot(self) -> bool:
        """Whether no row has more than a single 1."""
        return self.ones and self.most_in_row == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedGradient:
    """A gradient that a backward pass added to a parameter's `grad`."""

    op: int
    """The index of the op that stored or added it."""
    storage: int
    """Of `grad`."""
    leaf: int
    """A number of the parameter, one for all of its gradients."""
    parameter: str
    """The path of the parameter; "" where that is not known."""
    was_none: bool
    """Whether the parameter had no gradient before."""
    is_watched: bool
    """Whether hooks of the parameter may have read it."""
    is_stepped: bool
    """Whether an optimizer that has the parameter took a step while this gradient was there."""
    is_left: bool
    """Whether it is the parameter's gradient when the step ends."""
    optimizer_steps: tuple[int, ...] | None
    """The number of ops before each step of an optimizer that has the parameter; None if no optimizer has it."""


class BackwardPass(NamedTuple):
    """One run of autograd's engine."""

    ops: range
    """The indices of its ops, with those of passes inside of it."""
    stack: tuple[str, ...]
    """The lines of the user's own that began it, the outermost first."""


class StackLine(NamedTuple):
    """A line of the user's own on the stack, and the lines of the function that it is in."""

    line: str
    lines: frozenset[int]

    def is_in_function_of(self, line: str) -> bool:
        """Whether the function has another line, as far as its file and its lines say.

        >>> StackLine("train.py:18", frozenset({16, 18, 19})).is_in_function_of("train.py:19")
        True
        """
        file, _, number = line.rpartition(":")
        return file == self.line.rpartition(":")[0] and number.isdecimal() and int(number) in self.lines


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonStretch:
    """The time from the end of one op to the beginning of the next, in which no op ran on the host."""

    seconds: float
    """In which the thread ran, or waited by its own will: not while another one had its processor."""
    stacks: Mapping[tuple[StackLine, ...], float]
    """For how many seconds each stack was seen: lines of the user's own, the innermost first. () is for torch's own
    code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextStep:
    """The ops of the step after a traced one, on the storages of both."""

    ops: tuple[Op, ...]
    storages: Mapping[int, Storage]
    """Those that are not in the trace; the others are the same memory."""
    dropped: frozenset[int] = frozenset()
    """Storages that the step before it left behind, as in a variable of a loop, and that were freed in this one without
    being read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The ops of a step in order, the storages that they touch, and which storages are its results."""

    ops: tuple[Op, ...]
    storages: Mapping[int, Storage]
    results: frozenset[int] = frozenset()
    """Storages that are still wanted afterwards: returned tensors, gradients, updated parameters and state."""
    truncated: bool = False
    """The trace stopped at its limit; what follows is not in it."""
    guessed_storages: bool = False
    """Storages are not known by identity. A tensor has that of the last one that looks like it, so as much of it may be
    in the cache as can be. Nobody is known to want what an op wrote, all that an op was given may be in the cache
    afterwards, and the cache may be full of what is asked for first."""
    notes: tuple[str, ...] = field(default=())
    lives: Lifetimes | None = None
    """What was in memory during the ops; None where they did not really run here."""
    on_host: frozenset[int] = frozenset()
    """Of ops that really ran: storages in the memory of the host."""
    pinned: frozenset[int] = frozenset()
    """Those among them that the device can reach by itself."""
    graph_recorded: bool = False
    """Of ops that really ran: whether autograd recorded any of a forward, to be able to run it backward."""
    shapes_before: Mapping[int, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    """Of a step whose ops were seen in another one before it: the shapes of arguments that were others then, by the
    index of the op and the name of the argument."""
    steps_since: int = 1
    """How many steps after that one this step came."""
    replays: tuple[GraphReplay, ...] = ()
    """The CUDA graphs that were launched, whose ops are among the ops; in order."""
    optimizers: tuple[SeenOptimizer, ...] = ()
    """Each class once."""
    padding: Mapping[int, Padding] = field(default_factory=dict)
    """Of ops that really ran: batches of sequences with padding, by their storages."""
    calls: tuple[tuple[str, str], ...] = ()
    """The path of each module that was called inside no other one, and the line that called it; in order."""
    python: Mapping[int, PythonStretch] | None = None
    """The longer stretches of Python, by the index of the op after them; None where ops did not really run here."""
    nonzeros: Mapping[int, Nonzeros] = field(default_factory=dict)
    """Of ops that really ran: factors of products and one-hot vectors that are nearly all zeros; by their storages."""
    subnormals: Mapping[int, float] = field(default_factory=dict)
    """Of ops that really ran on a CPU: the share of subnormal numbers in what they read, by storages that have some."""
    counted: Mapping[int, float] = field(default_factory=dict)
    """Of ops that really ran: the share of rows that a loss counts where that is not all, by the storages of targets
    and of losses per row."""
    causal_masks: frozenset[int] = frozenset()
    """Of ops that really ran: the storages of masks of attention that are causal, and one for the whole batch."""
    visible_keys: Mapping[int, VisibleKeys] = field(default_factory=dict)
    """Of ops that really ran: the keys that queries see where a mask hides many from all of them, by the index of an
    attention, or of the softmax in one that is written out. Compiled code is not looked at: its sizes may be fixed."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """The installed packages that files of the ops' lines belong to, by the names of the files."""
    torch_modules: Mapping[str, str] = field(default_factory=dict)
    """The classes of torch's own modules, containers apart, by their paths: {"encoder.cell": "torch.nn.LSTMCell"}."""
    stacks: tuple[tuple[str, ...], ...] = ()
    """Of ops that really ran: for each op the lines of the user's own on the stack, the outermost first. An op of
    autograd has those of the forward op behind it. Without them there are no stacks at all."""
    gradients: tuple[AddedGradient, ...] = ()
    """Of ops that really ran: the gradients that backward passes added to parameters, in order."""
    passes: tuple[BackwardPass, ...] = ()
    """Of ops that really ran: the backward passes, in the order in which they began."""
    derivative_of: Mapping[int, int] = field(default_factory=dict)
    """Of ops that really ran: by the index of an op of a backward pass, the op whose derivative it computes; in a pass
    that differentiates another one, an op of that."""
    contents: Mapping[int, str] = field(default_factory=dict)
    """Of ops that really ran: digests of what storages held that no op wrote, where they were looked at."""
    next_step: NextStep | None = None
    """The step after this one, if it was traced too: it tells what is computed again from the same values."""
    written_at: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Of ops that really ran: lines of the user's own that call a class, such as "DataLoader" or that of an optimizer,
    or set "cudnn.benchmark"; by that name. "collate_fn" is where a data loader's function pads items."""
    settings: tuple[str, ...] = ()
    """Of ops that really ran: settings that slow steps down and were on, by their names in `SLOW_SETTINGS`."""
    graph_nodes: Mapping[int, int] = field(default_factory=dict)
    """In anomaly mode: how many nodes of autograd's graph were made, each with its stack, by the index of their op."""
    stack_s: float = 0.0
    """The time of one of these stacks on the host."""
