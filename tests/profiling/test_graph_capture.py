"""Programs that capture CUDA graphs while they are profiled: they run as they do alone."""

import subprocess
import sys
from textwrap import dedent, indent

import pytest

from nearpeak.profiling.session import Session
from nearpeak.profiling.steps import StepKind, detect_steps
from nearpeak.trace import guard

CAPTURES = {
    "by_hand": """
        static = torch.randn(16, 64, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model(static)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = model(static)
        def call(x):
            static.copy_(x)
            graph.replay()
            return result
""",
    "make_graphed_callables": """
        call = torch.cuda.make_graphed_callables(model, (torch.randn(16, 64, device="cuda"),))
""",
    "reduce_overhead": """
        call = torch.compile(model, mode="reduce-overhead")
""",
    "on_another_thread": """
        def capture():
            graph = torch.cuda.CUDAGraph()
            static = torch.randn(16, 64, device="cuda")
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                static.mul_(2)
                captured.wait(0.3)
        captured = threading.Event()
        thread = threading.Thread(target=capture)
        thread.start()
""",
}
SCRIPT = """
import sys, threading, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64)).cuda()
call = model
inputs = [torch.randn(16, 64, device="cuda") for _ in range(80)]
total = 0.0
with torch.no_grad():
    for number, x in enumerate(inputs):
        if number == {at}:
{capture}
        total += call(x).double().sum().item()
print(f"{{total:.6e}}")
sys.exit(5)
"""


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 3, 10, 18])
@pytest.mark.parametrize("capture", CAPTURES)
def test_a_script_that_captures_a_graph_ends_as_it_does_alone(tmp_path, capture, at):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(at=at, capture=indent(dedent(CAPTURES[capture]), " " * 12)))
    alone = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=200)
    assert alone.returncode == 5, alone.stderr
    command = [sys.executable, "-m", "nearpeak", "profile", "--on", "h200-sxm", str(script)]
    profiled = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert profiled.returncode == 5, profiled.stderr
    assert profiled.stdout.startswith(alone.stdout), profiled.stdout
    assert "capturing" not in profiled.stderr


@pytest.fixture
def capturing(monkeypatch):
    monkeypatch.setattr(guard._Captures, "open", set())
    monkeypatch.setattr(guard._Captures, "begun", guard._Captures.begun)

    def begin():
        guard._Captures.open.add(1)
        guard._Captures.begun += 1

    return begin


def test_what_ends_during_a_capture_is_no_step_and_touches_no_device(capturing, monkeypatch):
    session = Session(lambda line: None)
    session.step_ends()
    monkeypatch.setattr("nearpeak.profiling.session.synchronize", lambda: pytest.fail("a call to the device"))
    capturing()
    for _ in range(40):
        session.step_ends()
    session.abandon()
    assert session.schedule.steps == 1
    assert session.schedule.phase == "warm-up"


def test_a_step_with_a_capture_is_of_another_kind():
    assert not StepKind(captured=True).is_similar(StepKind())


def test_ops_of_a_capture_are_not_recorded(capturing):
    import torch

    from nearpeak.trace.live import LiveTrace

    live = LiveTrace()
    torch.ones(3).add_(1)
    capturing()
    torch.ones(3).mul_(1)
    assert [op.packet for op in live.stop().ops] == ["aten.ones", "aten.add_"]


def test_the_class_of_graphs_is_left_as_it_was():
    import torch

    before = dict(vars(torch.cuda.CUDAGraph))
    with detect_steps(Session(lambda line: None)):
        assert vars(torch.cuda.CUDAGraph)["capture_begin"] is not before.get("capture_begin")
    assert dict(vars(torch.cuda.CUDAGraph)) == before
