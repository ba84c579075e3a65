"""Profiles of made trace files: captures, replays, lost kernels, ROCm."""

from pathlib import Path

import pytest

from nearpeak.errors import UsageError
from nearpeak.profiles.profile import Profile
from nearpeak.profiling.load import profile_trace
from nearpeak.render.text import text
from nearpeak.render.views.profile import document
from nearpeak.render.views.verdict import sentences
from tests.made_traces import MadeTrace, T

MATRIX = T(4096, 4096)
MI300X = {"name": "AMD Instinct MI300X", "computeMajor": 9, "computeMinor": 4, "warpSize": 64}
MI250X = {"name": "AMD Instinct MI250X", "computeMajor": 9, "computeMinor": 0, "warpSize": 64}


def advice(profile: Profile) -> str:
    """All that a report says."""
    return text(document(profile)) + " ".join(sentences(profile, profile.findings).values())


def a_step(trace: MadeTrace) -> None:
    for _ in range(3):
        trace.op("aten::mm", MATRIX, MATRIX, us=300)


@pytest.mark.parametrize("runtime", ["cuda", "hip"])
@pytest.mark.parametrize("recorded", [True, False])
def test_ops_that_were_captured_did_not_run(tmp_path: Path, runtime: str, recorded: bool):
    """With `recorded`, begin and end of the capture are in the file; the instantiation that follows always is."""
    trace, alone = (MadeTrace(runtime=runtime) for _ in range(2))
    for made in (trace, alone):
        a_step(made)
    if recorded:
        trace.launch(f"{runtime}StreamBeginCapture", None)
    for _ in range(50):
        trace.op("aten::mm", MATRIX, MATRIX, us=None)
        trace.launch(f"{runtime}LaunchKernel", None)
    if recorded:
        trace.launch(f"{runtime}StreamEndCapture", None)
    trace.launch(f"{runtime}GraphInstantiate", None)
    found, expected = (profile_trace(made.write(tmp_path / "trace.json"), on="h200-sxm") for made in (trace, alone))
    assert found.as_written_s == expected.as_written_s > 0.0
    assert found.flops == expected.flops
    assert found.waterfall.broken == ()
    assert found.completeness is not None and found.completeness.complete
    assert any("50 ops were recorded into CUDA graphs and did not run" in note for note in found.notes)


def test_ops_whose_kernels_are_lost_are_not_in_the_floors(tmp_path: Path):
    trace, alone = MadeTrace(), MadeTrace()
    for made in (trace, alone):
        a_step(made)
    for _ in range(50):
        trace.op("aten::mm", MATRIX, T(4096, 64), us=None)
        trace.launch("cudaLaunchKernel", None, at=trace.now - 9)
    found, expected = (profile_trace(made.write(tmp_path / "trace.json")) for made in (trace, alone))
    assert found.as_written_s == pytest.approx(expected.as_written_s)
    assert found.waterfall.broken == ()
    assert found.completeness is not None
    assert [(loss.kind, loss.count) for loss in found.completeness.of_step] == [("kernels", 50)]
    assert found.completeness.lost_share == pytest.approx(50 / 53)


@pytest.mark.parametrize("launch", ["cudaGraphLaunch", "hipGraphLaunch"])
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("us", [2, 200])
def test_a_step_of_graph_launches_is_not_told_to_use_graphs(tmp_path: Path, launch: str, beside: bool, us: float):
    """The device waits for slow launches of graphs, or is busy with their kernels; with `beside`, an op runs too."""
    trace = MadeTrace(runtime=launch[: -len("GraphLaunch")])
    trace.event("user_annotation", "ProfilerStep#1", 0.0, 5000.0)
    if beside:
        trace.op("aten::mm", T(64, 64), T(64, 64), us=5)
    for _ in range(5):
        trace.launch(launch, us, *(f"kernel{n}" for n in range(5)), at=trace.now)
        call = next(event for event in reversed(trace.events) if event["name"] == launch)
        call["dur"] = 900.0
        for kernel in trace.events[-5:]:
            kernel["ts"] = max(kernel["ts"], trace.now + 890.0 + us * (int(kernel["name"][-1]) - 5))
        trace.now += 910.0
    found = profile_trace(trace.write(tmp_path / "trace.json"), on="h200-sxm")
    assert "launch-bound" not in {finding.rule for finding in found.findings}
    report = advice(found)
    assert "declare_cost" not in report
    assert "reduce-overhead" not in report
    assert "CUDA graphs (" not in report


def test_ops_beside_a_graph_are_told_to_be_launched_by_one(tmp_path: Path):
    trace = MadeTrace()
    trace.event("user_annotation", "ProfilerStep#1", 0.0, 10000.0)
    trace.launch("cudaGraphLaunch", 10, "kernel")
    for _ in range(400):
        trace.op("aten::mm", T(64, 64), T(64, 64), us=2)
        trace.now += 10
    found = profile_trace(trace.write(tmp_path / "trace.json"))
    assert "launch-bound" in {finding.rule for finding in found.findings}


@pytest.mark.parametrize(("properties", "machine"), [(MI300X, "mi300x"), (MI250X, "mi250x-gcd")])
def test_a_rocm_trace_has_its_device_by_name(tmp_path: Path, properties: dict[str, object], machine: str):
    """Kernels have the number of an agent: the CPUs of the machine are agents too."""
    trace = MadeTrace(runtime="hip", agent=4, properties=properties)
    for dtype in ("bfloat16", "float32"):
        trace.op("aten::mm", T(4096, 4096, dtype=dtype), T(4096, 4096, dtype=dtype), us=9000, kernel="Cijk_Ailk_Bljk")
    trace.launch("hipExtModuleLaunchKernel", 10, "attn_fwd")
    found = profile_trace(trace.write(tmp_path / "trace.json"))
    assert (found.device, found.machine) == (properties["name"], machine)
    assert found.modeled_share > 0.99
    assert found.waterfall.broken == ()
    assert found.completeness is not None and found.completeness.complete


def test_a_rocm_trace_of_several_devices_of_one_kind(tmp_path: Path):
    trace = MadeTrace(runtime="hip", agent=9, properties=MI300X)
    trace.fields["deviceProperties"] = [{"id": number, **MI300X} for number in range(8)]
    a_step(trace)
    assert profile_trace(trace.write(tmp_path / "trace.json")).machine == "mi300x"


@pytest.mark.parametrize(
    "names", [["AMD Radeon Graphics"], ["gfx1234"], [""], ["AMD Instinct MI300X", "AMD Instinct MI210"]]
)
def test_a_device_that_is_not_known_is_an_error_that_says_how_to_go_on(tmp_path: Path, names: list[str]):
    trace = MadeTrace(runtime="hip", agent=9, properties=MI300X)
    trace.fields["deviceProperties"] = [{"id": n, **MI300X, "name": name} for n, name in enumerate(names)]
    a_step(trace)
    path = trace.write(tmp_path / "trace.json")
    with pytest.raises(UsageError, match=f"{' or '.join(names) or 'unknown device'}.* --on .*machine --list"):
        profile_trace(path)
    assert profile_trace(path, on="mi300x").machine == "mi300x"


def test_the_device_waits_while_the_host_computes(tmp_path: Path):
    """Ops on host tensors between launches: that is no slow launching, and a graph would not help."""
    trace = MadeTrace()
    for _ in range(5):
        trace.op("aten::mm", MATRIX, MATRIX, us=300)
        trace.op("aten::add", MATRIX, MATRIX, 1, us=None)
        trace.events[-1]["dur"] = 4000.0
        trace.now += 4000.0
    trace.op("aten::mm", MATRIX, MATRIX, us=300)
    found = profile_trace(trace.write(tmp_path / "trace.json"))
    largest = found.idle[0]
    assert (largest.cause, largest.what, largest.count) == ("host ops", "add", 5)
    assert largest.seconds == pytest.approx(5 * 3.7e-3, rel=0.02)
    assert "launch-bound" not in {finding.rule for finding in found.findings}
    assert "Compute that on the device" in sentences(found)["Next"]
