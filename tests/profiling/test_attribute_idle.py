import gc
import json
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import nearpeak
from nearpeak.profiling.assemble import attribute_idle
from nearpeak.profiling.torch_profiler import Profiler
from nearpeak.trace.kineto.read import read_trace


class Slow(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.ones(4)


@pytest.mark.slow
def test_a_slow_loader_a_collection_and_slow_python_are_told_apart():
    loader = iter(DataLoader(Slow(), batch_size=2))
    took = {}  # a busy machine sleeps for longer than it is told to

    def timed(name, fn, *args):
        start = time.perf_counter()
        result = fn(*args)
        took[name] = time.perf_counter() - start
        return result

    def step():
        timed("input", next, loader).exp()
        timed("garbage collection", gc.collect)
        timed("python", time.sleep, 0.03)
        torch.ones(4).exp()

    step()
    profiler = Profiler()
    start = time.perf_counter()
    step()
    wall = time.perf_counter() - start
    recorded = profiler.stop()
    idle_s = wall - sum(took for _, took in recorded.spans)
    found = attribute_idle(recorded, idle_s=idle_s, clean=True).causes
    by_cause = {cause: sum(item.seconds for item in found if item.cause == cause) for cause in {c.cause for c in found}}
    assert sum(by_cause.values()) == pytest.approx(idle_s)
    assert {name: by_cause[name] for name in took} == pytest.approx(took, rel=0.2)


def test_a_profile_has_causes_that_sum_to_its_idle_part():
    def step(x):
        time.sleep(0.002)
        return x.exp()

    found = nearpeak.profile(step, torch.ones(16), on="h200-sxm")
    assert sum(cause.seconds for cause in found.idle) == pytest.approx(found.waterfall.seconds("idle"))
    known = [cause for cause in found.idle if cause.cause != "unknown"]  # other work may take the processor
    assert known[0].cause == "python"
    assert known[0].where.startswith("test_attribute_idle.py:")


def event(name, start, took, category, thread=1, **args):
    facts = {"ph": "X", "cat": category, "name": name, "ts": start, "dur": took, "args": args}
    return {**facts, "pid": 0 if category in ("kernel", "gpu_memcpy") else 1, "tid": thread}


def op(name, start, took, number, shape):
    inputs = {"Input Dims": [shape], "Input Strides": [[1] * len(shape)], "Input type": ["float"]}
    return event(name, start, took, "cpu_op", **inputs, **{"Concrete Inputs": [""], "External id": number})


def test_item_in_a_file_is_a_synchronization_at_its_op(tmp_path):
    device = {"stream": 7, "device": 0}
    events = [
        op("aten::exp", 0, 40, 1, [8]),
        event("cudaLaunchKernel", 10, 10, "cuda_runtime", correlation=10),
        op("aten::_local_scalar_dense", 50, 460, 2, []),
        event("cudaMemcpyAsync", 60, 10, "cuda_runtime", correlation=11),
        event("cudaStreamSynchronize", 80, 425, "cuda_runtime", correlation=12),
        op("aten::exp", 600, 40, 3, [8]),
        event("cudaLaunchKernel", 610, 10, "cuda_runtime", correlation=13),
        event("exp", 30, 450, "kernel", 7, correlation=10, **device),
        event("Memcpy DtoH (Device -> Pinned)", 480, 20, "gpu_memcpy", 7, correlation=11, **device),
        event("exp", 625, 75, "kernel", 7, correlation=13, **device),
    ]
    (tmp_path / "step.json").write_text(json.dumps({"traceEvents": events}))
    recorded = read_trace(tmp_path / "step.json")
    found = attribute_idle(recorded, idle_s=recorded.wall_s - 545e-6, clean=False).causes
    microseconds = [(item.cause, item.what, round(item.seconds * 1e6)) for item in found]
    assert microseconds == [("synchronization", "item", 125), ("launching", "launched late", 30)]
    ahead = attribute_idle(recorded, idle_s=recorded.wall_s - 545e-6, clean=False, host_ahead=True)
    microseconds = [(item.cause, item.what, round(item.seconds * 1e6)) for item in ahead.causes]
    assert microseconds == [("synchronization", "item", 125), ("unknown", "", 30)]
    assert len(ahead.gaps) == 1


def test_what_nearpeak_does_at_the_end_of_a_profiled_step_is_no_idle_time_of_a_clean_one(tmp_path):
    """Of a step that waits for its launches, 1.9 ms follow in which the step was read."""
    device = {"stream": 7, "device": 0}
    events = [event("ProfilerStep#0", 0, 3000, "user_annotation")]
    for number in range(20):
        start = 50 * number
        events += [
            op("aten::exp", start, 40, number + 1, [8]),
            event("cudaLaunchKernel", start + 20, 10, "cuda_runtime", correlation=number + 10),
            event("exp", start + 35, 5, "kernel", 7, correlation=number + 10, **device),
        ]
    events += [
        event("nearpeak: end of a step", 1010, 40, "user_annotation"),
        event("cudaDeviceSynchronize", 1015, 30, "cuda_runtime", correlation=90),
    ]
    (tmp_path / "step.json").write_text(json.dumps({"traceEvents": events}))
    found = attribute_idle(read_trace(tmp_path / "step.json"), idle_s=400e-6, clean=True)
    assert sum(item.seconds for item in found.causes if item.what in ("launched late", "between ops")) >= 390e-6


def test_python_before_an_op_that_no_trace_has_is_at_the_line_of_the_next():
    def step(x):
        x.exp()
        time.sleep(0.02)
        return torch.tensor([1.0, 2.0]).exp()

    found = nearpeak.profile(step, torch.ones(16), on="h200-sxm")
    line = step.__code__.co_firstlineno + 3
    assert (found.idle[0].cause, found.idle[0].where) == ("python", f"test_attribute_idle.py:{line}")
