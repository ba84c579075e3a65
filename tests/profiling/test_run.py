import pytest
import torch

import nearpeak
from nearpeak.errors import NearpeakError
from nearpeak.profiling.script import profile_script

SCRIPT = """
import pathlib

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
{loop}
pathlib.Path({result!r}).write_text(repr(model(torch.ones(1, 64)).sum().item()))
{end}
"""
TRAIN = """
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(61):
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
INFER = """
with torch.no_grad():
    for _ in range(61):
        model(torch.randn(8, 64))
"""


def test_a_step_that_is_given_is_accounted_for():
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    lines = []

    def step(x):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    found = nearpeak.profile(step, torch.randn(64, 256), on="h200-sxm", progress=lines.append)
    assert sum(part.seconds for part in found.waterfall.parts) == pytest.approx(found.wall_s)
    assert {op.phase for op in found.ops} == {"forward", "backward", "optimizer"}
    product = next(op for op in found.ops if op.name == "aten.addmm.default")
    assert product.measured_s > 0
    assert product.source.startswith("test_run.py:")
    excerpt = next(each for each in found.excerpts if each.source == product.source)
    assert excerpt.lines[1].strip() == "model(x).square().sum().backward()"
    assert found.modeled_share > 0.95
    assert lines == ["warming up", "timing clean steps", "starting the profiler", *lines[3:]]
    again = ["timing clean steps again", "everything needed has been recorded"]
    assert lines[3:] == ["profiling a step", "tracing a step", *again]


@pytest.mark.parametrize("loop", [TRAIN, INFER], ids=["training", "inference"])
def test_a_script_gives_the_same_results_with_and_without(tmp_path, loop):
    results = []
    for number, run in enumerate((True, False)):
        result = tmp_path / f"{number}.txt"
        script = tmp_path / "script.py"
        script.write_text(SCRIPT.format(loop=loop, result=str(result), end=""))
        if run:
            ran = profile_script(script, on="h200-sxm")
            assert ran.exit_code == 0
            assert ran.profile is not None
            assert ran.profile.modeled_share > 0.95
            assert sum(op.measured_s for op in ran.profile.ops) > 0
        else:
            exec(compile(script.read_text(), str(script), "exec"), {"__name__": "__main__"})
        results.append(result.read_text())
    assert results[0] == results[1]


def test_a_script_that_is_stopped_does_not_reach_its_end(tmp_path):
    result = tmp_path / "result.txt"
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(loop=TRAIN.replace("25", "10**9"), result=str(result), end=""))
    assert profile_script(script, on="h200-sxm", stop=True).profile is not None
    assert not result.exists()


def test_a_script_that_raises_gives_what_was_captured(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(loop=TRAIN, result=str(tmp_path / "x"), end="raise ValueError('at the end')"))
    ran = profile_script(script, on="h200-sxm")
    assert ran.exit_code == 1
    assert ran.profile is not None
    assert "ValueError: at the end" in capsys.readouterr().err


@pytest.fixture
def training():
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(times=1):
        for _ in range(times):
            model(torch.randn(4, 16)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


def products(found):
    return sum(op.name == "aten.addmm.default" for op in found.ops)


def test_the_steps_of_a_block_are_found(training):
    with nearpeak.profile(on="h200-sxm") as run:
        for _ in range(61):
            training()
    assert products(run.profile) == 1
    assert run.profile is run.profile
    assert run.profile.source.startswith("test_run.py:")
    with pytest.raises(nearpeak.NearpeakError, match="profiled once"), run:
        pass


def test_a_marked_function_of_a_block_is_its_step(training):
    run = nearpeak.profile(on="h200-sxm")

    @run.step
    def step():
        training(times=2)

    for _ in range(5):
        step()  # not in the block
    with run:
        for _ in range(61):
            step()
    assert products(run.profile) == 2


def test_a_block_with_too_few_steps_says_so_and_keeps_its_error(training):
    with pytest.raises(ZeroDivisionError), nearpeak.profile(on="h200-sxm") as run:
        training(times=4)
        raise ZeroDivisionError
    with pytest.raises(nearpeak.NearpeakError, match=r"took 4 steps\. A profile needs about 2"):
        _ = run.profile


def test_what_resets_a_case_is_no_part_of_its_step():
    x = torch.ones(64, 64)
    seen = []

    def reset():
        seen.append(x.sum().item())
        x.fill_(1.0)

    found = nearpeak.profile(nearpeak.Case(lambda: x.mul_(2.0), reset=reset), on="h200-sxm")
    assert {op.name for op in found.ops} == {"aten.mul_.Tensor"}
    assert set(seen) == {64.0 * 64, 2 * 64.0 * 64}


def test_a_step_without_ops_is_an_error_that_says_why():
    with pytest.raises(NearpeakError, match="shows no op of the step"):
        nearpeak.profile(lambda: sum(range(1000)), on="h200-sxm")
