"""Programs of kinds that nearpeak was not built with: they end as they do alone, and what was captured is kept."""

import os
import subprocess
import sys
import threading
from textwrap import dedent

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks

import nearpeak
from nearpeak.cli.main import main
from nearpeak.profiling.script import profile_script

TRAIN = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
def step():
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LOOP = "for _ in range(61): step()\n"

PROGRAMS = {
    "a padding mask of an encoder": """
        import torch, warnings
        warnings.simplefilter("ignore")  # torch's, about nested tensors
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        encoder = torch.nn.TransformerEncoder(layer, 1).eval()
        mask = torch.zeros(4, 10, dtype=torch.bool)
        mask[1:, 6:] = True
        with torch.no_grad():
            for _ in range(45):
                encoder(torch.randn(4, 10, 16), src_key_padding_mask=mask)
    """,
    "a lazy module that is never called": """
        import torch
        model = torch.nn.Linear(4, 4)
        model.never = torch.nn.LazyLinear(4)
        optimizer = torch.optim.SGD([model.weight], lr=0.1)
        for _ in range(61):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    """,
    "children that cannot be listed": """
        import torch
        class Odd(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(4, 4)
            def named_modules(self, *args, **kwargs):
                raise RuntimeError("none of your business")
            named_children = children = named_modules
            def forward(self, x):
                return self.layer(x)
        model = Odd()
        with torch.no_grad():
            for _ in range(61):
                model(torch.ones(2, 4))
    """,
    "a subclass of tensors without flattening": """
        import torch
        from torch.utils._pytree import tree_map_only
        class Wrapped(torch.Tensor):
            @staticmethod
            def __new__(cls, inner):
                wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype)
                wrapped.inner = inner
                return wrapped
            @classmethod
            def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
                args, kwargs = tree_map_only(Wrapped, lambda tensor: tensor.inner, (args, kwargs or {}))
                return tree_map_only(torch.Tensor, Wrapped, function(*args, **kwargs))
        model = torch.nn.Linear(4, 4)
        with torch.no_grad():
            for _ in range(61):
                result = model(Wrapped(torch.ones(2, 4)))
        assert type(result) is Wrapped
    """,
    "a class that forbids changes": """
        import torch
        class Frozen(type):
            def __setattr__(cls, name, value):
                raise AttributeError(name)
        class Model(torch.nn.Module, metaclass=Frozen):
            def forward(self, x):
                return x + 1
        model = Model()
        with torch.no_grad():
            for _ in range(61):
                model(torch.ones(2))
    """,
    "an optimizer that steps in the backward pass": """
        import torch
        weight = torch.nn.Parameter(torch.ones(4))
        model = torch.nn.ParameterList([weight])
        optimizer = torch.optim.SGD([weight], lr=0.1)
        weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        layer = torch.nn.Identity()
        for _ in range(61):
            layer(weight * 2).sum().backward()
    """,
    "a patch of the program's own": """
        import torch
        original, calls = torch.nn.Module.__call__, 0
        def counting(module, *args, **kwargs):
            global calls
            calls += 1
            return original(module, *args, **kwargs)
        model = torch.nn.Linear(2, 2)
        with torch.no_grad():
            for number in range(61):
                if number == 6:
                    original = torch.nn.Module.__call__
                    torch.nn.Module.__call__ = counting
                model(torch.ones(2, 2))
        assert calls == 55, calls
        torch.nn.Module.__call__ = original
    """,
    "a mode of the program's own": """
        import torch
        from torch.overrides import TorchFunctionMode
        class Counting(TorchFunctionMode):
            calls = 0
            def __torch_function__(self, function, types, args=(), kwargs=None):
                Counting.calls += 1
                return function(*args, **(kwargs or {}))
        model = torch.nn.Linear(2, 2)
        x = torch.ones(2, 2)
        with torch.no_grad(), Counting():
            for _ in range(61):
                model(x)
        assert Counting.calls == 61, Counting.calls
    """,
    "a pool that is left open": TRAIN
    + "from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(1)\n"
    + "assert pool.submit(int, 3).result() == 3\n"
    + LOOP,
}


@pytest.fixture
def write(tmp_path):
    def written(source):
        path = tmp_path / "script.py"
        path.write_text(dedent(source))
        return path

    return written


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_ends_as_it_does_alone_and_nothing_of_ours_is_left(write, program, capsys):
    call, graph, threads = torch.nn.Module.__call__, dict(vars(torch.cuda.CUDAGraph)), threading.active_count()
    hooks = dict(_global_optimizer_pre_hooks)  # a fix that another test applied may have left one, as fixes do
    ran = profile_script(write(PROGRAMS[program]), on="h200-sxm")
    assert ran.exit_code == 0, capsys.readouterr().err
    assert torch.nn.Module.__call__ is call
    assert dict(vars(torch.cuda.CUDAGraph)) == graph
    assert dict(_global_optimizer_pre_hooks) == hooks
    if "pool" not in program:
        assert threading.active_count() == threads


@pytest.mark.parametrize("steps", [1, 3])
def test_every_step_is_counted(write, steps):
    ran = profile_script(write(TRAIN + f"for _ in range({steps}): step()"), on="h200-sxm")
    assert ran.steps == steps
    assert f"took {steps} step{'s' * (steps != 1)}. " in ran.missing


def test_a_step_that_cannot_be_traced_is_profiled_without(write, monkeypatch):
    from nearpeak.trace.recorder import Recorder

    def fails(*args):
        raise LookupError("no such thing")

    monkeypatch.setattr(Recorder, "_record", fails)
    ran = profile_script(write(TRAIN + LOOP), on="h200-sxm")
    assert ran.exit_code == 0
    assert any("not traced" in note and "LookupError: no such thing" in note for note in ran.profile.notes)
    assert sum(op.name == "aten.addmm.default" for op in ran.profile.ops) == 1
    profile = nearpeak.profile(torch.exp, torch.ones(8), on="h200-sxm")
    assert any("not traced" in note for note in profile.notes)


def test_what_is_captured_is_saved_while_the_script_still_runs(write, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NEARPEAK_CACHE_DIR", str(tmp_path / "cache"))
    look = "import pathlib\nassert [each.name for each in pathlib.Path('{}').glob('*/*.gz')]\nprint('seen')\n"
    script = write(TRAIN + LOOP + look.format(tmp_path / "cache") + "import os\nos.environ.clear()\n")
    saved = tmp_path / "saved.json"
    before = dict(os.environ)
    try:
        assert main(["profile", "--on", "h200-sxm", "-o", str(saved), str(script)]) == 0
    finally:
        os.environ.update(before)
    captured = capsys.readouterr()
    assert captured.out.startswith("seen\nStep:")
    assert saved.exists()
    assert captured.err.count("kept as @last") == 1


ENDINGS = {
    "os._exit": ("os._exit(7)", 7),
    "a child that exits by itself": (
        "child = os.fork()\nif child == 0: sys.exit(3)\nsys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))",
        3,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS)
def test_however_a_process_ends_its_run_is_kept(write, tmp_path, ending, monkeypatch, capsys):
    monkeypatch.setenv("NEARPEAK_CACHE_DIR", str(tmp_path))
    end, status = ENDINGS[ending]
    script = write(TRAIN + LOOP + f"import os, sys\n{end}\n")
    command = [sys.executable, "-m", "nearpeak", "profile", "--on", "h200-sxm", str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == status, ended.stderr
    assert main(["report", "@last"]) == 0
    assert capsys.readouterr().out.startswith("Step:")


def test_a_function_mode_of_the_program_sees_its_own_calls_alone():
    class Counting(torch.overrides.TorchFunctionMode):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    model, taken = torch.nn.Linear(4, 4), []

    def step():
        taken.append(None)
        return model(torch.ones(2, 4)).sum()

    step()
    with Counting() as alone:
        step()
    taken.clear()
    with Counting() as profiled:
        nearpeak.profile(step, on="h200-sxm")
    assert profiled.calls == alone.calls * len(taken)


@pytest.mark.slow
def test_a_step_on_another_thread_gives_no_line_of_the_profilers_library(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        TRAIN
        + "import threading\nt = threading.Thread(target=lambda: [step() for _ in range(61)])\nt.start(); t.join()\n"
    )
    command = [sys.executable, "-m", "nearpeak", "profile", "--on", "h200-sxm", str(script)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0
    assert "registerClient" not in ran.stderr


@pytest.mark.slow
def test_a_child_that_is_forked_before_the_profiler_starts_can_exit(tmp_path):
    script = tmp_path / "script.py"
    child = "import os, sys\nstep()\npid = os.fork()\nif not pid: sys.exit(3)\nprint(os.waitpid(pid, 0)[1] >> 8)\n"
    script.write_text(TRAIN + child + LOOP)
    command = [sys.executable, "-m", "nearpeak", "profile", "--on", "h200-sxm", str(script)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0 and ran.stdout.startswith("3\n")
