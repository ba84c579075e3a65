"""Profiles of steps that only replay a CUDA graph."""

import pytest
import torch
from replays import IN_GRAPH, event, write_events, write_replays

import nearpeak
from nearpeak.cli.main import main
from nearpeak.profiling import session
from nearpeak.profiling.load import profile_trace
from nearpeak.render.text import text
from nearpeak.render.views.profile import ReportOptions, document
from nearpeak.trace.kineto.read import read_trace

NOTE = "3 kernels of 0.060 ms were launched by CUDA graphs and have no ops, so they are measured without bounds."


FLOATS = {"Input Dims": [[64, 64]], "Input Strides": [[64, 1]], "Input type": ["float"], "Concrete Inputs": [""]}


@pytest.fixture
def profiler_sees(monkeypatch, tmp_path):
    """Makes torch's profiler one that sees what a file has, since there is no GPU."""

    def use(write):
        class Profiler:
            number = 1

            def next_step(self):
                pass

            def discard(self):
                pass

            def stop(self, among):
                return read_trace(write(tmp_path / "step.json"))

        monkeypatch.setattr(session, "Profiler", Profiler)

    return use


@pytest.fixture
def replayed(profiler_sees):
    """The profile of a run whose profiler sees replays of a graph; here, a step does nothing."""
    profiler_sees(write_replays)
    return nearpeak.profile(lambda: None, on="h200-sxm")


@pytest.mark.parametrize("launch", [5.0, 60.0])  # microseconds: a long graph runs while it is launched
def test_gaps_inside_of_a_graph_are_between_queued_kernels(tmp_path, launch):
    found = profile_trace(write_replays(tmp_path / "step.json", launch=launch))
    queued = [cause for cause in found.idle if cause.what == "between queued kernels"]
    assert sum(cause.seconds for cause in queued) == pytest.approx(4e-6)
    assert [cause.count for cause in queued] == [2]
    assert sum(cause.seconds for cause in found.idle) == pytest.approx(40e-6)


def test_a_file_of_replays_has_times_and_no_bounds(tmp_path):
    found = profile_trace(write_replays(tmp_path / "step.json"))
    assert found.wall_s == pytest.approx(100e-6)
    assert found.kernel_s == found.waterfall.seconds("not modeled") == pytest.approx(60e-6)
    assert found.waterfall.seconds("idle") == pytest.approx(40e-6)
    assert (found.modeled_share, found.ideal_s, found.ops, found.findings) == (0.0, 0.0, (), ())
    assert found.notes == (NOTE,)


def test_a_run_of_replays_has_times_and_no_bounds(replayed):
    assert replayed.kernel_s == replayed.waterfall.seconds("not modeled") == pytest.approx(60e-6)
    assert sum(part.seconds for part in replayed.waterfall.parts) == pytest.approx(replayed.wall_s)
    assert sum(cause.seconds for cause in replayed.idle) == pytest.approx(replayed.waterfall.seconds("idle"))
    assert (replayed.modeled_share, replayed.ideal_s, replayed.ops, replayed.memory) == (0.0, 0.0, (), None)
    assert replayed.steps > 0
    assert any(note.startswith(f"{NOTE[:-1]}: their graphs were captured before") for note in replayed.notes)


def test_beside_ops_graphs_are_no_ops_that_a_trace_has_lost(profiler_sees):
    beside = [
        event("user_annotation", "ProfilerStep#1", 0.0, 100.0, {}),
        event("cpu_op", "aten::exp", 10.0, 10.0, {"External id": 1} | FLOATS),
        event("cuda_runtime", "cudaLaunchKernel", 12.0, 5.0, {"correlation": 1}),
        event("kernel", "exp", 20.0, 10.0, {"correlation": 1, "External id": 1, "device": 0, "stream": 7}),
        event("cuda_runtime", "cudaGraphLaunch", 30.0, 5.0, {"correlation": 2}),
        event("kernel", "k", 40.0, 10.0, IN_GRAPH | {"correlation": 2}),
    ]
    profiler_sees(lambda path: write_events(path, beside))
    found = nearpeak.profile(torch.ones(64, 64).exp, on="h200-sxm")
    assert [(op.name, op.kernels) for op in found.ops] == [("aten.exp.default", 1)]
    assert found.matched == 1.0
    assert found.waterfall.seconds("not modeled") == pytest.approx(10e-6)
    assert any(note.startswith("1 kernels of 0.010 ms were launched by CUDA graphs") for note in found.notes)


@pytest.mark.parametrize("by", ["op", "module", "line", "phase", "family"])
def test_reports_of_replays(replayed, tmp_path, by):
    for profile in (replayed, profile_trace(write_replays(tmp_path / "step.json"))):
        report = text(document(profile, ReportOptions(by=by)))
        assert max(map(len, report.splitlines())) <= 80
        assert "Modeled: 0.0 % of the 60.0 us in which kernels ran." in report
        assert NOTE[:-1] in " ".join(report.split())


def test_replays_on_the_command_line(tmp_path, capsys):
    path = write_replays(tmp_path / "step.json")
    assert main(["profile", "--full", "--trace", str(path), "--save", str(tmp_path / "run.json")]) == 0
    assert NOTE in " ".join(capsys.readouterr().out.split())
    assert nearpeak.load(tmp_path / "run.json") == profile_trace(path)
