"""`nearpeak comm` without ranks: mistakes before they are started, and saved runs."""

import json

import pytest
from comm_runs import WRONG, run  # type: ignore[import-not-found]

from nearpeak.cli.main import main
from nearpeak.comm.result import fit_points, save


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op", "allreduce"], "'all_reduce'"),
        (["--dtype", "bfloat15"], "Did you mean 'bfloat16' or 'float16'?"),
        (["--bytes", "1.5"], "every size is a whole number above 0"),
        (["--bytes", "a,b"], "every size is a whole number above 0"),
        (["--timeout", "0"], "--timeout 0.0: must be above 0"),
        (["--ranks", "0"], "--ranks 0: must be at least 1"),
        (["-o", "comm.xlsx"], "a run is written as one of .html"),
        (["-o", "nowhere/comm.html"], "there is no folder nowhere"),
        (["--mesh", "2x2", "--op", "barrier"], "--mesh 2x2 has 4 places, and the world has 1 rank."),
        (["--backend", "mpi"], "Valid: gloo, nccl"),
        (["--from", "nowhere.json"], "there is no such file"),
    ],
)
def test_mistakes(capsys, monkeypatch, tmp_path, arguments, message) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.chdir(tmp_path)
    assert main(["comm", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_world_of_one_says_so(capsys, monkeypatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["comm", "--op", "broadcast", "--bytes", "1k", "--max-seconds", "0.01", "--backend", "gloo"]) == 0
    out = capsys.readouterr().out
    assert "A world of one rank: nothing crosses a link" in out and "B/s" not in out


def test_a_saved_run_is_shown_again(capsys, tmp_path) -> None:
    path, page = tmp_path / "comm.json", tmp_path / "comm.html"
    save(run(), path)
    assert main(["comm", "--from", str(path), "-o", str(page)]) == 0
    assert "Collectives over 8 ranks with nccl 2.27.3" in capsys.readouterr().out
    assert "</svg>" in page.read_text()
    assert main(["comm", "--from", str(path), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(path.read_text())


def test_wrong_results_are_an_exit_code(capsys, tmp_path) -> None:
    path = tmp_path / "comm.json"
    save(run(points=(WRONG,), fits=fit_points([WRONG])), path)
    assert main(["comm", "--from", str(path)]) == 1
