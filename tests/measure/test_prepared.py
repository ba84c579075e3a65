import math

import pytest
import torch

from nearpeak.errors import CaseError, NearpeakError
from nearpeak.measure import prepared
from nearpeak.measure.bench import bench
from nearpeak.measure.case import Case
from nearpeak.measure.prepared import PROBE_CALLS, case_errors, device_of, probe_host


def boom(*arguments):
    raise ValueError("no good")


BOOM_LINE = boom.__code__.co_firstlineno + 1


def test_a_sound_case_shows_nothing():
    calls = []

    def call(x):
        calls.append(1)
        return torch.exp(x)

    found = probe_host(Case(call, torch.randn(100)))
    assert 1 + PROBE_CALLS < len(calls) < 100
    assert 0 < found.enqueue_seconds <= found.call_seconds
    assert (found.mutated, found.nonfinite, found.synchronizes, found.kernels) == ((), False, False, None)


def test_a_case_that_raises_at_once_is_reported_with_its_place_and_its_error():
    with pytest.raises(CaseError) as caught:
        probe_host(Case(boom, torch.ones(3)))
    assert str(caught.value) == (
        f"boom raised an error on its first call: ValueError: no good (at {__file__}:{BOOM_LINE})"
    )
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("good_calls", [1, 3])
def test_a_case_that_raises_later_is_reported_so(good_calls):
    calls = []

    def call():
        calls.append(1)
        if len(calls) > good_calls:
            boom()

    with pytest.raises(CaseError, match=r"call raised an error on a repeated call: ValueError: no good \(at "):
        probe_host(Case(call))


def test_a_reset_that_raises_is_reported():
    with pytest.raises(CaseError, match="raised an error on its first call: ValueError: no good"):
        probe_host(Case(torch.exp, torch.ones(3), reset=boom))


def test_the_message_of_bench_names_the_users_line_and_not_one_of_ours():
    with pytest.raises(CaseError) as caught:
        bench(lambda x: x @ boom(x), torch.ones(3, 3), cache="hot")
    assert f"{__file__}:{BOOM_LINE}" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)


def test_running_out_of_memory_is_called_that():
    case = Case(torch.exp, torch.ones(3))
    message = r"exp ran out of memory while it was timed: .* Use smaller inputs"
    with pytest.raises(CaseError, match=message) as caught, case_errors(case.name, "while it was timed"):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_ctrl_c_is_no_error_of_the_case():
    with pytest.raises(KeyboardInterrupt), case_errors(Case(len), "while it was timed"):
        raise KeyboardInterrupt


@pytest.fixture
def memory(monkeypatch):
    """A process whose memory grows by hand."""

    class Memory:
        used, available = 2**30, float(2**36)

    monkeypatch.setattr(prepared.CPU, "allocated_bytes", lambda index: Memory.used)
    monkeypatch.setattr(prepared.CPU, "available_bytes", lambda index: Memory.available)
    return Memory


def test_what_every_call_keeps_is_counted(memory):
    def call():
        memory.used += 2**22

    assert probe_host(Case(call)).memory_growth == 2**22


def test_growth_is_what_every_call_keeps_at_the_least(memory):
    sizes = iter([0, 0, 2**24, 2**22, 2**23])

    def call():
        memory.used += next(sizes, 2**22)

    assert probe_host(Case(call)).memory_growth == 2**22


def test_memory_that_grows_for_a_while_is_not_growth(memory):
    calls = []

    def call():
        calls.append(1)
        memory.used += 2**22 if len(calls) in (3, 4, 9) else 0

    assert probe_host(Case(call)).memory_growth == 0


def test_a_leak_that_hides_behind_what_the_allocator_had_in_store_is_seen(memory):
    calls = []

    def call():
        calls.append(1)
        memory.used += 2**22 if len(calls) > 15 else 0

    assert probe_host(Case(call)).memory_growth == 2**22


def test_what_every_second_call_keeps_counts_half(memory):
    calls = []

    def call():
        calls.append(1)
        memory.used += 2**22 if len(calls) % 2 else 0

    assert probe_host(Case(call)).memory_growth == 2**21


def test_memory_that_is_given_back_is_not_growth(memory):
    def call():
        memory.used -= 2**22

    assert probe_host(Case(call)).memory_growth == 0


def test_a_case_that_would_fill_the_memory_is_refused(memory):
    def hoard():
        memory.used += 2**30

    with pytest.raises(CaseError, match=r"hoard keeps 1024 MiB more with every call; .* Do not append results"):
        probe_host(Case(hoard))


def test_where_the_free_memory_is_unknown_nothing_is_refused(memory):
    memory.available = None

    def hoard():
        memory.used += 2**30

    assert probe_host(Case(hoard)).memory_growth == 2**30


def test_a_real_leak_is_seen(monkeypatch):
    monkeypatch.setattr(prepared.CPU, "available_bytes", lambda index: 1e15)
    kept = []
    size = 40 * 2**20  # above what malloc serves from memory that it has already
    found = probe_host(Case(lambda: kept.append(torch.ones(size // 4))))
    assert found.memory_growth == pytest.approx(size, rel=0.05)


def test_an_input_that_differs_after_every_call_is_seen_by_its_position():
    x, y = torch.randn(100), torch.zeros(100)
    assert probe_host(Case(lambda x, y: y.add_(1), x, y)).mutated == (1,)
    assert probe_host(Case(lambda pair: pair["y"].add_(1), {"x": x, "y": y})).mutated == (1,)


def test_a_change_of_one_value_among_few_is_seen():
    x = torch.zeros(64)

    def call(x):
        x[63] += 1

    assert probe_host(Case(call, x)).mutated == (0,)


def test_writing_the_same_result_again_is_no_change():
    x, out = torch.randn(100), torch.empty(100)
    assert probe_host(Case(lambda x, out: torch.exp(x, out=out), x, out)).mutated == ()
    assert probe_host(Case(lambda x: x.clamp_(0, 1), x)).mutated == ()


def test_what_a_reset_restores_is_no_change():
    x = torch.zeros(100)
    assert probe_host(Case(lambda x: x.add_(1), x, reset=x.zero_)).mutated == ()


def test_an_input_with_nan_that_stays_as_it_is_has_not_changed():
    x = torch.tensor([1.0, math.nan])
    assert probe_host(Case(torch.exp, x)).mutated == ()


@pytest.mark.parametrize(
    ("call", "nonfinite"),
    [
        (lambda x: torch.exp(x * 1e4), True),
        (lambda x: {"loss": [torch.log(x - 10)]}, True),
        (torch.exp, False),
        (lambda x: (x > 0, 3, None), False),
        (lambda x: None, False),
    ],
)
def test_a_result_that_is_not_finite_is_seen(call, nonfinite):
    assert probe_host(Case(call, torch.ones(100))).nonfinite is nonfinite


def test_a_result_is_not_accused_of_what_its_input_had():
    assert not probe_host(Case(torch.exp, torch.tensor([1.0, math.inf]))).nonfinite


DTYPES = [
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int8,
    torch.int64,
    torch.bool,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_can_be_watched(dtype):
    contiguous = torch.ones(8, 6).to(dtype)
    strided = torch.ones(6, 8).to(dtype).t()
    empty = torch.ones(0).to(dtype)
    single = torch.ones(()).to(dtype)
    assert probe_host(Case(lambda *tensors: None, contiguous, strided, empty, single)).mutated == ()


def test_a_parameter_that_requires_a_gradient_can_be_watched():
    weight = torch.nn.Parameter(torch.ones(3, 4))
    assert probe_host(Case(torch.exp, weight)).mutated == ()


@pytest.mark.parametrize(
    "tensor", [torch.eye(3).to_sparse(), torch.ones(3, device="meta")], ids=["sparse", "without data"]
)
def test_a_tensor_that_cannot_be_watched_is_measured_or_refused_but_not_a_crash(tensor):
    try:
        found = probe_host(Case(lambda x: None, tensor))
    except NearpeakError:
        return
    assert found.mutated == ()


def test_a_case_runs_where_its_tensors_are():
    x = torch.ones(3)
    assert device_of(Case(torch.exp, x)).type == "cpu"
    assert device_of(Case(lambda: torch.exp(x))).type == "cpu"
    assert device_of(Case(torch.nn.Linear(3, 3))).type == "cpu"


class Placed:
    """As much of a tensor as `device_of` looks at."""

    dtype = torch.float32

    def __init__(self, device):
        self.device = torch.device(device)

    def data_ptr(self):
        return 0


def test_one_tensor_on_a_gpu_decides():
    assert device_of(Case(print, Placed("cpu"), Placed("cuda:1"))) == torch.device("cuda:1")


class SomeGpu:
    """As much of a backend as `device_of` asks."""

    def __init__(self, initialized=True):
        self.is_initialized = lambda: initialized
        self.current = lambda: 0
        self.synchronize = lambda: None
        self.device = lambda index: torch.device("cuda", index)


@pytest.fixture
def kernels_of_a_call(monkeypatch):
    """A machine with a GPU; the list is what the profiler sees of a call."""
    seen = []
    monkeypatch.setattr(prepared, "gpu_backend", SomeGpu)
    monkeypatch.setattr(prepared, "profile_calls", lambda call, calls, **options: [tuple(seen)] * calls)
    return seen


def test_a_call_without_kernels_runs_where_its_result_is(kernels_of_a_call):
    assert device_of(Case(lambda: Placed("cuda:0"))) == torch.device("cuda:0")  # as torch.empty does
    assert device_of(Case(lambda: [{"a": Placed("cuda:1")}])) == torch.device("cuda:1")
    assert device_of(Case(lambda: Placed("cpu"))).type == "cpu"
    assert device_of(Case(lambda: None)).type == "cpu"


def test_tensors_on_the_cpu_do_not_hide_what_runs_on_a_gpu(kernels_of_a_call):
    model = Placed("cuda:0")
    assert device_of(Case(lambda x: model and None, torch.ones(3))) == torch.device("cuda:0")
    assert device_of(Case(lambda x: None, torch.ones(3))).type == "cpu"
    kernels_of_a_call.append("gemm")
    assert device_of(Case(lambda x: None, torch.ones(3))) == torch.device("cuda:0")


def test_a_process_that_has_not_used_its_gpu_is_not_profiled(kernels_of_a_call, monkeypatch):
    monkeypatch.setattr(prepared, "gpu_backend", lambda: SomeGpu(initialized=False))
    kernels_of_a_call.append("gemm")
    assert device_of(Case(torch.exp, torch.ones(3))).type == "cpu"


def test_the_first_call_comes_after_the_reset(kernels_of_a_call):
    order = []
    device_of(Case(lambda: order.append("call"), reset=lambda: order.append("reset")))
    assert order == ["reset", "call"]


def test_tensors_on_several_gpus_are_refused():
    with pytest.raises(CaseError, match=r"tensors on several GPUs \(cuda:0, cuda:1\). Time one device at a time"):
        device_of(Case(print, Placed("cuda:1"), Placed("cuda:0")))
