import argparse
import json
import subprocess
import sys

import pytest

from nearpeak._records import from_json
from nearpeak.cli.verbs import machine as verb
from nearpeak.errors import UnknownMachine, UsageError
from nearpeak.machines import catalogue
from nearpeak.machines.machine import Machine


def run(*arguments):
    parser = argparse.ArgumentParser()
    verb.configure(parser)
    return verb.run(parser.parse_args(arguments))


def test_a_machine_of_the_catalogue(capsys):
    assert run("h100-sxm") == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("NVIDIA H100 SXM5 80GB (h100-sxm)\n")
    assert captured.err == ""


@pytest.mark.parametrize("words", [["NVIDIA H100 PCIe"], ["NVIDIA", "H100", "PCIe"]])
def test_a_driver_name_with_or_without_quotes(capsys, words):
    assert run(*words) == 0
    assert "(h100-pcie)" in capsys.readouterr().out


def test_an_unknown_machine_is_an_error():
    with pytest.raises(UnknownMachine, match="h100-sxm"):
        run("NVIDIA H100")


def test_json_alone_on_stdout_is_the_machine(capsys):
    assert run("mi300x", "--json", "-") == 0
    assert from_json(Machine, json.loads(capsys.readouterr().out)) == catalogue.find("mi300x")


def test_json_in_a_file_beside_the_text(capsys, tmp_path):
    path = tmp_path / "machine.json"
    assert run("l4", "--json", str(path)) == 0
    captured = capsys.readouterr()
    assert "(l4)" in captured.out
    assert str(path) in captured.err
    assert json.loads(path.read_text())["id"] == "l4"


def test_a_file_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="cannot be written"):
        run("l4", "--json", str(tmp_path / "missing" / "machine.json"))


def test_the_list_and_its_json(capsys):
    assert run("--list") == 0
    assert "a100-sxm-80gb" in capsys.readouterr().out
    assert run("--list", "--json", "-") == 0
    assert [entry["id"] for entry in json.loads(capsys.readouterr().out)] == [m.id for m in catalogue.machines()]


def test_the_networks_and_their_json(capsys):
    assert run("--networks") == 0
    assert "infiniband-ndr" in capsys.readouterr().out
    assert run("--networks", "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)[0]["per"] == "port"


@pytest.mark.parametrize("arguments", [["l4", "--list"], ["--list", "--networks"], ["l4", "--calibrate"]])
def test_what_cannot_be_combined_is_an_error(arguments):
    with pytest.raises(UsageError, match="cannot be combined"):
        run(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["h200-sxm"], ["--list"], ["--networks"], ["--list", "--json", "-"]])
def test_the_catalogue_is_shown_without_torch(arguments):
    code = (
        "import sys, argparse\n"
        "from nearpeak.cli.verbs import machine as verb\n"
        "parser = argparse.ArgumentParser()\n"
        "verb.configure(parser)\n"
        "assert 'nearpeak.machines.catalogue' not in sys.modules\n"
        "verb.run(parser.parse_args(sys.argv[1:]))\n"
        "assert not {'torch', 'triton', 'pynvml'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True)
