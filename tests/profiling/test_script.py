"""Scripts and modules, run as they are: what they see, how they end, and what is captured of them."""

import signal
import subprocess
import sys
import time
from textwrap import dedent

import pytest
import torch

from nearpeak.cli.main import main
from nearpeak.errors import UsageError
from nearpeak.profiling import session, torch_profiler
from nearpeak.profiling.assemble import StepRecords
from nearpeak.profiling.script import profile_script, report_exit

TRAIN = """
import os, pickle, sys, torch
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
def step():
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LOOP = TRAIN + "for _ in range(61): step()\n"
"""More steps than a session needs where warm-up takes its 20: on a busy machine steps settle late."""

SEEN = """
import multiprocessing, os, pickle, random, sys
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset
from beside import WIDTH

class Numbers(Dataset):
    def __len__(self):
        return 48
    def __getitem__(self, at):
        torch.nn.Identity()(torch.ones(1))  # a module in a worker is no step
        return torch.full((WIDTH,), float(at)) / 48

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 1)
        self.dropout = torch.nn.Dropout(0.3)
    def forward(self, x):
        return self.second(self.dropout(checkpoint(self.first, x, use_reentrant=False)))

def main():
    print(sys.argv, __file__, sys.path[0], __name__, __spec__, sys.modules["__main__"].main is main)
    assert type(pickle.loads(pickle.dumps(Model()))) is Model
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for method in ("fork", "spawn"):
        workers = 2 if method == "fork" else 1
        loader = DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=workers, multiprocessing_context=method)
        for batch in loader:
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(loss.item().hex())
    print(torch.rand(1).item().hex())

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def write(tmp_path):
    def written(source, name="script.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(dedent(source))
        return path

    return written


@pytest.mark.slow
def test_a_script_sees_and_prints_what_it_does_without_us(write, tmp_path):
    write("WIDTH = 16", "beside.py")
    script = write(SEEN)
    outputs = []
    for command in ([], ["-m", "nearpeak", "profile", "--on", "h200-sxm"]):
        ran = subprocess.run(
            [sys.executable, *command, "script.py", "--own", "3"],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=100,
        )
        assert ran.returncode == 0, ran.stderr
        outputs.append(ran.stdout)
    assert outputs[0].startswith(f"['script.py', '--own', '3'] {script} {tmp_path} __main__ None True\n0x")
    assert outputs[1].startswith(outputs[0])
    assert outputs[1].count("Verdict:") == 1


def test_a_module_is_run_by_its_name(write, tmp_path, monkeypatch, capsys):
    write("", "package/__init__.py")
    write("ROWS = 3", "package/sizes.py")
    write("from .sizes import ROWS\nprint(ROWS, __name__, __package__)\n" + LOOP, "package/train.py")
    write("print(sys.argv) if (sys := __import__('sys')) else 0\nfrom . import train", "package/__main__.py")
    monkeypatch.chdir(tmp_path)
    assert main(["profile", "--on", "h200-sxm", "-m", "package.train", "--epochs", "3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("3 __main__ package\n")
    assert "Verdict:" in out
    ran = profile_script(module="package", arguments=["a"], on="h200-sxm")
    assert ran.profile is not None
    assert f"['{tmp_path}/package/__main__.py', 'a']" in capsys.readouterr().out
    for name in [name for name in sys.modules if name.partition(".")[0] == "package"]:
        del sys.modules[name]


NAMED = """
import torch
model = torch.nn.Linear(8, 8)
class Trainer:
    @staticmethod
    def step():
        "A step."
        with torch.no_grad():
            for _ in range(3):
                model(torch.randn(4, 8))
def main():
    def inner():
        Trainer.step()
    for _ in range(61):
        inner()
"""


@pytest.mark.parametrize(
    ("reference", "where"),
    [
        ("__main__:Trainer.step", "script"),
        ("{folder}/script.py:main.inner", "script"),
        ("helping_module:Trainer.step", "module"),
        ("{folder}/helping_module.py:Trainer.step", "module"),
    ],
)
def test_a_named_function_is_the_step(write, tmp_path, reference, where):
    if where == "script":
        script = write(NAMED + "main()\nassert Trainer.step.__doc__ == 'A step.'\n")
    else:
        write(NAMED, "helping_module.py")
        script = write("from helping_module import main\nmain()")
    ran = profile_script(script, step=reference.format(folder=tmp_path), on="h200-sxm")
    sys.modules.pop("helping_module", None)
    assert ran.exit_code == 0
    assert ran.profile is not None
    assert sum(op.name == "aten.addmm.default" for op in ran.profile.ops) == 3


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("__main__:stop", "Did you mean"),
        ("__main__:evaluate", "It has Trainer.step, main, main.inner."),
        ("helping_module:evaluate", "It has Trainer.step, main."),
        ("no_such_module:step", "imported no module 'no_such_module'"),
    ],
)
def test_a_name_that_is_not_there_is_said_with_those_that_are(write, reference, message):
    write(NAMED, "helping_module.py")
    script = write(NAMED.replace("main.inner", "step") + "def step(): pass\nimport helping_module\nmain()\n")
    if "evaluate" in reference:
        script = write(NAMED + "import helping_module\n")
    with pytest.raises(UsageError, match=message):
        profile_script(script, step=reference, on="h200-sxm")
    sys.modules.pop("helping_module", None)


def test_an_error_is_shown_as_python_shows_it(write, capsys):
    script = write(LOOP + "def fails(): raise ValueError('at the end')\nfails()\n")
    ran = profile_script(script, on="h200-sxm")
    assert ran.exit_code == 1
    assert ran.profile is not None
    error, lines = capsys.readouterr().err, script.read_text().splitlines()
    ended = error[error.index("Traceback") :]
    assert ended.startswith(f'Traceback (most recent call last):\n  File "{script}", line {len(lines)}, in <module>\n')
    assert ended.endswith("ValueError: at the end\n")
    assert ended.count("File ") == 2


def test_an_error_in_a_marked_function_has_no_frames_of_ours(write, capsys):
    script = write("def outer():\n    try: step()\n    except KeyError as e: raise ValueError from e\n")
    script.write_text("def step(): raise KeyError('inside')\n" + script.read_text() + "outer()\n")
    assert profile_script(script, step="__main__:step", on="h200-sxm").exit_code == 1
    error = capsys.readouterr().err
    assert "KeyError: 'inside'" in error
    assert "steps.py" not in error
    expected = subprocess.run([sys.executable, script], capture_output=True, text=True).stderr
    assert error[error.index("Traceback") :] == expected


def test_a_script_that_is_no_python_is_shown_as_python_shows_it(write, capsys):
    script = write("x = = 3\n")
    assert profile_script(script, on="h200-sxm").exit_code == 1
    error = capsys.readouterr().err
    assert "SyntaxError: invalid syntax" in error
    assert "Traceback" not in error


def test_a_hook_for_errors_of_the_scripts_own_is_asked(write, capsys, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    script = write("import sys\nsys.excepthook = lambda *error: print('own', error[2].tb_lineno)\nraise ValueError\n")
    assert profile_script(script, on="h200-sxm").exit_code == 1
    assert capsys.readouterr().out == "own 3\n"


def test_a_hook_for_errors_sees_no_frames_of_ours(write, capsys, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", lambda *error: sys.__excepthook__(*error))  # as torch.distributed's does
    script = write("def step(): raise KeyError('inside')\ntry: step()\nexcept KeyError as e: raise ValueError from e\n")
    assert profile_script(script, step="__main__:step", on="h200-sxm").exit_code == 1
    error = capsys.readouterr().err
    expected = subprocess.run([sys.executable, script], capture_output=True, text=True).stderr
    assert error[error.index("Traceback") :] == expected


@pytest.mark.parametrize(("code", "expected"), [("'too bad'", 1), ("7", 7), ("None", 0), ("True", 1), ("-1", 255)])
def test_an_exit_is_the_scripts_own(write, capsys, code, expected):
    ran = profile_script(write(f"import sys\nsys.exit({code})"), on="h200-sxm")
    assert ran.exit_code == expected
    assert ("too bad" in capsys.readouterr().err) == ("bad" in code)


def test_ctrl_c_gives_what_was_captured(write, capsys):
    # a shell starts commands in the background with SIGINT ignored
    interrupt = "signal.signal(signal.SIGINT, signal.default_int_handler)\nos.kill(os.getpid(), signal.SIGINT)\n"
    script = write(f"{LOOP}import os, signal, time\n{interrupt}time.sleep(60)\n")
    assert main(["profile", "--on", "h200-sxm", str(script)]) == -signal.SIGINT
    captured = capsys.readouterr()
    assert "Verdict:" in captured.out
    assert "Traceback" not in captured.err
    script = write("raise KeyboardInterrupt")
    assert main(["profile", "--on", "h200-sxm", str(script)]) == -signal.SIGINT
    assert "took no steps" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_ends_the_process_as_it_does_alone(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys\nsys.excepthook = lambda *error: print(error[0].__name__)\nraise KeyboardInterrupt\n")
    alone = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    command = [sys.executable, "-m", "nearpeak", "profile", "--on", "h200-sxm", str(script)]
    profiled = subprocess.run(command, capture_output=True, text=True)
    assert (
        (profiled.returncode, profiled.stdout)
        == (alone.returncode, alone.stdout)
        == (-signal.SIGINT, "KeyboardInterrupt\n")
    )


def test_a_script_that_takes_no_step_is_ended_after_the_time_that_was_given(write, capsys):
    interruptible = "import signal, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    script = write(interruptible + "try: time.sleep(60)\nexcept Exception: time.sleep(60)\n")
    assert main(["profile", "--on", "h200-sxm", "--wait", "0.2", str(script)]) == 4
    assert "took no steps, but none could be profiled: no step ended for 200 ms" in capsys.readouterr().err


def test_what_was_seen_is_said_where_steps_are_too_few(write, capsys):
    assert main(["profile", "--on", "h200-sxm", str(write(TRAIN + "for _ in range(10): step()\n"))]) == 2
    error = capsys.readouterr().err
    assert "took 10 steps, and" in error
    assert "clean ones of" in error
    assert main(["profile", "--on", "h200-sxm", str(write(TRAIN + "model(torch.ones(8))\n"))]) == 2
    assert "but a call of a module with gradients and no step of an optimizer" in capsys.readouterr().err


def test_options_after_the_script_are_pointed_out(write, capsys):
    script = write("import argparse\nargparse.ArgumentParser().parse_args()")
    assert main(["profile", "--on", "h200-sxm", str(script), "--save=x.json"]) == 2
    assert "--save=x.json was given to the script. Options of nearpeak go before it." in capsys.readouterr().err
    assert main(["profile", "--on", "h200-sxm", str(script), "--epochs", "3"]) == 2
    assert "Options of nearpeak" not in capsys.readouterr().err


class NoProfiler:
    def __init__(self):
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")


def test_without_a_profiler_the_wall_time_is_still_said(write, capsys, monkeypatch):
    monkeypatch.setattr(session, "Profiler", NoProfiler)
    assert main(["profile", "--on", "h200-sxm", str(write(LOOP + "print('end')"))]) == 4
    captured = capsys.readouterr()
    assert captured.out == "end\n"
    assert "10 clean ones of" in captured.err
    assert "none could be profiled: RuntimeError: CUPTI_ERROR_INSUFFICIENT_PRIVILEGES" in captured.err


def test_a_full_disk_costs_the_account_and_not_the_script(write, monkeypatch):
    def full(self, among):
        self.discard()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(session.Profiler, "stop", full)
    ran = profile_script(write(LOOP), on="h200-sxm")
    assert (ran.profile, ran.problem, ran.exit_code) == (None, True, 0)
    assert "No space left on device" in ran.missing


def test_times_of_steps_come_from_the_device_where_the_host_is_ahead(write, monkeypatch):
    class Mark:
        made = 0

        def record(self):
            self.at = Mark.made = Mark.made + 1

        def elapsed_time(self, later):
            return 2e3 * (later.at - self.at)

    monkeypatch.setattr(torch_profiler, "_events", lambda count: [Mark() for _ in range(count)])
    monkeypatch.setattr(session, "synchronize", lambda: time.sleep(0.01))
    assembled, captured = [], []
    assemble = StepRecords.profile
    monkeypatch.setattr(
        StepRecords, "profile", lambda records, *rest, **more: assembled.append(1) or assemble(records, *rest, **more)
    )
    script = write(TRAIN + "for _ in range(120): step()\n")
    ran = profile_script(script, on="h200-sxm", captured=lambda profile, is_final: captured.append(is_final))
    assert ran.profile is not None
    assert ran.profile.spread == 0.0  # all of them two seconds
    assert ran.profile.steps == 10
    assert ran.profile.later_s == 2.0  # and those after the recording
    assert captured == [False, True]
    assert len(assembled) == 1  # they change nothing else


def test_a_profiler_that_sees_no_kernels_of_a_gpu_in_use_is_no_cpu_profile(write, monkeypatch):
    monkeypatch.setattr(session, "_gpu_was_used", lambda: True)
    ran = profile_script(write(LOOP), on="h200-sxm")
    assert (ran.profile, ran.problem, ran.exit_code) == (None, True, 0)
    assert "saw no kernels" in ran.missing
    assert ran.wall_s is not None


def test_a_device_that_vanishes_leaves_the_scripts_own_error(write, monkeypatch, capsys):
    def gone():
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(session, "synchronize", gone)
    ran = profile_script(write(LOOP + "raise RuntimeError('its own')"), on="h200-sxm")
    assert ran.exit_code == 1
    assert "device-side assert" in ran.missing
    error = capsys.readouterr().err
    assert error.count("Traceback") == 1
    assert "RuntimeError: its own" in error


OWN_PROFILER = """
for _ in range(5): step()
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
    for _ in range({profiled}): step()
for _ in range({after}): step()
assert any("addmm" in event.name for event in own.events())
"""


def test_a_profiler_of_the_scripts_own_comes_first(write, capsys):
    ran = profile_script(write(TRAIN + OWN_PROFILER.format(profiled=3, after=30)), on="h200-sxm")
    assert ran.exit_code == 0, capsys.readouterr().err
    assert ran.profile is not None
    ran = profile_script(write(TRAIN + OWN_PROFILER.format(profiled=50, after=0)), on="h200-sxm")
    assert ran.exit_code == 0
    assert "a profiler of its own" in ran.missing


def test_an_evaluation_before_training_does_not_count(write):
    before = "with torch.no_grad():\n    for _ in range(30): model(torch.ones(1, 8))\n"
    ran = profile_script(write(TRAIN + before + "for _ in range(61): step()\n"), on="h200-sxm")
    assert ran.profile is not None
    assert {op.phase for op in ran.profile.ops} == {"forward", "backward", "optimizer"}
    ran = profile_script(write(TRAIN + before + "for _ in range(3): step()\n"), on="h200-sxm")
    assert ran.profile is not None  # better than nothing
    assert {op.phase for op in ran.profile.ops} == {"forward"}


def test_a_step_with_an_evaluation_is_not_the_one_that_is_profiled(write):
    loop = """
    for at in range(60):
        step()
        if at % 7 == 0:
            with torch.no_grad():
                for _ in range(5): model(torch.ones(1, 8))
    """
    ran = profile_script(write(TRAIN + dedent(loop)), on="h200-sxm")
    assert ran.profile is not None
    assert sum(op.name == "aten.addmm.default" for op in ran.profile.ops) == 1


def test_code_without_a_model_is_profiled_too(write):
    flat = """
    import torch
    layers = [torch.nn.Linear(8, 8) for _ in range(30)]
    optimizer = torch.optim.SGD([weight for layer in layers for weight in layer.parameters()], lr=1e-3)
    for _ in range(61):
        x = torch.ones(1, 8)
        for layer in layers:
            x = layer(x)
        x.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    """
    ran = profile_script(write(flat), on="h200-sxm")
    assert ran.profile is not None
    assert sum(op.name == "aten.addmm.default" for op in ran.profile.ops) == 30


def test_steps_in_a_thread_are_waited_for(write):
    thread = "import threading\nthreading.Thread(target=lambda: [step() for _ in range(61)]).start()\n"
    ran = profile_script(write(TRAIN + thread), on="h200-sxm")
    assert ran.profile is not None


def test_random_numbers_do_not_depend_on_what_is_measured_before(write, monkeypatch, capsys):
    from nearpeak.profiling import script as module

    def measured(on, progress):
        torch.rand(100)
        return module.find_machine.original("h200-sxm")

    measured.original = module.find_machine
    monkeypatch.setattr(module, "find_machine", measured)
    state = torch.get_rng_state()
    profile_script(write("import torch\nprint(torch.rand(1).item())"))
    torch.set_rng_state(state)
    assert capsys.readouterr().out == f"{torch.rand(1).item()}\n"


def test_an_object_that_ends_a_script_without_stderr_is_written_to_the_descriptor(monkeypatch, capfd):
    monkeypatch.setattr(sys, "stderr", None)
    assert report_exit(SystemExit(("a", 1))) == 1
    out, err = capfd.readouterr()
    assert (out, err) == ("", "('a', 1)\n")
