"""The model of a script is found and fixed while it runs, and the script goes on."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import nearpeak
from nearpeak.cli import main as cli
from nearpeak.fixes import engine
from nearpeak.fixes.script import fix_script
from tests.fixes.models import speed

TRAINING = """
import sys, torch
from torch import nn
torch.manual_seed(0)
helper = nn.Linear(2, 2)
model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for number in range(int(sys.argv[1])):
    helper(torch.ones(1, 2))
    tokens = torch.randint(20, (4, 9))
    loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("loss", loss.item(), "fused", optimizer.param_groups[0]["fused"], len(model._forward_pre_hooks))
"""
INFERENCE = """
import torch
from torch import nn
model = nn.Conv2d(3, 4, 3)
with torch.no_grad():
    for number in range(8):
        model(input=torch.ones(1, 3, 9, 9))
print("layout", model.weight.is_contiguous(memory_format=torch.channels_last))
"""


@pytest.fixture
def faster(monkeypatch):
    monkeypatch.setattr(engine, "time_in_turns", lambda step, way, pairs, device, **_: dict.fromkeys(pairs, speed(0.5)))


@pytest.fixture
def script(tmp_path):
    def write(text: str) -> str:
        file = tmp_path / "train.py"
        file.write_text(text)
        return str(file)

    return write


@pytest.mark.slow
def test_a_training_script_goes_on_with_the_fixed_model(faster, script, capfd, tmp_path):
    file, certificate = script(TRAINING), tmp_path / "fix.json"
    assert cli.main(["fix", "--only", "fused-optimizer", "--json", str(certificate), file, "6"]) == 0
    printed = capfd.readouterr().out
    assert "fused True 0" in printed
    assert "Sequential is faster" in printed
    assert all(len(line) <= 80 for line in printed.splitlines())
    assert json.loads(certificate.read_text())["sites"][0]["status"] == "replaced"

    assert cli.main(["fix", "--apply", str(certificate), file, "6"]) == 0
    assert "fused True 0" in capfd.readouterr().out
    assert cli.main(["fix", "--verify", str(certificate), "--stop", file, "6"]) == 0
    assert "loss" not in capfd.readouterr().out.partition("Verdict")[0]


@pytest.fixture
def optimizer_certificate(faster, tmp_path):
    model, batch = nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    fixed = nearpeak.fix(model, batch, optimizer=optimizer, only=["fused-optimizer"])
    fixed.report.save(tmp_path / "fix.json")
    return tmp_path / "fix.json"


def train(model, optimizer, steps=4):
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_one_line_applies_a_certificate(optimizer_certificate, monkeypatch):
    monkeypatch.delenv("NEARPEAK_FIX", raising=False)
    assert nearpeak.apply_fixes() is False
    monkeypatch.setenv("NEARPEAK_FIX", str(optimizer_certificate))
    assert nearpeak.apply_fixes() is True
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    assert optimizer.param_groups[0]["fused"] is True
    assert not model._forward_pre_hooks


def test_a_certificate_of_another_program_is_not_applied(optimizer_certificate):
    assert nearpeak.apply_fixes(optimizer_certificate)
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="nearpeak did not apply the certificate"):
        train(model, optimizer)
    assert not optimizer.param_groups[0]["fused"]


@pytest.mark.slow
def test_the_results_of_a_script_do_not_change(script, capfd, monkeypatch):
    monkeypatch.setattr(engine, "time_in_turns", lambda step, way, pairs, device, **_: dict.fromkeys(pairs, speed(1.5)))
    file = script(TRAINING)
    plain = subprocess.run([sys.executable, file, "6"], capture_output=True, text=True, check=True).stdout
    assert cli.main(["fix", "--only", "fused-optimizer", file, "6"]) == 0
    printed = capfd.readouterr().out
    assert printed.startswith(plain)
    assert "nothing helps Sequential" in printed


def test_a_script_that_never_trains_is_fixed_after_some_calls(faster, script, capfd):
    assert cli.main(["fix", "--only", "channels-last", script(INFERENCE)]) == 0
    printed = capfd.readouterr().out
    assert printed.startswith("layout True")
    assert "a call" in printed


def test_a_script_that_takes_too_few_steps_is_told_so(script, capfd):
    assert cli.main(["fix", script(TRAINING), "2"]) == 2
    assert "took 2 steps of an optimizer, and a model is fixed after 3" in " ".join(capfd.readouterr().err.split())


def test_the_exit_code_and_the_error_of_a_script_are_its_own(script, capfd):
    assert cli.main(["fix", script("raise SystemExit(7)")]) == 7
    assert "was not fixed" in capfd.readouterr().err


def test_an_error_of_the_fixing_does_not_reach_the_script(script):
    def failing(model, *args, **kwargs):
        raise RuntimeError("out of luck")

    ran = fix_script(script("import sys; sys.argv[1:] = ['5']\n" + TRAINING), fixer=failing)
    assert (ran.exit_code, ran.report) == (0, None)
    assert ran.problem == "The model could not be fixed: RuntimeError: out of luck"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fix"], "Give a SCRIPT or -m MODULE"),
        (["fix", "--only", "norms", "x.py"], "There is no fix 'norms'"),
        (["fix", "--apply", "a.json", "--verify", "b.json", "x.py"], "exclude each other"),
        (["fix", "--apply", "absent.json", "x.py"], "there is no such file"),
    ],
)
def test_bad_command_lines(arguments, words, capfd):
    assert cli.main(arguments) == 2
    assert words in " ".join(capfd.readouterr().err.split())


def test_the_list_of_fixes(capfd):
    assert cli.main(["fix", "--list"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert any(line.startswith("fused-optimizer") for line in lines)
    assert any(line.startswith("tf32") and "only if asked for" in line for line in lines)
    assert all(len(line) <= 100 for line in lines)
