"""`nearpeak profile`."""

import json
from pathlib import Path

import pytest

from nearpeak.cli.main import main

EAGER = str(Path(__file__).parents[1] / "data" / "kineto_eager.json.gz")


def test_a_trace_file_gives_the_card_and_the_waterfall(capsys):
    assert main(["profile", "--trace", EAGER, "--top", "3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Verdict:")
    for part in ("ideal", "slow kernels", "idle", "wall"):
        assert f"\n{part}" in out


def test_a_saved_profile_is_shown_again(tmp_path, capsys):
    path = tmp_path / "run.json.gz"
    assert main(["profile", "--trace", EAGER, "--save", str(path)]) == 0
    first = capsys.readouterr()
    assert f"wrote {path}" in first.err
    assert main(["profile", "--trace", str(path)]) == 0
    assert capsys.readouterr().out == first.out


def test_json_alone(capsys):
    assert main(["profile", "--trace", EAGER, "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(part["seconds"] for part in found["waterfall"]["parts"]) == pytest.approx(found["wall_s"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trace", "no/such.json"], "no such file"),
        (["--trace", EAGER, "--top", "0"], "at least one row"),
        (["--trace", EAGER, "--step", "7"], "7"),
        (["--trace", EAGER, "--on", "h200"], "Did you mean"),
        (["--trace", EAGER, "--save", "out.html"], "as .json or .json.gz"),
    ],
)
def test_what_cannot_be_done_is_said(options, message, capsys):
    assert main(["profile", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_saved_profile_belongs_to_its_machine(tmp_path, capsys):
    path = tmp_path / "run.json"
    main(["profile", "--trace", EAGER, "--save", str(path)])
    assert main(["profile", "--trace", str(path), "--on", "b200"]) == 2
    assert "is a saved profile" in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--trace", EAGER, "--step", "last"]])
def test_what_cannot_be_understood_is_a_usage_error(options, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["profile", *options])
    assert caught.value.code == 2
    assert "--trace" in capsys.readouterr().err
