"""`nearpeak estimate`."""

import json

import pytest

from nearpeak.cli.main import main

CASES = """
import torch
import nearpeak


def product(size: int = 64):
    a = nearpeak.inputs.activations(size, size, dtype="bfloat16")
    return nearpeak.Case(torch.mm, a, a)
"""


@pytest.fixture
def cases(tmp_path):
    path = tmp_path / "cases.py"
    path.write_text(CASES)
    return f"{path}:product"


def test_a_case_on_a_machine_of_the_catalogue(cases, capsys):
    assert main(["estimate", cases, "--on", "h100-sxm", "--set", "size=128"]) == 0
    out = capsys.readouterr().out
    assert "On h100-sxm, derated datasheet" in out
    assert "4.19 MFLOP" in out


def test_json_alone(cases, capsys):
    assert main(["estimate", cases, "--on", "h100-sxm", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ops"][0]["flops"] == 2 * 64**3


def test_an_unknown_machine(cases, capsys):
    assert main(["estimate", cases, "--on", "h100"]) == 2
    assert "h100-sxm" in capsys.readouterr().err
