"""`nearpeak estimate`."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from nearpeak.cli.main import main

EXAMPLES = Path(__file__).parents[2] / "examples" / "cases.py"
SMALL = ["--set", "hidden=64", "--set", "heads=4", "--set", "tokens=32", "--set", "batch=2"]

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


def test_intensities(cases, capsys):
    assert main(["estimate", cases, "--on", "h100-sxm", "--set", "size=8192", "--intensities"]) == 0
    out = capsys.readouterr().out
    assert "as written" in out
    row = next(line for line in out.splitlines() if line.startswith("mm"))
    assert row.split()[1:6] == ["1.10", "T", "268", "MB", "4096"]  # one operand read twice counts once
    assert "family" not in out


@pytest.mark.parametrize("name", ["transformer_layer", "transformer_layer_written_out"])
def test_tables_of_a_transformer_layer_fit_in_80_columns(name, capsys):
    assert main(["estimate", f"{EXAMPLES}:{name}", "--on", "h100-sxm", "--intensities", "--groups", *SMALL]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "addmm" in out
    assert "gelu" in out


def test_attention_that_is_written_out_is_a_group(capsys):
    case = f"{EXAMPLES}:transformer_layer_written_out"
    assert main(["estimate", case, "--on", "h100-sxm", "--groups", "--top", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if line.startswith("attention"))
    assert "bmm x2" in next(line for line in lines if "_softmax" in line)


def test_a_roofline_as_svg(cases, tmp_path, capsys):
    path = tmp_path / "out.svg"
    assert main(["estimate", cases, "--on", "h100-sxm", "--roofline", str(path)]) == 0
    assert ElementTree.parse(path).getroot().tag.endswith("svg")
    captured = capsys.readouterr()
    assert f"wrote {path}" in captured.err
    assert "as written" in captured.out


@pytest.mark.slow
def test_a_roofline_as_png(cases, tmp_path):
    pytest.importorskip("PIL")
    path = tmp_path / "out.PNG"
    assert main(["estimate", cases, "--on", "h100-sxm", "--roofline", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--roofline", "out.gif"], "as .svg or as .png"),
        (["--roofline", "no/such/folder/out.svg"], "cannot be written"),
        (["--top", "0"], "at least one row"),
    ],
)
def test_what_cannot_be_done_is_said(cases, options, message, capsys):
    assert main(["estimate", cases, "--on", "h100-sxm", *options]) == 2
    assert message in capsys.readouterr().err


EAGER = Path(__file__).parents[1] / "data" / "kineto_eager.json.gz"


def test_a_trace_file_is_estimated_on_the_machine_that_it_names(capsys):
    assert main(["estimate", "--trace", str(EAGER)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("On h200-sxm")
    assert "Measured on NVIDIA H200" in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_trace_file_is_estimated_on_another_machine(capsys):
    assert main(["estimate", "--trace", str(EAGER), "--on", "b200", "--step", "all"]) == 0
    assert capsys.readouterr().out.startswith("On b200")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "Give a CASE"),
        (["cases.py:add", "--trace", "x.json"], "one of the two"),
        (["--trace", "x.json", "--set", "a=1"], "--set belongs to a CASE"),
        (["cases.py:add", "--step", "3"], "--step belongs to --trace"),
        (["--trace", "no/such/file.json"], "no such file"),
    ],
)
def test_a_case_and_a_file_are_told_apart(options, message, capsys):
    assert main(["estimate", *options]) == 2
    assert message in capsys.readouterr().err
