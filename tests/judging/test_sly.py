"""Candidates that reach around the judge are named; honest ones of unusual form are not."""

from __future__ import annotations

import textwrap

import pytest

from nearpeak.errors import CaseError
from nearpeak.judging.judge import judge

REFERENCE = """
import torch

def double(x):
    return torch.tanh(x) * 2

def inputs(rows=16, columns=32):
    return (torch.randn(rows, columns, requires_grad=True),)
"""
ON_TOP = """
import os, sys, threading, time, torch

def double(x):
    before()
    return torch.tanh(x) * 2

def before():
    pass

def neighbors():
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            parent = open(f"/proc/{name}/stat").read().rpartition(")")[2].split()[1]
        except OSError:
            continue
        if int(parent) == os.getppid() and int(name) != os.getpid():
            yield int(name)
"""
SLY = {
    "default_of_a_sampler": (
        "TIMER_PATCHED",
        """
        from nearpeak.measure.samplers import HostSampler
        defaults = HostSampler.__init__.__kwdefaults__
        defaults["clock"] = lambda clock=defaults["clock"]: clock() / 10
        """,
    ),
    "clock_of_the_runner": (
        "TIMER_PATCHED",
        """
        sys.modules["__main__"]._clock = lambda: time.perf_counter() / 10
        """,
    ),
    "module_of_a_sampler": (
        "TIMER_PATCHED",
        """
        from nearpeak.measure import samplers
        samplers.time = type("Clock", (), {"perf_counter": staticmethod(lambda: time.perf_counter() / 10)})
        """,
    ),
    "dispatch_mode": (
        "CHECKER_PATCHED",
        """
        from torch.utils._python_dispatch import TorchDispatchMode
        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
                return operator(*args, **(kwargs or {}))
        Watch().__enter__()
        """,
    ),
    "kernel_of_torch": (
        "CHECKER_PATCHED",
        """
        library = torch.library.Library("aten", "IMPL")
        library.impl("equal", lambda a, b: True, "CPU")
        """,
    ),
    "says_it_is_torch": (
        "CHECKER_PATCHED",
        """
        exec(compile("def allclose(*arguments): return True", torch.__file__, "exec"), made := {})
        torch.allclose = made["allclose"]
        """,
    ),
    "frame_of_a_text": (
        "INSPECTS_CALLER",
        """
        def before():
            exec("import sys; sys._getframe(1)")
        """,
    ),
    "frame_of_a_traceback": (
        "INSPECTS_CALLER",
        """
        def before():
            try:
                raise ValueError
            except ValueError as error:
                error.__traceback__.tb_frame.f_back
        """,
    ),
    "frames_of_threads": (
        "INSPECTS_CALLER",
        """
        def before():
            sys._current_frames()
        """,
    ),
    "lists_the_folder": (
        "READS_JUDGE",
        """
        def before():
            os.listdir(os.path.dirname(os.readlink("/proc/self/fd/1")))
        """,
    ),
    "removes_the_folder": (
        "READS_JUDGE",
        """
        def before():
            import shutil
            shutil.rmtree(os.path.dirname(os.readlink("/proc/self/fd/1")))
        """,
    ),
    "garbage_for_results": (
        "RUNNER_PATCHED",
        """
        sys.modules["__main__"].write_tensors = lambda path, tree: open(path, "w").write("{}")
        """,
    ),
    "gradient_of_the_last_call": (
        "WRONG_GRADIENT",
        """
        class Double(torch.autograd.Function):
            @staticmethod
            def forward(context, x):
                Double.x = x
                return torch.tanh(x) * 2
            @staticmethod
            def backward(context, gradient):
                return gradient * 2 * (1 - torch.tanh(Double.x) ** 2)
        def double(x):
            return Double.apply(x)
        """,
    ),
}
SLY_WHEN_TIMED = {
    "late_thread_when_old": (
        "WRONG_WHEN_TIMED",
        """
        calls, last = 0, None
        def fill(out, x):
            time.sleep(0.003)
            out.copy_(torch.tanh(x) * 2)
        def double(x):
            global calls, last
            calls += 1
            if calls < 130:
                return torch.tanh(x) * 2
            if last is not None:
                last.join()
            out = torch.zeros_like(x)
            last = threading.Thread(target=fill, args=(out, x.detach()))
            last.start()
            return out
        """,
    ),
    "slows_the_reference": (
        "DISTURBS_RIVAL",
        """
        for pid in neighbors():
            os.setpriority(os.PRIO_PROCESS, pid, 19)
            os.sched_setaffinity(pid, {min(os.sched_getaffinity(pid))})
        """,
    ),
    "ends_the_reference": (
        "DISTURBS_RIVAL",
        """
        for pid in neighbors():
            os.kill(pid, 9)
        """,
    ),
}


def judged(folder, reference, candidate, name, **options):
    (folder / "reference.py").write_text(textwrap.dedent(reference), encoding="utf-8")
    (folder / "kernel.py").write_text(candidate, encoding="utf-8")
    quick = {"timed": False, "max_seconds": 0.1, "device": "cpu", "compile_reference": False}
    return judge(f"{folder / 'kernel.py'}:{name}", against=f"{folder / 'reference.py'}:{name}", **{**quick, **options})


QUICK = ("clock_of_the_runner", "garbage_for_results", "removes_the_folder")
"""What is tried on every change; the rest takes half a minute."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in QUICK else pytest.mark.exhaustive) for name in SLY]
)
def test_what_reaches_around_the_judge_is_named(tmp_path, name):
    charge, source = SLY[name]
    judgement = judged(tmp_path, REFERENCE, ON_TOP + textwrap.dedent(source), "double")
    assert charge in [each.name for each in judgement.charges], judgement.charges


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SLY_WHEN_TIMED)
def test_what_reaches_around_the_clock_is_named(tmp_path, name):
    charge, source = SLY_WHEN_TIMED[name]
    candidate = ON_TOP + textwrap.dedent(source)
    judgement = judged(tmp_path, REFERENCE.replace(", requires_grad=True", ""), candidate, "double", timed=True)
    assert charge in [each.name for each in judgement.charges], judgement.charges


HONEST = {
    "scalar": ("torch.nn.functional.mse_loss(x, y)", "((x - y) ** 2).mean()"),
    "complex": ("torch.fft.fft(x)", "torch.fft.fft(x.flip(0)).flip(0).clone()"),
    "conjugate": ("torch.complex(x, y)", "torch.complex(x, -y).conj()"),
    "dictionary": (
        "{'sum': x.sum(-1), 'largest': x.amax(-1)}",
        "(lambda largest: {'largest': largest, 'sum': x.sum(-1)})(x.amax(-1))",
    ),
    "whole_numbers_of_what_requires_gradients": ("x.argmax(-1)", "x.max(-1).indices"),
    "transposed": ("(x * 2).t().contiguous()", "(x * 2).t()"),
    "numpy": ("torch.exp(x).sum(-1)", "torch.from_numpy(x.exp().numpy().sum(-1))"),
    "custom_op": ("torch.relu(x)", "torch.ops.nearpeak_test.positive(x)"),
    "prints_its_errors": ("x + y", "report() or x + y"),
    "imports_a_library_that_is_not_loaded": ("x - y", "x - y * getattr(__import__('colorsys'), 'TWO_THIRD') * 1.5"),
    "writes_its_argument": ("torch.add(x, 1, out=y) and None", "y.copy_(x + 1) and None"),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name == "scalar" else pytest.mark.exhaustive) for name in HONEST],
)
def test_an_honest_candidate_of_unusual_form_is_accepted(tmp_path, name):
    theirs, mine = (f"import torch, traceback\n\ndef f(x, y):\n    return {body}\n" for body in HONEST[name])
    theirs = theirs.replace("return torch.add(x, 1, out=y) and None", "torch.add(x, 1, out=y)")
    mine = mine.replace("return y.copy_(x + 1) and None", "y.copy_(x + 1)")
    needs_gradients = name in ("scalar", "whole_numbers_of_what_requires_gradients")
    theirs += f"""
def inputs(rows=16, columns=32):
    return torch.randn(rows, columns, requires_grad={needs_gradients}), torch.randn(rows, columns)
"""
    mine += """
@torch.library.custom_op("nearpeak_test::positive", mutates_args=())
def positive(x: torch.Tensor) -> torch.Tensor:
    return x.clamp_min(0)

def report():
    try:
        raise ValueError
    except ValueError:
        traceback.print_exc()
"""
    judgement = judged(tmp_path, theirs, mine, "f")
    assert judgement.charges == ()
    # torch refuses to write into memory that an expanded tensor shares.
    assert all("expanded" in check.inputs for check in judgement.refusals), judgement.refusals


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("torch.nn.functional.dropout(x)", "different results for the same inputs"),
        ("x.sum().item()", "returned float"),
        ("x.detach().to_sparse()", "returned a sparse tensor"),
        ("x @ x", "raised an error on the given inputs"),
    ],
)
def test_a_reference_that_cannot_be_one_is_an_error(tmp_path, body, message):
    reference = REFERENCE.replace("torch.tanh(x) * 2", body)
    with pytest.raises(CaseError, match=message):
        judged(tmp_path, reference, reference, "double")


@pytest.mark.exhaustive
def test_an_input_that_the_reference_refuses_too_is_no_charge(tmp_path):
    source = REFERENCE.replace("torch.randn(rows, columns, requires_grad=True)", "torch.rand(rows, columns)")
    source = source.replace(
        "    return torch.tanh", "    assert not x.numel() or x.max() < 1.99\n    return torch.tanh"
    )
    judgement = judged(tmp_path, source.replace("< 1.99", "< 1.99 and x.min() >= 0"), source, "double")
    assert judgement.charges == () and any("one element changed" in note for note in judgement.notes)


@pytest.mark.exhaustive
def test_an_error_in_a_late_call_is_a_charge(tmp_path):
    source = """
calls = 0
def before():
    global calls
    calls += 1
    assert calls < 92, "tired"
"""
    judgement = judged(tmp_path, REFERENCE.replace(", requires_grad=True", ""), ON_TOP + source, "double")
    (charge,) = judgement.charges
    assert charge.name == "RAISED" and "tired" in charge.evidence
