"""What a process of a candidate reports where it needs a GPU: on a device made up of operators on a CPU."""

from __future__ import annotations

import contextlib
import os
import time
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from nearpeak.judging.channel import Channel
from nearpeak.judging.judge import _missing_work, _Trial
from nearpeak.judging.runner import Runner, disturb, halve
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
