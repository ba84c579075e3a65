"""Profiles of simulated steps on a GPU: what findings predict is what the steps without the wastes take.

A program is a list of what the host does. It is run twice on a simulated host and device: with the events and the
overhead of a profiler, as a trace file, and without, in many steps for the clean time. The twin without the waste is
run as well, and tells what the waste costs.
"""

import json

import pytest

from nearpeak.machines.catalogue import find as machine_of
from nearpeak.ops.op import NextStep, Op, Storage, Trace
from nearpeak.ops.tensor import Tensor
from nearpeak.profiling.assemble import StepRecords
from nearpeak.trace.kineto.read import read_trace

H200 = machine_of("h200-sxm")
LAUNCH_US, LATENCY_US, GAP_US, RETURN_US = 2.0, 2.0, 1.0, 6.0
COPY_GAP_US = 4.0
"""Before and after a copy, as on an H200."""
PROFILED_OP_US, PROFILED_CALL_US, PROFILED_COPY_GAP_US = 4.0, 2.5, 1.0
"""What the profiler adds to an op, to a call of the runtime, and to the gap beside a copy."""


def op(kernel_us, *, host_us=6.0, line=1):
    return ("op", kernel_us, host_us, line)


def read(line=2):
    """A number that is read: a copy of 1 us, and the host waits for it."""
    return ("read", 1.0, 6.0, line)


def python(us):
    return ("python", us, 0.0, 0)


def on_host(us, name="_local_scalar_dense", *, line=9):
    """An op on tensors in the memory of the host."""
    return ("host", us, name, line)


def to_device(us, *, line):
    """A copy from pageable memory: the host waits for it."""
    return ("copy", us, 6.0, line)


class Simulation:
    """A host and a device with one stream, on a clock in microseconds."""

    def __init__(self, *, profiled=False):
        self.now = self.free = 0.0
        self.profiled = profiled
        self.copied = False
        self.events = []

    def run(self, program):
        for number, (kind, us, host_us, line) in enumerate(program):
            if kind == "python":
                self.now += us
                continue
            self.now += 0.2
            begin = self.now
            if kind == "host":
                self.now += us + (PROFILED_OP_US if self.profiled else 0.0)
                sizes = ([], []) if host_us == "_local_scalar_dense" else ([8], [1])
                facts = {"Input Dims": [sizes[0]], "Input Strides": [sizes[1]]}
                facts |= {"Input type": ["float"], "Concrete Inputs": [""]}
                self._event(
                    f"aten::{host_us}",
                    begin,
                    self.now - begin,
                    "cpu_op",
                    **facts,
                    **{"External id": number + 1},
                )
                continue
            self.now += host_us / 2 + (PROFILED_OP_US if self.profiled else 0.0)
            name = "cudaLaunchKernel" if kind == "op" else "cudaMemcpyAsync"
            launched = self.now
            self.now += LAUNCH_US + (PROFILED_CALL_US if self.profiled else 0.0)
            beside_copy_us = COPY_GAP_US + (PROFILED_COPY_GAP_US if self.profiled else 0.0)
            gap_us = beside_copy_us if kind != "op" or self.copied else GAP_US
            self.copied = kind != "op"
            start = max(self.now + LATENCY_US, self.free + gap_us)
            self.free = start + us
            self._event(name, launched, self.now - launched, "cuda_runtime", correlation=number + 1)
            device = {"correlation": number + 1, "stream": 7, "device": 0}
            if kind == "op":
                self._event("exp_kernel", start, us, "kernel", **device)
            else:
                where = "DtoH (Device -> Pinned)" if kind == "read" else "HtoD (Pageable -> Device)"
                self._event(f"Memcpy {where}", start, us, "gpu_memcpy", **device)
                waited = self.now
                self.now = max(self.now, self.free) + RETURN_US
                self._event(
                    "cudaStreamSynchronize", waited, self.now - waited, "cuda_runtime", correlation=10**6 + number
                )
            self.now += host_us / 2
            facts = {"Input Dims": [[8]], "Input Strides": [[1]], "Input type": ["float"], "Concrete Inputs": [""]}
            called = {"op": "exp", "read": "_local_scalar_dense", "copy": "_to_copy"}[kind]
            self._event(f"aten::{called}", begin, self.now - begin, "cpu_op", **facts, **{"External id": number + 1})
            self._event(f"train.py({line}): step", begin - 0.1, self.now - begin + 0.2, "python_function")
            self.now += 0.2

    def _event(self, name, start, took, category, **args):
        facts = {"ph": "X", "cat": category, "name": name, "ts": start, "dur": took, "args": args}
        on_device = category in ("kernel", "gpu_memcpy")
        self.events.append({**facts, "pid": 0 if on_device else 1, "tid": 7 if on_device else 1})


def clean_seconds(program):
    """The time of one of many steps in a row."""
    simulation = Simulation()
    ends = []
    for _ in range(30):
        simulation.run(program)
        ends.append(max(simulation.now, simulation.free))
    return (ends[-1] - ends[-11]) / 10 * 1e-6


def profiled(program, folder, traced=None, slowdown=None):
    simulation = Simulation(profiled=True)
    simulation.run(program)
    (folder / "step.json").write_text(json.dumps({"traceEvents": simulation.events}))
    recorded = read_trace(folder / "step.json")
    records = StepRecords(
        source="train.py",
        walls=[clean_seconds(program)] * 5,
        recorded=recorded,
        profiled_wall=recorded.wall_s,
        traced=traced,
        untraced_reason="simulated",
        later_walls=() if slowdown is None else (slowdown * clean_seconds(program),) * 40,
    )
    return records.profile(H200)


def saved(program, twin):
    """The share of the step that is saved."""
    return 1.0 - clean_seconds(twin) / clean_seconds(program)


def predicted(profile, *rules):
    found = [finding for finding in profile.findings if finding.rule in rules]
    return {finding.source: finding.share for finding in found}


LONG, SHORT = 50.0, 2.0


@pytest.mark.parametrize("slowdown", [1.005, 1.06, 1.2, 1.4, 0.95])
def test_a_gpu_that_slows_down_has_the_step_time_and_the_kernels_of_later_steps(tmp_path, slowdown):
    program = [op(LONG)] * 40
    before, after = profiled(program, tmp_path), profiled(program, tmp_path, slowdown=slowdown)
    pace = slowdown if slowdown in (1.06, 1.2) else 1.0
    assert after.wall_s == pytest.approx(pace * before.wall_s)
    assert after.kernel_s == pytest.approx(pace * before.kernel_s)
    assert after.waterfall.seconds("idle") == pytest.approx(pace * before.waterfall.seconds("idle"))
    assert after.steps == (40 if pace > 1.0 else 5)
    assert any("The GPU slowed down" in note for note in after.notes) == (pace > 1.0)
    assert after.later_s == pytest.approx(slowdown * before.wall_s)


@pytest.mark.parametrize("kernel_us", [LONG, 12.0, SHORT])
@pytest.mark.parametrize("every", [1, 4, 20])
def test_a_number_that_is_read_costs_what_the_step_without_it_saves(tmp_path, kernel_us, every):
    block = [op(kernel_us)] * every
    program, twin = [*block, read()] * (60 // every), block * (60 // every)
    share = predicted(profiled(program, tmp_path), "synchronization")
    assert share == {"train.py:2": pytest.approx(saved(program, twin), abs=0.01, rel=0.05)}


def test_python_between_waits_is_saved_beside_them(tmp_path):
    """Spans that Python decodes: a number is read, Python works, and an op follows."""
    program = [op(20.0), read(), python(300.0), op(20.0, line=3)] * 12
    profile = profiled(program, tmp_path)
    without_python = [piece for piece in program if piece[0] != "python"]
    share = predicted(profile, "python-stretch")
    assert share == {"train.py:3": pytest.approx(saved(program, without_python), rel=0.05)}
    both = [finding for finding in profile.findings if finding.rule in ("python-stretch", "synchronization")]
    neither = [piece for piece in without_python if piece[0] != "read"]
    assert both[-1].together_s == pytest.approx(saved(program, neither) * profile.wall_s, rel=0.05)


def test_a_step_that_waits_for_its_host_and_reads_numbers_saves_all_but_its_kernels_together(tmp_path):
    """Experts one after the other, with a wait for each count."""
    program = [op(3.0), op(3.0), read(), op(4.0), op(4.0)] * 16
    profile = profiled(program, tmp_path)
    rules = [finding.rule for finding in profile.findings]
    assert sorted(rules) == ["launch-bound", "synchronization"]
    kernels = [op(piece[1], host_us=0.0) for piece in program if piece[0] == "op"]
    kernels_s = sum(piece[1] + 0.4 for piece in kernels) * 1e-6
    assert profile.findings[-1].together_s == pytest.approx(profile.wall_s - kernels_s, rel=0.05)
    assert sum(finding.saving_s for finding in profile.findings) <= profile.wall_s


def test_a_loop_over_tensors_of_the_host_is_python_and_no_launching(tmp_path):
    """Numbers that a loop reads one by one from a copy, and an op on the device after it."""
    loop = [on_host(2.0)] * 400
    program, twin = [op(20.0), read(), *loop, op(20.0, line=3)], [op(20.0), read(), op(20.0, line=3)]
    profile = profiled(program, tmp_path)
    (cause,) = (cause for cause in profile.idle if cause.cause == "python" and not cause.what)
    assert (cause.where, cause.count) == ("train.py:3", 1)
    share = predicted(profile, "python-stretch")
    assert share == {"train.py:3": pytest.approx(saved(program, twin), rel=0.1)}


def test_a_step_whose_device_is_always_busy_has_no_finding_about_its_host(tmp_path):
    assert profiled([op(LONG)] * 60, tmp_path).findings == ()


class TracedTable:
    """The trace of `blocks` of ops on the host, a copy of their result to the device, and an op with the copy."""

    def __init__(self, blocks, names):
        self.count = 0
        self.data = self._tensor()
        self.storages = {self.data.storage: Storage(bytes=32.0, kind="input")}
        self.on_host = set()
        first = self._step(blocks, names)
        known = dict(self.storages)
        following = self._step(blocks, names)
        new = {number: storage for number, storage in self.storages.items() if number not in known}
        self.trace = Trace(
            ops=first,
            storages=known,
            on_host=frozenset(self.on_host),
            stacks=tuple((op.source,) for op in first),
            next_step=NextStep(ops=following, storages=new),
        )

    def _tensor(self):
        self.count += 1
        return Tensor(shape=(8,), strides=(1,), dtype="float32", storage=self.count)

    def _made(self, *, on_host=False):
        made = self._tensor()
        self.storages[made.storage] = Storage(bytes=32.0, kind="intermediate")
        if on_host:
            self.on_host.add(made.storage)
        return made

    def _step(self, blocks, names):
        ops = []
        for _ in range(blocks):
            made = None
            for name in names:
                arguments = {} if made is None else {"self": made}
                made = self._made(on_host=True)
                host = dict(source="train.py:8", origin="host")
                ops.append(Op(name=f"host.{name}", arguments=arguments, outputs=(made,), **host))
            copy, result = self._made(), self._made()
            moved = Op(name="aten._to_copy.default", arguments={"self": made}, outputs=(copy,), source="train.py:9")
            inputs = {"self": copy, "other": self.data}
            ops += [moved, Op(name="aten.exp.default", arguments=inputs, outputs=(result,), source="train.py:10")]
            self.data = result
        return tuple(ops)


@pytest.mark.parametrize("names", [["arange", "pow"], ["arange", "pow", "neg", "sum", "div", "exp"]])
@pytest.mark.parametrize("us", [400.0, 60.0])
def test_a_table_that_every_step_builds_on_the_host_costs_what_the_step_without_it_saves(tmp_path, names, us):
    block = [*(on_host(us, name, line=8) for name in names), to_device(20.0, line=9)]
    program, twin = [*block, op(100.0, line=10)] * 3, [op(100.0, line=10)] * 3
    profile = profiled(program, tmp_path, TracedTable(3, names).trace)
    # Short ops on the host are shown as calls that launch the copy.
    line = "train.py:8" if us > 200.0 else "train.py:9"
    assert predicted(profile, "computed-every-step") == {line: pytest.approx(saved(program, twin), rel=0.05)}


def converted_on_the_host(kernels):
    """The trace of a conversion from bytes to float32 on the host, a copy of the result, and kernels that read it."""
    pixels = Tensor(shape=(8,), strides=(1,), dtype="uint8", storage=1)
    floats, there, out = (Tensor(shape=(8,), strides=(1,), dtype="float32", storage=number) for number in (2, 3, 4))
    ops = [
        Op(name="host._to_copy", arguments={"self": pixels}, outputs=(floats,), source="train.py:8", origin="host"),
        Op(name="aten._to_copy.default", arguments={"self": floats}, outputs=(there,), source="train.py:9"),
        *[Op(name="aten.exp.default", arguments={"self": there}, outputs=(out,), source="train.py:10")] * kernels,
    ]
    storages = {number: Storage(bytes=32.0, kind="intermediate") for number in (2, 3, 4)}
    return Trace(
        ops=tuple(ops),
        storages={1: Storage(bytes=8.0, kind="input"), **storages},
        on_host=frozenset({1, 2}),
        stacks=tuple((op.source,) for op in ops),
    )


def test_a_conversion_on_the_host_costs_its_time_and_that_of_the_larger_copy(tmp_path):
    kernels = [op(LONG, line=10)] * 20
    program = [on_host(3000.0, "_to_copy", line=8), to_device(800.0, line=9), *kernels]
    found = {item.rule: item for item in profiled(program, tmp_path, converted_on_the_host(20)).findings}
    mended = [to_device(200.0, line=9), op(4.0, line=9), *kernels]
    real = 1.0 - clean_seconds(mended) / clean_seconds(program)
    assert found["computed-on-host"].source == "train.py:9"
    assert found["computed-on-host"].share == pytest.approx(real, rel=0.1)
