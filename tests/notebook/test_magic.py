"""The magics, in a shell of IPython where that is installed and in a stand-in everywhere."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from nearpeak import load_ipython_extension
from nearpeak.errors import UsageError
from nearpeak.measure.timing import Timing
from nearpeak.notebook import parse_magic
from nearpeak.profiles.profile import Profile


class Shell:
    """As much of a shell as the magics use."""

    def __init__(self) -> None:
        self.user_ns = {"torch": torch, "calls": [], "x": torch.randn(16, 16)}
        self.magics = {}
        self.compile = SimpleNamespace(flags=0)
        self.displayhook = SimpleNamespace(prompt_count=7)
        self.shown = {}
        formatter = SimpleNamespace(
            for_type_by_name=lambda module, name, show: self.shown.update({(module, name): show})
        )
        self.display_formatter = SimpleNamespace(formatters={"text/plain": formatter})

    def register_magic_function(self, function, magic_kind, magic_name):
        self.magics[magic_kind, magic_name] = function

    def transform_cell(self, source):
        return source.lstrip("\n") + "\n"

    def line(self, line):
        return self.magics["line", "nearpeak"](line)

    def cell(self, line, cell):
        return self.magics["cell", "nearpeak"](line, cell)


@pytest.fixture
def shell() -> Shell:
    found = Shell()
    load_ipython_extension(found)
    return found


def test_loading_changes_no_environment():
    before = dict(os.environ)
    load_ipython_extension(Shell())
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ("f(x)", {"code": "f(x)", "verb": "profile", "on": None, "into": None}),
        ("--bench f(x)", {"code": "f(x)", "verb": "bench"}),
        ("--on h100-sxm  f( x )", {"code": "f( x )", "on": "h100-sxm"}),
        ("--on=h100-sxm --into p f(--x)", {"code": "f(--x)", "on": "h100-sxm", "into": "p"}),
        ("--ceilings theoretical f()", {"code": "f()", "ceilings": "theoretical"}),
        ("--bench --max-seconds 0.5", {"code": "", "max_seconds": 0.5}),
        ("--quiet -- --x", {"code": "--x", "quiet": True}),
        ("-x", {"code": "-x"}),
        ("", {"code": ""}),
    ],
)
def test_options(line: str, fields: dict[str, object]):
    asked = parse_magic(line)
    assert {name: getattr(asked, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--bnch f()", "no option '--bnch'. Did you mean '--bench'"),
        ("--bench=3 f()", "no option '--bench'"),
        ("--on", "--on needs a value"),
        ("--on=", "--on needs a value"),
        ("--bench --on h100-sxm f()", "--on is not for --bench"),
        ("--max-seconds 3 f()", "--max-seconds is for --bench"),
        ("--bench --repeat f()", "--repeat is not for --bench"),
        ("--bench --max-seconds soon f()", "seconds are a number above 0"),
        ("--bench --max-seconds -1 f()", "seconds are a number above 0"),
        ("--ceilings high f()", "Valid: 'achievable', 'theoretical'"),
        ("--into a.b f()", "no name of a variable"),
    ],
)
def test_mistakes(line: str, message: str):
    with pytest.raises(UsageError) as raised:
        parse_magic(line)
    assert message in str(raised.value)


def test_a_cell_is_profiled_as_a_step(shell: Shell):
    code = "calls.append(1)\ny = torch.mm(x, x)\n\nz = y.relu().sum()\n"
    result = shell.cell("--on h100-sxm --quiet --into kept", code)
    assert isinstance(result, Profile)
    assert shell.user_ns["kept"] is result
    assert result.source == "cell 7"
    assert len(shell.user_ns["calls"]) > 5
    assert shell.user_ns["z"].shape == ()  # what a cell assigns stays
    # Lines as the notebook counts them, from that of the magic.
    assert {op.source for op in result.ops if "mm" in op.name} == {"cell 7:3"}
    assert {op.source for op in result.ops if "relu" in op.name} == {"cell 7:5"}


@pytest.mark.slow
def test_a_line_is_timed(shell: Shell):
    result = shell.line("--bench --quiet --max-seconds 0.05 torch.mm(x, x)")
    assert isinstance(result, Timing)
    assert (result.kind, result.name) == ("cpu", "cell 7") or torch.cuda.is_available()


def test_empty_lines_at_the_beginning_count(shell: Shell):
    with pytest.raises(ZeroDivisionError) as raised:
        shell.cell("--on h100-sxm --quiet", "\n\n1 / 0\n")
    last = raised.traceback[-1]
    assert (str(last.path).endswith("cell 7"), last.lineno + 1) == (True, 4)


@pytest.mark.slow
def test_annotations_are_those_of_the_notebook_and_not_of_this_package(shell: Shell):
    shell.cell("--bench --quiet --max-seconds 0.01", "def f(a: int): pass\nkind = type(f.__annotations__['a'])\n")
    assert shell.user_ns["kind"] is type


@pytest.mark.slow
def test_progress_goes_to_stderr_outside_of_a_notebook(shell: Shell, capsys: pytest.CaptureFixture[str]):
    shell.line("--bench --max-seconds 0.05 torch.mm(x, x)")
    captured = capsys.readouterr()
    assert "cell 7: probing" in captured.err and captured.out == ""


@pytest.mark.slow
def test_results_as_text_for_a_terminal(shell: Shell):
    assert {"Timing", "Estimate", "Profile", "Machine", "TrainingPlan"} <= {name for _, name in shell.shown}
    result = shell.line("--bench --quiet --max-seconds 0.05 torch.mm(x, x)")
    printed: list[str] = []
    shell.shown["nearpeak.measure.timing", "Timing"](result, SimpleNamespace(text=printed.append), False)
    assert "cpu time, cold cache" in printed[0] or torch.cuda.is_available()


@pytest.fixture(scope="module")
def ipython():
    interactive = pytest.importorskip("IPython.core.interactiveshell", reason="IPython is not installed")
    config = pytest.importorskip("traitlets.config").Config()
    config.HistoryManager.enabled = False
    shell = interactive.InteractiveShell(config=config)
    shell.run_cell("%load_ext nearpeak")
    shell.user_ns.update(torch=torch, x=torch.randn(16, 16))
    yield shell
    shell.history_manager.end_session()


def test_in_ipython_a_line_can_be_assigned(ipython):
    ran = ipython.run_cell("p = %nearpeak --on h100-sxm --quiet torch.mm(x, x)")
    ran.raise_error()
    assert isinstance(ipython.user_ns["p"], Profile)


def test_in_ipython_a_cell_gives_its_result_as_html_and_as_text(ipython):
    ran = ipython.run_cell("%%nearpeak --on h100-sxm --quiet\ny = torch.mm(x, x)")
    ran.raise_error()
    assert isinstance(ran.result, Profile)
    forms, _ = ipython.display_formatter.format(ran.result)
    assert forms["text/plain"].startswith("Verdict:")
    assert forms["text/html"].startswith("<div")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("%nearpeak --bnch x", "no option '--bnch'"),
        ("%nearpeak --bench", "There is no code to run"),
        ("%%nearpeak --bench x\nx", "takes its code from the cell, and got 'x' on its line"),
        ("%nearpeak --on nowhere x", "nowhere"),
    ],
)
def test_in_ipython_a_mistake_is_a_line_and_no_traceback(ipython, capsys, code: str, message: str):
    ran = ipython.run_cell(code)
    assert type(ran.error_in_exec).__module__ == "IPython.core.error"
    captured = capsys.readouterr()
    assert message in captured.err + captured.out
    assert "Traceback" not in captured.err + captured.out


def test_in_ipython_an_error_of_the_code_is_its_own(ipython, capsys):
    ran = ipython.run_cell("%nearpeak --on h100-sxm --quiet 1 / 0")
    assert isinstance(ran.error_in_exec, ZeroDivisionError)


LOOP = """
for _ in range({steps}):
    calls.append(1)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def trained(shell: Shell) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16)
    shell.user_ns.update(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), x=torch.ones(4, 16))
    return model


@pytest.fixture
def usage_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """IPython's error for magics, whether or not it is installed."""
    error = ModuleType("IPython.core.error")
    error.UsageError = type("UsageError", (Exception,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython.core.error", error)


def test_a_loop_runs_once_and_its_steps_are_profiled(shell: Shell):
    model = trained(shell)
    exec(LOOP.format(steps=60), shell.user_ns)
    expected, shell.user_ns["calls"] = model.weight.clone(), []
    model = trained(shell)
    result = shell.cell("--on h100-sxm --quiet", LOOP.format(steps=60))
    assert isinstance(result, Profile)
    assert len(shell.user_ns["calls"]) == 60
    assert torch.equal(model.weight, expected)
    assert {op.source for op in result.ops if op.phase == "forward" and "mm" in op.name} == {"cell 7:5"}


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (LOOP.format(steps=5), "cell 7 took 5 steps"),
        ("for _ in range(3):\n    calls.append(1)\n    model(x).sum().backward()", "3 calls of modules with gradients"),
        (
            "with torch.no_grad():\n    for _ in range(4):\n        calls.append(model(x))\n" + LOOP.format(steps=1),
            "1 step",
        ),
    ],
)
def test_a_loop_of_few_steps_is_not_run_again(shell: Shell, usage_errors, code: str, message: str):
    trained(shell)
    with pytest.raises(Exception, match=message) as raised:
        shell.cell("--on h100-sxm --quiet", code)
    assert type(raised.value).__name__ == "UsageError"
    assert "is not run again" in str(raised.value) and "--repeat" in str(raised.value)
    calls = len(shell.user_ns["calls"])
    trained(shell)
    shell.user_ns["calls"] = []
    exec(code, shell.user_ns)
    assert calls == len(shell.user_ns["calls"])


@pytest.mark.parametrize(
    "code",
    [
        "loss = torch.nn.MSELoss()(model(x), x)\nloss.backward()",
        "with torch.no_grad():\n    loss = torch.nn.MSELoss()(model(x), x)",
        "for _ in range(3):\n    model(x).sum().backward()\noptimizer.step()",
        "for _ in range(3):\n    loss = (x @ x.mT).sum()",
    ],
)
def test_several_modules_gradient_accumulation_and_plain_ops_are_one_step(shell: Shell, code: str):
    trained(shell)
    assert isinstance(shell.cell("--on h100-sxm --quiet", "calls.append(1)\n" + code), Profile)
    assert len(shell.user_ns["calls"]) > 10


def test_one_step_is_repeated_and_a_loop_if_asked_to(shell: Shell):
    trained(shell)
    assert isinstance(shell.cell("--on h100-sxm --quiet", LOOP.format(steps=1)), Profile)
    assert len(shell.user_ns["calls"]) > 10
    shell.user_ns["calls"] = []
    assert isinstance(shell.cell("--on h100-sxm --quiet --repeat", LOOP.format(steps=2)), Profile)
    assert len(shell.user_ns["calls"]) > 20


def test_an_error_in_a_loop_is_its_own_and_ends_it(shell: Shell):
    trained(shell)
    with pytest.raises(ZeroDivisionError):
        shell.cell("--on h100-sxm --quiet", LOOP.format(steps=30) + "    1 / (len(calls) < 7)\n")
    assert len(shell.user_ns["calls"]) == 7
    assert "step" not in vars(shell.user_ns["optimizer"])
