"""Which of several steps counts."""

import pytest

from nearpeak.trace.kineto.read import read_trace


@pytest.fixture
def steps(write_trace, make):
    """Writes steps with two kernels each, of which the first takes so many microseconds and the second 10."""

    def op(name, start, number, kernel, begins, took):
        facts = {"External id": number, "correlation": number}
        return [
            make.tensor_op(name, start, 10.0, [64, 64], **{"External id": number}),
            make.span("cudaLaunchKernel", start + 2.0, 3.0, "cuda_runtime", **facts),
            make.kernel(kernel, begins, took, **facts),
        ]

    def write(*durations, names=None):
        events = []
        for number, took in enumerate(durations):
            start = 1000.0 * number
            events += [
                make.span(f"ProfilerStep#{number}", start, 900.0, "user_annotation"),
                *op("aten::exp", start + 10.0, 2 * number + 1, (names or {}).get(number, "k"), start + 50.0, took),
                *op("aten::sin", start + 30.0, 2 * number + 2, "second", start + 500.0, 10.0),
            ]
        return write_trace(*events, deviceProperties=[{"id": 0, "name": "NVIDIA H200", "computeMajor": 9}])

    return write


def test_the_step_with_the_median_kernel_time_is_read(steps):
    path = steps(100.0, 130.0, 110.0, 300.0, 120.0)
    found = read_trace(path, among=(0, 1, 2, 3, 4))
    assert found.step == 4
    assert [kernel.seconds for kernel in found.kernels] == pytest.approx([120e-6, 10e-6])
    assert found.repeats[0] == pytest.approx([100e-6, 130e-6, 110e-6, 300e-6, 120e-6])
    assert found.repeats[1] == pytest.approx([10e-6] * 5)
    assert [op.name for op in found.trace.ops] == ["aten.exp.default", "aten.sin.default"]


def test_only_the_steps_that_are_asked_for_count(steps):
    found = read_trace(steps(1.0, 130.0, 110.0, 120.0), among=(1, 2, 3))
    assert (found.step, len(found.repeats[0])) == (3, 3)
    assert read_trace(steps(1.0, 130.0, 110.0)).step == 2
    assert read_trace(steps(1.0, 130.0, 110.0)).repeats == ()


def test_steps_with_other_kernels_are_not_mixed(steps):
    path = steps(100.0, 1.0, 120.0, 1.0, 110.0, names={1: "other", 3: "another"})
    found = read_trace(path, among=range(5))
    assert found.step == 4
    assert found.repeats[0] == pytest.approx([100e-6, 120e-6, 110e-6])


def test_of_as_many_of_two_kinds_the_later_ones_count(steps):
    path = steps(100.0, 120.0, 300.0, 310.0, names={2: "other", 3: "other"})
    found = read_trace(path, among=range(4))
    assert found.step == 2
    assert found.repeats[0] == pytest.approx([300e-6, 310e-6])


def test_without_kernels_it_is_the_last_step(write_trace, make):
    events = []
    for number in range(3):
        events.append(make.span(f"ProfilerStep#{number}", 1000.0 * number, 900.0, "user_annotation"))
        events.append(make.tensor_op("aten::exp", 1000.0 * number + 10.0, 100.0, [64, 64]))
    found = read_trace(write_trace(*events), among=range(3))
    assert (found.step, found.repeats) == (2, ())
