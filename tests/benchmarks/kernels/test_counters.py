"""The benchmark that reads counters of kernels: by a saved table of ncu, and its calls at tiny sizes."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nearpeak.kernels._runtime.policy import using

pytest.importorskip("triton")


counters: Any = importlib.import_module("benchmarks.kernels.counters")
ncu: Any = importlib.import_module("benchmarks.kernels.ncu")
TABLE = Path(__file__).parents[2] / "data" / "ncu_kernels_h200.csv"
"""Some columns of what ncu wrote on an H200. Ranges have the names of today, and those of the backward pass, which ran
in a thread without a range then, were added."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def rows() -> dict[str, Any]:
    found = counters.by_call(ncu.read(TABLE.read_text().splitlines(), counters.RANGE))
    return {row.call: row for row in found}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")


def test_shares_of_a_call(rows):
    own, other = rows["attention 128 full 8k"], rows["cuDNN attention 128 full 8k"]
    assert own.kernels == ["attention_hopper_kernel"]
    assert own.seconds == pytest.approx(1.528512e-3)
    assert own.clock == pytest.approx(1.672e9, rel=1e-3)
    assert (own.tensor, own.xu, own.issue) == pytest.approx((0.796, 0.4327, 0.3922))
    assert (own.dram, own.l2, own.gmma) == pytest.approx((0.0358, 0.4499, 0.0523))
    assert own.stalls == {"barrier": 2.59, "wait": 1.88, "long_scoreboard": 0.75}
    assert own.cycles / other.cycles == pytest.approx(1 - 0.062, abs=1e-3)
    # both multiply the same matrices: tensor cores work for as many cycles
    assert own.tensor * own.cycles == pytest.approx(other.tensor * other.cycles, rel=1e-3)


def test_two_kernels_of_a_call(rows):
    row = rows["layer_norm backward 2048 x 65536"]
    assert row.kernels == ["norm_backward_parts", "add_partials"]
    assert row.seconds == pytest.approx(233.632e-6 + 8.320e-6)
    assert row.cycles == pytest.approx(455147 + 16354, rel=1e-3)
    assert (row.dram, row.l2, row.clock) == pytest.approx((0.7082, 0.8273, 1.948e9), rel=1e-3)
    assert list(row.stalls.items()) == [("long_scoreboard", 2.53), ("barrier", 1.09), ("short_scoreboard", 0.84)]


def test_what_is_not_of_ours_is_left_out():
    lines = TABLE.read_text().splitlines()
    assert ncu.read(lines, "ladder ") == []
    found = ncu.read(lines, counters.RANGE)
    assert len(found) == 7
    assert set(found[0].counters) == set(counters.counters(True))  # without names, and without what has no data


def test_other_gpus_have_no_groups_of_warps():
    assert [name for name in counters.counters(True) if "gmma" not in name] == counters.counters(False)
    kernel = ncu.Kernel(name="one", within="call", counters=dict.fromkeys(counters.counters(False), 1.0))
    (row,) = counters.by_call([kernel])
    assert row.gmma is None


def test_ncu_is_asked_for_all_counters_and_no_more(tmp_path):
    command = counters.ncu_command(True, tmp_path / "log")
    options = "--profile-from-start off --nvtx --csv --page raw --print-units base --clock-control none".split()
    assert set(options) <= set(command)
    assert command[command.index("--metrics") + 1].split(",") == counters.counters(True)
    assert command[-3:] == ["-m", "benchmarks.kernels.counters", "--once"]


def test_a_run_is_written_and_shown(tmp_path, monkeypatch, capsys, machine):
    fake = tmp_path / "ncu"
    fake.write_text(
        f'#!/bin/sh\nwhile [ "$1" != --log-file ]; do shift; done\ncat {TABLE} > "$2"\necho "one: it failed" >&2\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    path = tmp_path / "counters.json"
    counters.main(["--json", str(path)])
    printed = capsys.readouterr()
    assert "one: it failed" in printed.err
    assert "ncu counted 6 of 9 calls" in printed.err
    saved = json.loads(path.read_text())
    assert saved["machine"] == "NVIDIA H200"
    assert {"date", "command", "torch", "triton", "cudnn"} < set(saved)
    counters.main(["--show", str(path)])
    shown = capsys.readouterr().out
    assert shown == printed.out
    assert max(map(len, shown.splitlines())) <= 100
    line = next(line for line in shown.splitlines() if line.startswith("layer_norm backward"))
    assert line.split()[5:] == ["0.242", "0.472", "1.948", "0.2%", "0.5%", "50.3%", "70.8%", "82.7%"]
    assert "long scoreboard 2.53, barrier 1.09, short scoreboard 0.84" in shown


def test_without_a_gpu_or_ncu_one_line_says_so(monkeypatch, machine):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match=r"^ncu is not on the PATH: .*$"):
        counters.main([])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"^no CUDA device here: .*$"):
        counters.main([])


def test_a_run_that_counts_nothing_says_what_ncu_said(tmp_path, monkeypatch, machine):
    fake = tmp_path / "ncu"
    fake.write_text("#!/bin/sh\necho ERR_NVGPUCTRPERM\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(SystemExit, match="ERR_NVGPUCTRPERM"):
        counters.main([])


@pytest.mark.slow
def test_calls_run():
    names = []
    with using("require"):
        for name, call in counters.calls(DEVICE, together=16, rows=(2, 64)):
            names.append(name)
            assert ":" not in name  # ncu's table has these around a name
            if DEVICE == "cuda" or "cuDNN" not in name:
                call()
                call()
    assert len(set(names)) == len(names) == counters.CALLS
    assert all(len(name) <= 32 for name in names)


def test_a_range_is_of_the_thread_that_asks_for_a_backward_pass(monkeypatch):
    """Kernels that a thread of autograd starts would have no range."""
    said: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: said.append("wait"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", said.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: said.append("pop"))
    switch = {"cudaProfilerStart": lambda: said.append("on"), "cudaProfilerStop": lambda: said.append("off")}
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(**switch))
    with ncu.counted_range("one"):
        assert not torch._C._is_multithreading_enabled()
    assert torch._C._is_multithreading_enabled()
    with pytest.raises(ZeroDivisionError), ncu.counted_range("two"):
        print(1 / 0)
    assert said == ["wait", "one", "on", "wait", "off", "pop", "wait", "two", "on", "off", "pop"]
