import gzip
import json
from pathlib import Path

import pytest

import nearpeak
from nearpeak.errors import UnknownMachine, UsageError
from nearpeak.machines.catalogue import find
from nearpeak.profiles import file as profiles_file
from nearpeak.profiling.load import profile_trace

DATA = Path(__file__).parents[1] / "data"


def device_seconds(path):
    """The durations of everything on the device, read as plainly as can be."""
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    return sum(event["dur"] for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")) / 1e6


@pytest.mark.parametrize("name", ["kineto_eager.json.gz", "kineto_compiled.json.gz"])
def test_a_trace_file_is_accounted_for(name):
    found = profile_trace(DATA / name)
    assert found.device == "NVIDIA H200"
    assert found.machine == "h200-sxm"
    assert sum(part.seconds for part in found.waterfall.parts) == pytest.approx(found.wall_s)
    assert found.kernel_s == pytest.approx(device_seconds(DATA / name), rel=1e-3)  # one stream: nothing overlaps
    assert found.waterfall.broken == ()


def test_load_takes_both_kinds_of_file(tmp_path):
    found = nearpeak.load(DATA / "kineto_eager.json.gz")
    profiles_file.save(found, tmp_path / "run.json")
    assert nearpeak.load(tmp_path / "run.json") == found


@pytest.mark.parametrize("ceilings", ["achievable", "theoretical"])
def test_the_ceilings_of_the_bounds_are_in_the_profile(ceilings):
    found = profile_trace(DATA / "kineto_eager.json.gz", on="a100-sxm-80gb", ceilings=ceilings)
    rates = getattr(find("a100-sxm-80gb"), ceilings)
    assert found.ceilings.bandwidth == rates.bandwidth
    assert found.ceilings.matrix == rates.matrix and found.ceilings.vector == rates.vector
    assert (found.rank, found.world_size) == (None, None)


def test_compiled_kernels_have_their_origin():
    found = profile_trace(DATA / "kineto_compiled.json.gz")
    assert {op.origin for op in found.ops if op.name.startswith("inductor.")} == {"inductor"}


def test_another_machine_has_other_bounds():
    here, there = (profile_trace(DATA / "kineto_eager.json.gz", on=name) for name in ("h200-sxm", "a100-sxm-80gb"))
    assert there.as_written_s > here.as_written_s
    assert there.kernel_s == here.kernel_s
    with pytest.raises(UnknownMachine):
        profile_trace(DATA / "kineto_eager.json.gz", on="h200-sxn")


def test_a_trace_without_a_device_says_what_to_do(tmp_path):
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        torch.randn(4, 4) @ torch.randn(4, 4)
    profiler.export_chrome_trace(str(tmp_path / "cpu.json"))
    with pytest.raises(UsageError, match="no kernels of a device"):
        profile_trace(tmp_path / "cpu.json")


def test_a_recording_that_began_while_the_device_was_behind():
    """18 kernels and 18 fills of unrecorded steps, 6.1 ms of them, run at the start of the recorded one."""
    found = profile_trace(DATA / "kineto_behind.json.gz")
    assert found.modeled_share == 1.0
    assert found.wall_s == pytest.approx(8.21e-3, rel=0.01)  # by the script's own clock 8.5 ms
    assert device_seconds(DATA / "kineto_behind.json.gz") - found.kernel_s == pytest.approx(6.09e-3, rel=0.01)
    assert found.completeness is not None and found.completeness.losses == ()
    assert any("36 kernels of 6.094 ms were launched before the recording began" in note for note in found.notes)


def test_a_recording_around_the_capture_of_a_graph():
    """Eight layers run, are captured twenty times, and replayed once."""
    found = profile_trace(DATA / "kineto_capture.json.gz")
    assert sum(op.name == "aten.addmm.default" for op in found.ops) == 8
    assert found.waterfall.broken == ()
    assert found.completeness is not None and found.completeness.losses == ()
    assert sum(kernel.in_graph for kernel in found.timeline) == 160
    assert found.rates is not None and found.rates.mfu is not None and found.rates.mfu < 0.01
