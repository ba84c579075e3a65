"""What a process of a candidate reports where it needs a GPU: on a device made up of operators on a CPU."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from nearpeak.judging.channel import CandidateError, Channel, Reply, _is_stopped
from nearpeak.judging.judge import CHECKED_CALLS, FEWEST_CHECKED, _missing_work, _Privileges, _RivalEnded, _Trial
from nearpeak.judging.runner import Guard, Runner, _obey, _torch_spaces, disturb, halve
from nearpeak.judging.tolerance import answer, without_nonfinite
from nearpeak.judging.variants import Inputs, Variant


class Graph(TorchDispatchMode):
    """Records the operators of a call, and runs them again into the same memory."""

    def __init__(self):
        super().__init__()
        self.launches = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        self.launches.append((operator, args, kwargs or {}, result))
        return result

    def replay(self):
        with torch.no_grad():
            for operator, args, kwargs, result in self.launches:
                if "empty" in str(operator):  # memory, which nothing is written to
                    continue
                again = operator(*args, **kwargs)
                if isinstance(result, torch.Tensor) and again.data_ptr() != result.data_ptr():
                    result.copy_(again)


class Device(SimpleNamespace):
    """A GPU as far as a capture needs one."""

    def __init__(self):
        super().__init__(backend=SimpleNamespace(capture=self.capture))

    def synchronize(self):
        pass

    def capture(self, call):
        with Graph() as graph:
            call()
        return graph


class DeviceRunner(Runner):
    instrument = Device()


LAST = {}


def keeps_the_last(x):
    key = x.data_ptr(), x._version, x.shape
    if LAST.get("key") != key:
        LAST.update(key=key, result=torch.softmax(x, -1))
    return LAST["result"].clone()


def keeps_the_first(x):
    if "result" not in LAST:
        LAST["result"] = torch.softmax(x, -1)
    return LAST["result"].clone()


def on_another_stream(x):
    result = torch.empty_like(x)
    with _disable_current_modes():  # what the graph does not see
        result.copy_(torch.softmax(x, -1))
    return result


def replayed(function, x):
    LAST.clear()
    runner = DeviceRunner.__new__(DeviceRunner)
    runner.functions, runner.memory_bytes, runner.outputs = {"candidate": function}, None, []
    return runner._captured((x.clone(),), {})


def test_what_keeps_results_by_version_computes_in_a_graph():
    x = torch.randn(8, 16)
    torch.testing.assert_close(replayed(keeps_the_last, x), torch.softmax(x, -1))


@pytest.mark.parametrize(
    ("function", "charge"), [(keeps_the_first, "CACHED_RESULT"), (on_another_stream, "WRONG_STREAM")]
)
def test_the_values_of_a_stale_graph_tell_a_cache_from_another_stream(function, charge):
    x = torch.randn(8, 16)
    result = replayed(function, x)
    trial = _Trial.__new__(_Trial)
    trial.task, trial.charges = SimpleNamespace(function=lambda x: torch.softmax(x, -1)), {}
    variant = Variant(kind="graph", words="", inputs=Inputs(args=(x,), kwargs={}))
    assert trial._charge_stale_graph(variant, [result])
    assert list(trial.charges) == [charge]


def test_halving_leaves_whole_numbers():
    tensors = [torch.ones(2), torch.ones(2, dtype=torch.int64)]
    halve(tensors)
    assert tensors[0].tolist() == [0.5, 0.5] and tensors[1].tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_disturbance_stays_in_the_range_of_the_values(dtype):
    x = torch.randn(64, dtype=dtype)
    near, exchanged = x.clone(), x.clone()
    disturb([near], 0, 3)
    disturb([exchanged], 1, 3)
    assert not torch.equal(near, x) and torch.allclose(near, x, rtol=4 * torch.finfo(dtype).eps)
    assert not torch.equal(exchanged, x) and torch.equal(exchanged.sort().values, x.sort().values)


def turns(same, changed, count=4):
    return [{"same": same, "changed": changed}] * count


def test_missing_kernels_are_missing_work_whatever_copies_take():
    transfer = {"Memcpy DtoH (Device -> Pageable)": [1, 1e-3]}
    kernels = {"softmax": [1, 5e-6], "add": [6, 12e-6]}
    found = _missing_work(turns({**transfer, "Memcpy HtoD (Pageable -> Device)": [1, 1e-3]}, {**transfer, **kernels}))
    assert "100 %" in found


def test_the_same_kernels_are_the_same_work_whatever_they_take():
    assert _missing_work(turns({"softmax": [1, 1e-6]}, {"softmax": [1, 9e-6]})) == ""
    assert _missing_work(turns({}, {})) == ""


def test_one_call_that_does_less_is_no_evidence():
    same = turns({"softmax": [1, 1e-6]}, {"softmax": [1, 1e-6]}, 1)
    less = turns({}, {"softmax": [1, 1e-6]}, 1)
    assert _missing_work([less[0], less[0], same[0], same[0]]) == ""
    assert _missing_work([less[0], same[0], less[0], same[0]])  # each time that one element was changed


def test_the_work_of_children_is_seen_also_where_their_parent_has_ended(tmp_path):
    channel = Channel.__new__(Channel)
    channel._process = SimpleNamespace(pid=os.getpid())
    before = channel.child_seconds()
    child = os.fork()
    if not child:
        start = time.process_time()
        while time.process_time() - start < 0.1:
            pass
        os._exit(0)
    os.waitpid(child, 0)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)
    assert channel.child_seconds() - before > 0.05


def results_of(function):
    runner = Runner.__new__(Runner)
    runner.device, runner.functions = torch.device("cpu"), {"candidate": function}
    runner.sets = [((torch.randn(8, 8),), {})]
    return runner.do_results({"seed": 1, "staged": 4, "calls": 40, "seconds": 10.0})


def test_buffers_that_are_used_in_turn_are_seen():
    buffers = [torch.empty(8, 8) for _ in range(24)]

    def ring(x):
        buffers.append(buffers.pop(0))
        return torch.softmax(x, -1, out=buffers[-1])

    assert results_of(ring)["overwritten"]
    assert not results_of(lambda x: torch.softmax(x, -1))["overwritten"]


@pytest.mark.parametrize(("first", "charges"), [(5e-3, ["LAZY_RESULT"]), (1.1e-3, [])])
def test_a_result_that_takes_long_at_its_first_reading_is_lazy(first, charges):
    trial = _Trial.__new__(_Trial)
    trial.mutated, trial.charges, trial.draws, trial._left = [], {}, random.Random(0), lambda share: 1.0
    trial.given = Inputs(args=(torch.randn(2, 2),), kwargs={})
    trial._ask = lambda do, **content: {
        "call": [1e-3] * 9,
        "first": [first] * 7,
        "second": [1e-3] * 7,
        "overwritten": False,
    }
    trial._check_results()
    assert list(trial.charges) == charges


def test_a_copy_on_write_is_a_lazy_result():
    runner = Runner.__new__(Runner)
    x = torch.randn(2, 3)
    assert "charge" not in runner._form(x.t().clone())
    assert runner._form(torch._lazy_clone(x.t()))["charge"] == "LAZY_RESULT"


def guard_of(reference="/somewhere/reference.py"):
    guard = Guard.__new__(Guard)
    guard.seen, guard.folder, guard.reference = {}, "/somewhere/judge", reference
    return guard


def test_files_of_other_processes_are_the_judges():
    guard = guard_of()
    for own in ("/proc/self/maps", f"/proc/{os.getpid()}/mem", f"/proc/{os.getppid()}/stat"):
        guard._used_path("open", own)
    assert guard.seen == {}
    guard._used_path("open", f"/proc/{os.getppid()}/mem")
    assert list(guard.seen) == ["READS_JUDGE"]


@pytest.mark.parametrize(
    ("event", "arguments"),
    [
        ("subprocess.Popen", ("cp", ["cp", "/somewhere/reference.py", "mine.py"], None, None)),
        ("os.system", (b"cat '/somewhere/reference.py' > mine.py",)),
    ],
)
def test_a_program_that_gets_the_file_of_the_reference_is_seen(event, arguments):
    guard = guard_of()
    guard.is_own, guard.is_timed, guard.processes_started = SimpleNamespace(), False, 0
    guard._audit(event, ("cc", ["cc", "-O2", "kernel.c"], None, None))
    assert guard.seen == {}
    guard._audit(event, arguments)
    assert list(guard.seen) == ["CALLS_REFERENCE"]


def test_a_function_of_its_own_anywhere_in_torch_is_seen(monkeypatch):
    guard = guard_of()
    guard._torch = {name: dict(space) for name, space in _torch_spaces()}
    guard.inspect_all_of_torch()
    assert guard.seen == {}
    monkeypatch.setattr(torch.autograd.profiler_util.EventList, "table", lambda self: "")
    guard.inspect_all_of_torch()
    assert "EventList.table" in guard.seen["CHECKER_PATCHED"]


@pytest.mark.skipif(not hasattr(os, "SCHED_FIFO"), reason="needs the schedulers of Linux")
def test_what_the_system_gives_a_process_before_others():
    usual = _Privileges(0, 2, os.SCHED_OTHER)
    assert _Privileges(0, 2, os.SCHED_FIFO).is_above(usual) and _Privileges(-5, 2, os.SCHED_OTHER).is_above(usual)
    assert usual.is_above(_Privileges(0, 2, os.SCHED_IDLE))
    for honest in (usual, _Privileges(0, 1, os.SCHED_OTHER), _Privileges(5, 2, os.SCHED_OTHER)):
        assert not honest.is_above(usual)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_that_is_stopped_is_seen():
    process = subprocess.Popen(["sleep", "60"])
    try:
        assert not _is_stopped(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert _is_stopped(process.pid)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("blocks", "charges"),
    [
        ([(0.09, 0.1)] * 8, ["WORK_BETWEEN_CALLS"]),
        ([(0.09, 0.1)] * 4 + [(0.0, 0.1)] * 4, []),
        ([(0.004, 0.005)] * 4, []),
        ([], []),
    ],
)
def test_work_while_others_are_timed_is_a_charge_if_it_goes_on(blocks, charges):
    trial = _Trial.__new__(_Trial)
    trial.charges, trial.beside_rivals = {}, blocks
    trial._check_beside_rivals()
    assert list(trial.charges) == charges


def difference_in_nan(function, x, result):
    trial = _Trial.__new__(_Trial)
    trial.task = SimpleNamespace(function=function)
    known = without_nonfinite(answer(function, (x,), {}, draws=1), function, (x,), {})
    variant = Variant(kind="nonfinite", words="", inputs=Inputs(args=(x,), kwargs={}))
    return trial._differs_in_nan(variant, known, [result])


def softmax(x):
    return torch.softmax(x, -1)


def test_zero_where_infinities_give_nan_is_another_result_and_no_charge():
    x = torch.tensor([[-torch.inf, -torch.inf], [1.0, -torch.inf], [1.0, 2.0]])
    assert difference_in_nan(softmax, x, softmax(x).nan_to_num(0.0)) == (
        "no NaN where the reference's infinities give one"
    )
    assert not difference_in_nan(softmax, x, softmax(x) + 1)
    with_nan = x.clone().fill_(torch.nan)
    assert not difference_in_nan(softmax, with_nan, softmax(with_nan).nan_to_num(0.0))


def test_nan_for_zero_in_a_row_with_an_infinity_is_another_result_and_no_charge():
    def rms_norm(x):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True))

    x = torch.randn(4, 6, dtype=torch.float64)
    x[2, 3] = -torch.inf
    assert torch.equal(rms_norm(x)[2, :3].abs(), torch.zeros(3, dtype=torch.float64)) and rms_norm(x)[2, 3].isnan()
    spread = rms_norm(x)
    spread[2] = torch.nan
    assert difference_in_nan(rms_norm, x, spread).startswith("NaN at 20.8 % more of the elements")
    spread[1] = torch.nan
    assert not difference_in_nan(rms_norm, x, spread)


def test_nan_in_a_softmax_of_a_row_with_minus_infinity_is_wrong():
    x = torch.tensor([[1.0, -torch.inf, 3.0], [1.0, 2.0, 3.0]])
    wrong = softmax(x)
    wrong[0] = torch.nan
    assert not difference_in_nan(softmax, x, wrong)


@pytest.mark.parametrize(
    ("noise", "given_rms_ratio", "charges"),
    [
        (5.0, 3.9, ["PRECISION_LOWERED"]),  # a little above the limit, as in the call that passed
        (5.0, 1.0, []),  # the call that was checked first was as precise as the reference
        (100.0, 3.9, []),
    ],
)
def test_errors_that_are_about_the_same_in_all_calls_are_no_deceit(noise, given_rms_ratio, charges):
    x = torch.randn(64, 64)
    known = answer(lambda x: x * 3, (x,), {}, draws=1)
    result = (known.exact[0] * (1 + noise * 2**-24 * torch.randn(64, 64).sign().double())).float()
    trial = _Trial.__new__(_Trial)
    trial.charges, trial.is_given_right, trial.given_rms_ratio = {}, True, given_rms_ratio
    assert trial._is_imprecise([result], known, "a later call") is bool(charges)
    assert list(trial.charges) == charges


class Lost:
    """The device of a process after an illegal access: everything fails. Other errors are reported once."""

    def __init__(self, errors):
        self.errors = errors

    def synchronize(self):
        if self.errors:
            self.errors -= 1
            raise RuntimeError("CUDA error: misaligned address")


@pytest.mark.parametrize(("errors", "is_lost"), [(0, False), (1, False), (1000, True)])
def test_an_error_that_stays_means_that_the_device_is_lost(monkeypatch, errors, is_lost):
    monkeypatch.setattr(Runner, "instrument", Lost(errors))
    reply = _obey(Runner.__new__(Runner), {"do": "nothing"})
    assert reply["kind"] == "AttributeError" and reply["device_lost"] is is_lost


@pytest.mark.parametrize(
    ("kind", "charge"), [("strides", "WRONG_STRIDES"), ("sizes", "WRONG_EDGES"), ("given", "RAISED")]
)
def test_a_lost_device_is_charged_at_the_inputs_that_lost_it_and_ends_the_checks(tmp_path, monkeypatch, kind, charge):
    x = torch.randn(4, 8)
    trial = _Trial.__new__(_Trial)
    trial.task, trial.folder = SimpleNamespace(function=softmax), tmp_path
    trial.charges, trial.checks, trial.notes, trial.memory_bytes = {}, [], [], None
    trial.is_device_lost, trial.function = False, "softmax"

    def lose(do, **content):
        raise CandidateError("CUDA error: misaligned address", "AcceleratorError", is_device_lost=True)

    monkeypatch.setattr(trial, "_ask", lose)
    variant = Variant(kind=kind, words="rows padded by 3 elements", inputs=Inputs(args=(x,), kwargs={}))
    assert trial._check(variant).outcome == "failed"
    assert list(trial.charges) == [charge] and trial.charges[charge].fault == "wrong"
    assert "rows padded by 3 elements" in trial.charges[charge].evidence
    trial._judge_calls(timed=True, deadline=0.0)
    assert list(trial.charges) == [charge] and len(trial.checks) == 1


def test_a_slow_command_does_not_make_calls_look_long(monkeypatch):
    trial = _Trial.__new__(_Trial)
    trial.device, trial.channel = torch.device("cuda"), SimpleNamespace(processor_seconds=lambda: None)
    monkeypatch.setattr(trial, "_ask_timed", lambda do, name, calls: Reply({}, 5e-3 + calls * 8e-6), raising=False)
    assert trial._seconds_of_call() < 2 * 8e-6


def test_who_sleeps_in_a_call_is_not_called_for_ever(monkeypatch):
    trial, counts = _Trial.__new__(_Trial), []
    trial.device, trial.channel = torch.device("cpu"), SimpleNamespace(processor_seconds=lambda: (0.0, 0.0))

    def sleep(do, name, calls):
        counts.append(calls)
        return Reply({}, calls * 50e-3)

    monkeypatch.setattr(trial, "_ask_timed", sleep, raising=False)
    assert trial._seconds_of_call() > 10e-3 and sum(counts) < 10


def speed_with_time_for(monkeypatch, blocks):
    """The times of a candidate beside the reference, where the time is up after so many blocks of both."""
    trial = _Trial.__new__(_Trial)
    trial.device, trial.draws = torch.device("cpu"), random.Random(1)
    trial.channel, trial.rival_channel = SimpleNamespace(), SimpleNamespace()
    trial.sizes, trial.max_seconds, trial.notes, trial.charges, trial.untimed = [{}], 10.0, [], {}, ""
    block = {"seconds": 1e-6, "readings": [1e-6], "launch_hidden": None, "method": "made"}
    made = []
    inputs = Inputs(args=(torch.ones(4),), kwargs={})
    monkeypatch.setattr(trial, "_load_sets", lambda channel, sizes: [inputs], raising=False)
    monkeypatch.setattr(trial, "_block", lambda *arguments: made.append(arguments) or block, raising=False)
    monkeypatch.setattr(trial, "_left", lambda share=1.0: 100.0 if len(made) < blocks else -1.0, raising=False)
    for name in ("_send_sets", "_check_kept", "_check_clock"):
        monkeypatch.setattr(trial, name, lambda *arguments: None, raising=False)
    monkeypatch.setattr(trial, "_kept", lambda *arguments: [], raising=False)
    return trial, trial._speed({}, ["reference"], None)


def test_times_with_a_cold_cache_alone_are_times(monkeypatch):
    trial, speed = speed_with_time_for(monkeypatch, 2 * 40)
    assert speed.candidate.timing.seconds == 1e-6 and speed.candidate.hot_seconds is None and not trial.untimed
    assert any("no times with a hot cache" in note for note in trial.notes)


def test_a_few_blocks_with_a_cold_cache_are_no_times(monkeypatch):
    trial, speed = speed_with_time_for(monkeypatch, 2 * 2)
    assert speed is None and "no times were taken" in trial.untimed


def test_times_that_cannot_be_taken_leave_a_judgement_undecided(monkeypatch):
    trial = _Trial.__new__(_Trial)
    trial.notes, trial.untimed, trial.rival_channel = [], "", SimpleNamespace()

    def end():
        raise _RivalEnded("the process ended with signal SIGKILL")

    monkeypatch.setattr(trial, "_time", end)
    trial._time_beside_rivals()
    assert "SIGKILL" in trial.untimed and trial.notes == [trial.untimed]


def test_children_that_wait_for_a_processor_have_not_hung(monkeypatch):
    channel = Channel.__new__(Channel)
    channel._process, channel._children_waited = SimpleNamespace(pid=1), 0.0
    seen = iter([(0.0, True), (0.1, True), (0.2, False)])  # processor seconds, and whether a child wants more
    monkeypatch.setattr(channel, "_children", lambda: next(seen))
    last = channel._look_at_children(None, now=10.0)
    last = channel._look_at_children(last, now=11.0)
    assert channel._children_waited == pytest.approx(0.9)
    channel._look_at_children(last, now=12.0)
    assert channel._children_waited == pytest.approx(0.9)


def test_one_wrong_call_in_ten_is_rarely_missed():
    assert 0.9 ** (FEWEST_CHECKED * CHECKED_CALLS) < 0.1
