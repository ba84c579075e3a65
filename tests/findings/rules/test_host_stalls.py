import dataclasses

import pytest
from stalled import CPU, GPU, findings, idle, placed

from nearpeak.ops.op import BackwardPass, PythonStretch, StackLine
from nearpeak.profiles.profile import CompilerFacts


def test_a_loader_without_workers_gets_as_many_as_it_needs():
    (found,) = findings("input-stall", idle("input", 15.0, where="train.py:3", what="DataLoader"))
    assert found.saving_s == pytest.approx(15.0 - 2e-4)
    assert found.source == "train.py:3"
    assert "num_workers=4," in found.remedy  # 15 s beside 5 s, and a fifth more


def test_memory_is_pinned_for_a_gpu_alone():
    for machine, pinned in ((CPU, False), (None, True)):
        facts = {} if machine is None else {"machine": machine}
        (found,) = findings("input-stall", idle("input", 15.0, what="DataLoader"), **facts)
        assert ("pin_memory" in found.remedy) == ("non_blocking" in found.remedy) == pinned


def test_more_workers_than_a_machine_has_are_not_all_of_the_remedy():
    (found,) = findings("input-stall", idle("input", 19.5, what="DataLoader"))
    assert "num_workers=16," in found.remedy
    assert "make samples cheaper" in found.remedy


def test_a_loader_with_workers_needs_more_of_them():
    (found,) = findings("input-stall", idle("input", 10.0, what="DataLoader with workers"))
    assert "num_workers times 2.0" in found.remedy


def test_a_batch_that_is_ready_is_no_stall():
    assert not findings("input-stall", idle("input", 1e-4, what="DataLoader"))


def test_a_collection_in_every_step_is_found_at_its_line():
    (found,) = findings("garbage-collection", idle("garbage collection", 4.0, where="train.py:9"))
    assert (found.source, found.saving_s) == ("train.py:9", pytest.approx(3.96))


@pytest.mark.parametrize(("rule", "cause"), [("garbage-collection", "garbage collection"), ("compilation",) * 2])
def test_what_made_only_the_profiled_step_longer_is_not_in_every_step(rule, cause):
    assert findings(rule, idle(cause, 4.0), profiled_s=21.0)
    assert not findings(rule, idle(cause, 4.0), profiled_s=24.0)


def test_compilation_and_loading_have_different_remedies():
    facts = CompilerFacts(graphs=9, breaks=(), recompiled_in_steps=7)
    (compiled,) = findings("compilation", idle("compilation", 4.0, what="_compile.compile_inner"), compiler=facts)
    (loaded,) = findings("compilation", idle("compilation", 4.0, what="cuModuleLoadData"))
    assert "dynamic=True" in compiled.remedy
    assert "7 of 9 graphs" in compiled.evidence
    assert "CUDA_MODULE_LOADING" in loaded.remedy


def test_as_many_graphs_as_steps_are_compiled_in_every_step():
    facts = CompilerFacts(graphs=9, breaks=(), recompiled_in_steps=5)  # 5 clean steps
    few = CompilerFacts(graphs=9, breaks=(), recompiled_in_steps=1)
    assert findings("compilation", idle("compilation", 4.0), profiled_s=24.0, compiler=facts)
    assert not findings("compilation", idle("compilation", 4.0), profiled_s=24.0, compiler=few)


def test_long_stretches_of_python_are_found_and_short_ones_are_not():
    (found,) = findings("python-stretch", idle("python", 2.0, count=4, where="train.py:5"))
    assert found.saving_s == 2.0
    assert "4 stretches of 500 ms" in found.evidence
    assert findings("python-stretch", idle("python", 2.0, count=10_000, where="train.py:5"))  # a loop
    assert not findings("python-stretch", idle("python", 2.0, count=10_000, where="train.py:5"), machine=CPU)
    assert not findings("python-stretch", idle("python", 2.0, count=20_000, where="train.py:5"))
    assert not findings("python-stretch", idle("python", 2.0, what="between ops"))
    assert not findings("python-stretch", idle("python", 0.5, where="train.py:5"))
    assert not findings("python-stretch", idle("python", 2.0))  # no op follows


def test_an_optimizer_that_goes_through_parameters_cannot_be_taken_out_of_the_step():
    stretch = idle("python", 2.0, where="train.py:5")
    (found,) = findings("python-stretch", stretch, ops=(dataclasses.replace(placed("train.py:5"), phase="optimizer"),))
    (other,) = findings("python-stretch", stretch, ops=(placed("train.py:5"),))
    assert "fewer and larger" in found.remedy
    assert "Take it out of the step" in other.remedy


def test_on_a_cpu_another_process_may_have_had_the_processor():
    assert findings("python-stretch", idle("python", 4.0, where="train.py:5"), machine=CPU)
    assert not findings("python-stretch", idle("python", 4.0, where="train.py:5"), machine=CPU, profiled_s=24.0)


def at(*lines, first=30, last=40):
    """A stack: the innermost line is in a function from `first` to `last`, the others in one from there to line 99."""
    spans = [(first, last), *[(last + 1, 99)] * (len(lines) - 1)]
    functions = [frozenset(range(start, end + 1)) for start, end in spans]
    return tuple(StackLine(f"train.py:{line}", own) for line, own in zip(lines, functions, strict=True))


def traced(seconds, stacks):
    """What the traced step had before its first op."""
    return {0: PythonStretch(seconds=seconds, stacks=stacks)}


@pytest.mark.parametrize("machine", [GPU, CPU])
def test_a_stretch_counts_as_far_as_the_traced_step_had_it_and_at_the_line_that_ran(machine):
    stretch = idle("python", 6.0, where="train.py:5")
    facts = {"machine": machine, "profiled_s": 29.0}  # another process had the processor for a while
    (found,) = findings("python-stretch", stretch, python=traced(4.0, {at(37, 90): 8, at(38, 90): 3, (): 1}), **facts)
    assert (found.saving_s, found.source) == (4.0, "train.py:37")
    assert "for 4.00 s, of which the stack was at train.py:37 for 67 %, called from train.py:90" in found.evidence
    assert "Look at what runs before" not in found.remedy
    assert not findings("python-stretch", stretch, python=traced(0.1, {at(37): 8}), **facts)
    assert not findings("python-stretch", stretch, python={}, **facts)


def test_a_function_that_runs_no_op_is_blamed_where_it_is_called():
    stretch = idle("python", 6.0, where="train.py:92")
    (found,) = findings("python-stretch", stretch, python=traced(6.0, {at(37, 90): 8}))
    assert found.source == "train.py:90"  # the function with the next op
    assert "the stack was at train.py:37 for 100 %, called from train.py:90" in found.evidence
    (found,) = findings("python-stretch", idle("python", 6.0, where="train.py:39"), python=traced(6.0, {at(37, 90): 8}))
    assert found.source == "train.py:37"


@pytest.mark.parametrize("machine", [GPU, CPU])
def test_what_torch_does_before_a_compiled_region_is_no_stretch_of_the_users(machine):
    stretch = idle("python", 6.0, where="train.py:5")
    assert not findings("python-stretch", stretch, python=traced(6.0, {at(37): 2, (): 3}), machine=machine)
    assert not findings("python-stretch", stretch, python=traced(6.0, {}), machine=machine)  # cannot be told


def test_where_a_backward_pass_begins_torch_runs_and_no_function_of_the_users():
    stretch = idle("python", 6.0, where="train.py:37")
    begun = {"passes": (BackwardPass(range(1), ("train.py:90", "train.py:37")),)}
    assert findings("python-stretch", stretch, python=traced(6.0, {at(37, 90): 8}))
    assert not findings("python-stretch", stretch, python=traced(6.0, {at(37, 90): 8, (): 1}), **begun)
    (found,) = findings("python-stretch", stretch, python=traced(6.0, {at(50, 37, 90): 8, at(37, 90): 1}), **begun)
    assert "the stack was at train.py:50" in found.evidence  # a function that makes the loss


def test_many_short_stretches_of_the_traced_step_are_no_long_one():
    ops = tuple(placed("train.py:5") for _ in range(3))
    python = {index: PythonStretch(seconds=0.5, stacks={at(5): 1}) for index in range(3)}  # of 20 s
    assert not findings("python-stretch", idle("python", 3.0, where="train.py:5"), ops=ops, python=python)


def test_a_stretch_before_an_op_that_no_trace_sees_is_the_longest_that_no_other_cause_has():
    ops = tuple(placed(f"train.py:{line}") for line in (5, 82))
    python = {
        0: PythonStretch(seconds=1.0, stacks={at(5): 1}),
        1: PythonStretch(seconds=3.0, stacks={at(37): 5}),
    }
    here, elsewhere = idle("python", 1.0, where="train.py:5"), idle("python", 3.0, where="train.py:41")
    found = findings("python-stretch", elsewhere, here, ops=ops, python=python)
    assert {(item.source, item.saving_s) for item in found} == {("train.py:37", 3.0), ("train.py:5", 1.0)}


@pytest.mark.parametrize(
    ("calls", "remedy"),
    [
        (["cudaMalloc"], "expandable_segments"),
        (["cudaFree", "cudaMalloc"], "empty_cache"),
        (["cudaHostAlloc"], "pin_memory"),
    ],
)
def test_calls_of_the_driver_for_memory_have_the_remedy_of_their_kind(calls, remedy):
    (found,) = findings("allocator-growth", *(idle("allocator", 1.0, where="train.py:2", what=call) for call in calls))
    assert found.saving_s == pytest.approx(len(calls))
    assert found.source == "train.py:2"
    assert remedy in found.remedy
    assert calls[0] in found.evidence


def test_on_a_cpu_a_stretch_outside_of_torch_is_not_called_idle():
    cause = idle("python", 8.0, where="train.py:3")
    (on_gpu,) = findings("python-stretch", cause)
    (on_cpu,) = findings("python-stretch", cause, machine=CPU)
    assert "idle" in on_gpu.title
    assert "idle" not in on_cpu.title
    assert "cannot be told" in on_cpu.evidence


def test_workers_that_are_started_in_every_epoch_are_no_slow_loader():
    started = idle("input", 4.0, count=8, where="train.py:12", what="workers are started")
    (found,) = findings("workers-restarted", started)
    assert (found.saving_s, found.source) == (4.0, "train.py:12")
    assert "once in 8 steps" in found.evidence
    assert "persistent_workers=True" in found.remedy
    assert not findings("input-stall", started)
