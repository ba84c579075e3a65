"""After a trace on fake tensors, everything is as before: compared by a picture of all that can be reached."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
import gc
import os
import queue
import random
import signal
import types
import warnings
import weakref
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from nearpeak.errors import UsageError
from nearpeak.profiling.estimate import estimate
from nearpeak.trace.fake import fake
from nearpeak.trace.state_snapshot import StateSnapshot
from nearpeak.trace.trace import trace

GLOBAL_CACHE: dict[str, object] = {}
GLOBAL_LIST: list[object] = []
global_count = 0
WEAK: weakref.WeakKeyDictionary[object, object] = weakref.WeakKeyDictionary()
CONTEXT: contextvars.ContextVar[object] = contextvars.ContextVar("CONTEXT", default=None)


@functools.lru_cache
def positions(size: int) -> torch.Tensor:
    return torch.arange(size)


@dataclass
class Settings:
    count: int = 0
    names: list[str] = field(default_factory=list)


class Slotted:
    __slots__ = ("count", "late")

    def __init__(self) -> None:
        self.count = 0


class Config(dict):
    """A dict with attributes of its own."""


class Net(nn.Module):
    made = 0
    shared: dict[str, object] = {}  # noqa: RUF012 - the point of it

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight  # tied
        self.register_buffer("seen", torch.zeros(4))
        self.history: list[object] = []
        self.alias = self.history
        self.table: dict[str, object] = {"b": 1, "a": [2]}
        self.queue: deque[object] = deque([1, 2], maxlen=2)
        self.names, self.counts = {"x"}, Counter("ab")
        self.config, self.slotted = Config(width=4), Slotted()
        self.array, self.generator = numpy.zeros(3), torch.Generator().manual_seed(5)
        self.random, self.numpy_random = random.Random(3), numpy.random.default_rng(3)
        self.batches = iter([1, 2, 3])
        self.behaviors: tuple[str, ...] = ()
        self.ending = "return"

    def forward(self, x: torch.Tensor, state: dict[str, object] | None = None) -> torch.Tensor:
        x = self.second(self.first(x).relu())
        for name in self.behaviors:
            with contextlib.suppress(Exception):  # of one behavior after another, such as a hook on what is frozen
                BEHAVIORS[name](self, x, state)
        return ENDINGS[self.ending](x)


BEHAVIORS = {}


def behavior(function):
    BEHAVIORS[function.__name__] = function
    return function


@behavior
def append_to_a_list(net, x, state):
    net.history.append(x)


@behavior
def replace_a_list(net, x, state):
    net.history = [x]


@behavior
def change_a_nested_container(net, x, state):
    net.table["a"].append(x)
    net.table["b"] = net.table.pop("b")  # another order
    net.table[x] = x


@behavior
def change_other_containers(net, x, state):
    net.queue.append(x)
    net.names.add(x)
    net.counts["a"] += 1
    net.config["x"] = x
    net.config.last = x


@behavior
def change_objects(net, x, state):
    net.slotted.count += 1
    net.slotted.late = x
    net.array[1] = 7.0
    net.last = x
    del net.alias


@behavior
def register_hooks(net, x, state):
    net.first.register_forward_hook(lambda module, args, out: out + 1)
    net.first.register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)
    net.second.register_full_backward_hook(lambda *args: None)
    net.second.register_forward_hook(lambda *args: None, always_call=True)
    net.register_state_dict_post_hook(lambda *args: None)
    net.register_load_state_dict_pre_hook(lambda *args: None)
    net.first.bias.register_hook(lambda gradient: gradient)
    net.first.bias.register_post_accumulate_grad_hook(lambda parameter: None)


@behavior
def hook_all_modules(net, x, state):
    nn.modules.module.register_module_forward_hook(lambda *args: None)


@behavior
def change_a_buffer(net, x, state):
    net.seen.add_(1.0)
    net.seen += x.sum()  # from a tensor with a gradient
    net.register_buffer("late", x.detach())


@behavior
def change_modules(net, x, state):
    net.first = nn.Linear(4, 4)
    net.third = nn.ReLU()
    del net.second
    net.add_module("second", nn.Identity())


@behavior
def change_parameters(net, x, state):
    net.first.weight = nn.Parameter(torch.zeros(4, 4))
    net.eval()
    for parameter in net.parameters():
        parameter.requires_grad_(False)
        parameter.mark = "changed"


@behavior
def change_a_class(net, x, state):
    Net.made += 1
    Net.shared["x"] = x
    Net.extra = x
    net.__class__ = type("Other", (Net,), {})


@behavior
def parametrize(net, x, state):
    torch.nn.utils.parametrizations.weight_norm(net.first, dim=0)


@behavior
def accumulate_gradients(net, x, state):
    if x.requires_grad:
        x.sum().backward(retain_graph=True)


@behavior
def change_the_argument(net, x, state):
    if state is not None:
        state["steps"].append(x)
        state["settings"].count += 1
        state["settings"].names.append("x")
        state["late"] = x


@behavior
def write_globals(net, x, state):
    global global_count
    global_count += 1
    GLOBAL_LIST.append(x)
    GLOBAL_CACHE["x"] = x
    positions(5)


@behavior
def draw_random_numbers(net, x, state):
    torch.rand(3, generator=net.generator)
    torch.manual_seed(8)
    random.random(), numpy.random.rand()
    net.random.random(), net.numpy_random.random()


@behavior
def change_settings(net, x, state):
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_anomaly_enabled(True)
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
    torch.set_float32_matmul_precision("medium")
    torch.set_autocast_enabled("cpu", True)
    torch.set_default_device("meta")
    os.environ["NEARPEAK_TEST_OF_STATE"] = "1"
    warnings.simplefilter("ignore", ResourceWarning)
    gc.disable()


@behavior
def fill_weak_and_context_variables(net, x, state):
    WEAK[net] = x
    CONTEXT.set(x)


@behavior
def take_from_an_iterator(net, x, state):
    next(net.batches, None)


@behavior
def count_on_a_function(net, x, state):
    count_on_a_function.calls = getattr(count_on_a_function, "calls", 0) + 1


ENDINGS = {
    "return": lambda x: x,
    "error": lambda x: {}["missing"],
    "interrupt": lambda x: signal.raise_signal(signal.SIGINT),
    "exit": lambda x: exit(3),
    "value": lambda x: x.sum().item(),
}
ERRORS = {"error": KeyError, "interrupt": KeyboardInterrupt, "exit": SystemExit}


def picture(*roots: object) -> list[object]:
    """Everything that can be reached, in order: contents of containers by identity, plain values as they are."""
    shown: list[object] = []
    numbers: dict[int, int] = {}
    alive: list[object] = []

    def number(value: object) -> object:
        if isinstance(value, (int, float, str, bytes, type(None), torch.dtype, torch.device)):
            return value
        if id(value) not in numbers:
            numbers[id(value)] = len(numbers)
            alive.append(value)
            place = len(shown)
            shown.append(None)
            shown[place] = (type(value).__name__, id(value), look(value))
        return numbers[id(value)]

    def look(value: object) -> object:
        fields = vars(value) if hasattr(value, "__dict__") else {}
        attributes = [(key, None if key == "fake_mode" else number(item)) for key, item in fields.items()]
        if isinstance(value, torch.Tensor):
            tensor = (
                *(tuple(value.shape), value.stride(), value.dtype, value.requires_grad, value.is_leaf, value._version),
                *(number(value.grad), number(value._backward_hooks), number(value._post_accumulate_grad_hooks)),
            )
            return tensor, attributes, None if isinstance(value, FakeTensor) else value.detach().numpy().tobytes()
        if isinstance(value, dict):
            return attributes, [(number(key), number(item)) for key, item in value.items()]
        if isinstance(value, (list, tuple, deque)):
            return [number(item) for item in value]
        if isinstance(value, set):
            return sorted(str(number(item)) for item in value)
        if isinstance(value, Slotted):
            return value.count, hasattr(value, "late")
        if isinstance(value, numpy.ndarray):
            return value.tobytes()
        if isinstance(value, random.Random):
            return value.getstate()
        if isinstance(value, numpy.random.Generator):
            return str(value.bit_generator.state)
        if isinstance(value, torch.Generator):
            return value.get_state().tolist()
        if isinstance(value, (types.FunctionType, types.MethodType)):
            return vars(value) if isinstance(value, types.FunctionType) else number(value.__self__)
        if isinstance(value, type):
            return id(value)
        if type(value).__name__ == "list_iterator":
            return value.__length_hint__()
        return attributes, id(type(value))

    for root in roots:
        number(root)
    return shown


def process_state() -> dict[str, object]:
    return {
        "torch": (torch.initial_seed(), torch.get_rng_state().numpy().tobytes()),
        "random": (random.getstate(), str(numpy.random.get_state())),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "modes": (torch.is_grad_enabled(), torch.is_anomaly_enabled(), torch.is_autocast_enabled("cpu")),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": (torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()),
        "threads": torch.get_num_threads(),
        "collector": (gc.isenabled(), gc.get_threshold()),
        "environment": dict(os.environ),
        "warnings": list(warnings.filters),
        "hooks": dict(nn.modules.module._global_forward_hooks),
        "globals": (global_count, list(GLOBAL_LIST), dict(GLOBAL_CACHE), positions.cache_info().currsize),
        "class": (Net.made, dict(Net.shared), hasattr(Net, "extra")),
        "function": vars(count_on_a_function).copy(),
        "variables": (dict(WEAK), CONTEXT.get()),
    }


def assert_same(after: tuple[list[object], dict[str, object]], before: tuple[list[object], dict[str, object]]) -> None:
    assert {name: value for name, value in after[1].items() if value != before[1][name]} == {}
    assert [new for new, old in zip(after[0], before[0], strict=False) if new != old] == []
    assert len(after[0]) == len(before[0])


@pytest.mark.slow
@settings(max_examples=40)
@given(
    names=st.lists(st.sampled_from(sorted(BEHAVIORS)), min_size=1, max_size=6, unique=True),
    ending=st.sampled_from(sorted(ENDINGS)),
    trains=st.booleans(),
    built_fake=st.booleans(),
)
def test_any_behavior_leaves_everything_as_before(names, ending, trains, built_fake):
    positions.cache_clear()
    if built_fake:
        with fake():
            net, x = Net(), torch.empty(2, 4)
    else:
        net, x = Net(), torch.ones(2, 4)
    net.behaviors, net.ending = tuple(names), ending
    optimizer = torch.optim.AdamW(net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = {"steps": [1], "settings": Settings()}
    losses: list[object] = []
    count = 0

    def step(x):
        nonlocal count
        count += 1
        losses.append(net(x, state))
        if trains and torch.is_grad_enabled() and getattr(losses[-1], "requires_grad", False):
            losses[-1].sum().backward()
            optimizer.step()
            scheduler.step()

    before = picture(net, optimizer, scheduler, state, losses), process_state()
    with pytest.raises(ERRORS[ending]) if ending in ERRORS else contextlib.nullcontext():
        trace(step, x)
    after = picture(net, optimizer, scheduler, state, losses), process_state()
    assert_same(after, before)
    assert count == 0


@pytest.mark.parametrize("name", sorted(BEHAVIORS))
def test_a_second_trace_is_the_same(name):
    net = Net()
    net.behaviors = (name,)
    state = {"steps": [1], "settings": Settings()}
    before = picture(net, state), process_state()
    first, second = (trace(net, torch.ones(2, 4), state) for _ in range(2))
    assert_same((picture(net, state), process_state()), before)
    assert [(op.name, op.inputs, op.outputs) for op in first.ops] == [
        (op.name, op.inputs, op.outputs) for op in second.ops
    ]


def test_no_fake_tensor_is_left():
    def alive():
        gc.collect()
        return sum(type(value) is FakeTensor for value in gc.get_objects())

    net = Net()
    net.behaviors = tuple(
        name for name in BEHAVIORS if name not in ("change_settings", "fill_weak_and_context_variables")
    )
    optimizer = torch.optim.AdamW(net.parameters())

    def step(x):
        with torch.autocast("cpu", torch.bfloat16):
            y = net(x)
        if isinstance(y, torch.Tensor) and y.requires_grad:
            y.sum().backward()
            optimizer.step()
        if net.ending == "error":
            raise KeyError

    trace(step, torch.ones(2, 4))
    before = alive()
    for net.ending in ("return", "error", "value"):
        with contextlib.suppress(KeyError, UsageError):
            estimate(step, torch.ones(2, 4), on="h100-sxm")
    assert alive() <= before


def test_the_limit_of_ops():
    net = Net()
    net.behaviors = tuple(BEHAVIORS)
    before = picture(net), process_state()
    assert trace(net, torch.ones(2, 4), limit=3).truncated
    assert_same((picture(net), process_state()), before)


class HooksAtFirstCall(nn.Module):
    """Collects the outputs of its layers by hooks that its first call registers, and remembers that it did."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        collected = []
        if not hasattr(self, "hooked"):
            self.hooked = True
            for layer in self.layers:
                layer.register_forward_hook(lambda module, args, output: self.collected.append(output))
        self.collected = collected
        for layer in self.layers:
            x = layer(x)
        return x, tuple(collected)


def test_a_model_that_hooks_itself_returns_what_it_did():
    model = HooksAtFirstCall()
    first, second = (estimate(model, torch.ones(2, 4), on="h100-sxm") for _ in range(2))
    assert [op.name for op in first.ops] == [op.name for op in second.ops]
    assert not any(layer._forward_hooks for layer in model.layers)
    assert len(model(torch.ones(2, 4))[1]) == 3
    estimate(model, torch.ones(2, 4), on="h100-sxm")
    assert len(model(torch.ones(2, 4))[1]) == 3


def test_a_lazy_module_stays_lazy():
    model = nn.Sequential(nn.LazyLinear(3), nn.ReLU())
    modules, parameters = list(model._modules.items()), list(model[0]._parameters.items())
    hooks = {name: list(value) for name, value in vars(model[0]).items() if "hooks" in name}
    recorded = trace(model, torch.ones(2, 4))
    assert [op.tensor("mat2").shape for op in recorded.ops if op.name == "aten.addmm.default"] == [(4, 3)]
    assert type(model[0]) is nn.LazyLinear and nn.parameter.is_lazy(model[0].weight)
    assert (list(model._modules.items()), list(model[0]._parameters.items())) == (modules, parameters)
    assert {name: list(value) for name, value in vars(model[0]).items() if "hooks" in name} == hooks
    assert model(torch.ones(2, 4)).shape == (2, 3)


def test_data_that_were_replaced_are_real_again():
    average, model = nn.Linear(4, 4), nn.Linear(4, 4)
    before = [parameter.clone() for parameter in average.parameters()]

    def step(x):
        for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
            mean.data = 0.9 * mean.data + 0.1 * parameter.data
        return average(x), model.double()(x.double())

    first, second = (trace(step, torch.ones(2, 4)) for _ in range(2))
    assert [op.name for op in first.ops] == [op.name for op in second.ops]
    assert all(torch.equal(old, new) for old, new in zip(before, average.parameters(), strict=True))
    assert model.weight.dtype is torch.float32 and model(torch.ones(2, 4)).isfinite().all()


def test_a_lazy_module_that_is_not_called_does_not_matter():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.LazyLinear(3)

        def forward(self, x):
            return self.used(x)

    assert "aten.addmm.default" in [op.name for op in trace(Model(), torch.ones(2, 4)).ops]


def test_modules_first_imported_in_a_trace_have_real_tensors(tmp_path, monkeypatch):
    (tmp_path / "late_table.py").write_text("import torch\nTABLE = torch.arange(4.0) * 2\n")
    monkeypatch.syspath_prepend(tmp_path)

    def function(x):
        import late_table

        return x + late_table.TABLE

    recorded = trace(function, torch.ones(4))
    assert [op.name for op in recorded.ops] == ["aten.add.Tensor"]
    assert function(torch.ones(4)).tolist() == [1.0, 3.0, 5.0, 7.0]


def test_cached_results_of_a_trace_are_forgotten():
    positions.cache_clear()
    before = positions(3)
    trace(lambda x: x + positions(4), torch.ones(4))
    assert type(positions(4)) is torch.Tensor
    trace(lambda x: x + positions(3), torch.ones(3))
    positions(3)
    assert positions(3).tolist() == before.tolist()


def test_fake_models_keep_their_shapes():
    with fake():
        x = torch.empty(2, 3)
    trace(lambda x: x.t_().resize_(7), x)
    assert x.shape == (2, 3) and x.stride() == (3, 1)


def test_objects_of_other_threads_are_left_alone():
    import threading

    class Loader:
        def __init__(self):
            self.thread, self.position = threading.Thread(target=int), 0

    loader = Loader()

    def step(x):
        loader.position += 1
        return x + 1

    trace(step, torch.ones(2))
    assert loader.position == 1


def test_shapes_that_a_library_infers_on_fake_tensors_are_no_ops_of_the_call():
    known = queue.SimpleQueue()  # which a trace does not put back, as it does not those of libraries

    def step(x):
        if known.empty():
            with torch._guards.detect_fake_mode():
                known.put((torch.empty(4, 4) @ torch.empty(4, 4)).shape)
        return x @ x

    first, second = (trace(step, torch.ones(4, 4)) for _ in range(2))
    assert [op.name for op in first.ops] == [op.name for op in second.ops] == ["aten.mm.default"]


@dataclass(eq=False)
class Hostile:
    """Answers every question with an error."""

    value: int = 0

    def __getattr__(self, name):
        raise ValueError(name)

    def __eq__(self, other):
        raise ValueError

    def __hash__(self):
        raise ValueError

    def __bool__(self):
        raise ValueError

    def __len__(self):
        raise ValueError

    @property
    def __class__(self):
        raise ValueError


class HostileModule(nn.Linear):
    """A module that does not tell what it consists of, nor lets itself be copied."""

    def named_modules(self, *args, **kwargs):
        raise ValueError

    modules = children = named_children = parameters = named_parameters = buffers = named_buffers = named_modules
    __deepcopy__ = __reduce__ = named_modules


def test_objects_that_answer_with_errors():
    hostile, model = Hostile(), nn.Sequential(HostileModule(4, 4))
    model.notes = [hostile]

    def step(x, given):
        hostile.value += 1
        return model(x), hostile

    for _ in range(2):
        assert "aten.addmm.default" in [op.name for op in estimate(step, torch.ones(2, 4), hostile, on="h100-sxm").ops]
    assert vars(hostile) == {"value": 0}


class Wrapper(torch.Tensor):
    """A tensor made of another, without the methods that torch flattens it by."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = torch.utils._pytree.tree_map_only(Wrapper, lambda tensor: tensor.inner, (args, kwargs or {}))
        return func(*args, **kwargs)


class Named(torch.Tensor):
    pass


SQUARE = torch.ones(4, 4)


@pytest.mark.parametrize(
    ("function", "make"),
    [
        (lambda x: x + 1, lambda: Wrapper(SQUARE)),
        (lambda x: (x @ x).relu(), lambda: SQUARE.as_subclass(Named)),
        (lambda x: x @ SQUARE, lambda: nn.Parameter(SQUARE.as_subclass(Named))),
        (lambda x: torch.sparse.mm(x, SQUARE), lambda: SQUARE.to_sparse()),
        (lambda x: x @ SQUARE, lambda: SQUARE.to_sparse_csr()),
        (lambda x: (x.conj() @ x).abs(), lambda: SQUARE.to(torch.complex64)),
        (lambda x: x @ x, lambda: SQUARE.to("meta")),
        (lambda x: x.dequantize(), lambda: torch.quantize_per_tensor(SQUARE, 0.1, 0, torch.qint8)),
        (lambda x: x + 1, lambda: torch.nested.nested_tensor([SQUARE, SQUARE[:2]])),
        (lambda x: x * 2, lambda: torch.nested.nested_tensor([SQUARE, SQUARE[:2]], layout=torch.jagged)),
        (nn.Linear(4, 4), lambda: torch.nested.nested_tensor([SQUARE, SQUARE[:2]])),
        (lambda x: f"{x.sum():.2f}", lambda: SQUARE),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR tensor support")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_every_kind_of_tensor_is_traced_or_refused(function, make):
    tensor = make()
    kind, attributes = type(tensor), [(name, id(value)) for name, value in vars(tensor).items()]
    for _ in range(2):
        try:
            assert estimate(function, tensor, on="h100-sxm").ops
        except UsageError as error:
            assert "live=True" in str(error)
    assert type(tensor) is kind
    assert [(name, id(value)) for name, value in vars(tensor).items()] == attributes


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda x: x @ torch.ones(3, 3), RuntimeError),
        (lambda x: x[7], IndexError),
        (lambda x: x + "a", TypeError),
        (lambda x: x.nothing, AttributeError),
        (lambda x: undefined, NameError),  # noqa: F821 - the point of it
    ],
)
def test_errors_of_the_code_are_its_own(function, kind):
    with pytest.raises(kind) as raised:
        estimate(function, torch.ones(4, 4), on="h100-sxm")
    assert type(raised.value) is kind


def averaged(model, optimizer, held):
    """Keeps a copy of the model, made in the first step."""

    def step(x):
        if "average" not in held:
            held["average"] = copy.deepcopy(model)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mean, parameter in zip(held["average"].parameters(), model.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)

    return step


def delayed(model, optimizer, held):
    """Differentiates the loss of the step before."""
    held["loss"] = model(torch.ones(4, 4)).square().mean()

    def step(x):
        held["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        held["loss"] = model(x).square().mean()

    return step


def regrouped(model, optimizer, held):
    """Trains more and more slowly, and the last layer from the second step on."""
    optimizer.param_groups[0]["params"] = list(model[0].parameters())

    def step(x):
        if len(optimizer.param_groups) == 1 and held.setdefault("steps", 0):
            optimizer.add_param_group({"params": list(model[2].parameters())})
        held["steps"] += 1
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize("make", [averaged, delayed, regrouped])
def test_a_program_goes_on_as_without_an_estimate(make):
    def weights(estimates):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Dropout(0.5))
        held = {"steps": 0} if make is regrouped else {}
        step = make(model, torch.optim.Adam(model.parameters(), lr=0.01), held)
        for index in range(3):
            for _ in range(estimates):
                estimate(step, torch.ones(4, 4), on="h100-sxm")
            step(torch.full((4, 4), float(index + 1)))
        return [tensor.clone() for tensor in model.state_dict().values()]

    assert all(torch.equal(a, b) for a, b in zip(weights(0), weights(2), strict=True))


def test_a_test_is_looked_at_and_not_the_session_that_runs_it(request):
    """An assertion names pytest's own module, from which everything that was collected can be reached."""

    def step(x):
        assert x.sum() < 3
        GLOBAL_LIST.append(request.node)
        return x + 1

    snapshot = StateSnapshot()
    snapshot.meet(step)
    met = snapshot._states._met
    assert id(GLOBAL_LIST) in met and id(request) in met
    assert id(request.session.__dict__) not in met and len(met) < 1000


def test_classes_of_the_program_are_not_kept():
    def estimated(attributes):
        kind = type("Kind", (), attributes)
        held = kind()
        held.factor = torch.ones(2)
        estimate(lambda: held.factor * 2, on="h200-sxm")
        return weakref.ref(kind)

    kinds = [estimated({}), estimated({"__slots__": ("factor",)})]
    gc.collect()
    assert [kind() for kind in kinds] == [None, None]
