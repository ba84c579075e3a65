"""The ladder of matrix products: predictions of traffic against loads counted one by one, and values of rungs."""

from __future__ import annotations

import importlib
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_checks import DEVICE

pytest.importorskip("triton")

from nearpeak.errors import UsageError
from nearpeak.kernels import ladder as kernels_ladder
from nearpeak.kernels._runtime.policy import INTERPRETED
from nearpeak.kernels.ladder import ITEM, RUNGS, SECTOR, Tile, empty_result, floor_bytes

ladder: Any = importlib.import_module("benchmarks.kernels.ladder")
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


def sectors(places, width=1):
    """Sectors that a warp's load touches, of so many numbers for each thread."""
    return len({ITEM * (place + at) // SECTOR for place in places for at in range(width)})


def naive_loads(m, n, k):
    for row in range(m):
        for first in range(0, n, 32):  # a warp
            for step in range(k):
                yield sectors([row * k + step] * 32)
                yield sectors([step * n + first + lane for lane in range(32)])


def lines_loads(m, n, k):
    for row in range(0, m, 8):
        for first in range(0, n, 256):
            for begin in range(0, k, 32):
                for warp in range(8):
                    yield sectors([(row + warp) * k + begin + lane for lane in range(32)])
                    for step in range(32):
                        yield sectors([(begin + step) * n + first + 32 * warp + lane for lane in range(32)])


def tiles_loads(m, n, k):
    for row in range(0, m, 128):
        for first in range(0, n, 128):
            for begin in range(0, k, 16):
                for warp in range(8):
                    threads = range(32 * warp, 32 * warp + 32)
                    yield sectors([(row + one // 2) * k + begin + one % 2 * 8 for one in threads], 8)
                    yield sectors([(begin + one // 16) * n + first + one % 16 * 8 for one in threads], 8)


@pytest.mark.parametrize(
    "rung, loads, sizes",
    [
        (kernels_ladder.NAIVE, naive_loads, (16, 64, 32)),
        (kernels_ladder.LINES, lines_loads, (16, 512, 64)),
        (kernels_ladder.TILES, tiles_loads, (256, 128, 32)),
    ],
    ids=["naive", "lines", "tiles"],
)
def test_predictions_are_the_sectors_that_threads_ask_for(rung, loads, sizes):
    assert SECTOR * sum(loads(*sizes)) == rung.bytes_read(*sizes)


@pytest.mark.skipif(not INTERPRETED, reason="loads are counted by the interpreter")
@pytest.mark.parametrize("name", ["tensor cores", "persistent"])
def test_predictions_are_the_bytes_that_programs_load(name, monkeypatch):
    import numpy
    from triton.runtime.interpreter import InterpreterBuilder

    rung = next(one for one in RUNGS if one.name == name)
    a, b = torch.ones(256, 128, dtype=torch.bfloat16), torch.ones(128, 512, dtype=torch.bfloat16)
    counts = []
    load = InterpreterBuilder.create_masked_load

    def counting(self, pointers, mask, *rest, **options):
        counts.append(int((mask if isinstance(mask, numpy.ndarray) else mask.data).sum()))
        return load(self, pointers, mask, *rest, **options)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counting)
    rung.multiply(a, b)
    assert ITEM * sum(counts) == rung.bytes_read(256, 512, 128)


@pytest.mark.parametrize("sizes", [(1, 8, 8), (130, 264, 72), (300, 24, 200)], ids=str)
@pytest.mark.parametrize("name", ["tensor cores", "persistent"])
def test_rungs_in_triton(name, sizes):
    torch.manual_seed(0)
    m, n, k = sizes
    rung = next(one for one in RUNGS if one.name == name)
    a, b = torch.randn(m, k, device=DEVICE).bfloat16(), torch.randn(k, n, device=DEVICE).bfloat16()
    torch.testing.assert_close(rung.multiply(a, b), (a.double() @ b.double()).bfloat16(), atol=0.02, rtol=0.02)


def test_odd_sizes_by_tensor_cores():
    a, b = torch.randn(131, 77, device=DEVICE).bfloat16(), torch.randn(77, 133, device=DEVICE).bfloat16()
    expected = (a.double() @ b.double()).bfloat16()
    torch.testing.assert_close(kernels_ladder.TENSOR_CORES.multiply(a, b), expected, atol=0.02, rtol=0.02)


def test_each_rung_asks_for_less_than_the_one_below():
    name = "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNN"
    moved = [rung.bytes_read(4096, 4096, 4096, name) for rung in RUNGS]
    assert moved[:3] == [3 * 4096**3, 4096**3 * 33 // 128, 4096**3 // 32]
    assert all(after <= before for before, after in itertools.pairwise(moved))
    assert floor_bytes(4096, 4096, 4096) < moved[-1]
    assert [round(rung.intensity(4096, name), 2) for rung in RUNGS[:3]] == [0.67, 7.76, 64.0]


def test_tiles_at_an_edge_count_in_full():
    assert Tile(rows=4, columns=8).bytes_read(5, 9, 10) == 4 * 10 * (4 + 8) * ITEM


def test_the_tile_of_cublas_is_in_the_name_of_its_kernel():
    assert kernels_ladder.vendor_tile(1, 1, 1, "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT") == Tile(
        rows=128, columns=256
    )
    assert kernels_ladder.vendor_tile(1, 1, 1, "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT") == Tile(
        rows=256, columns=128
    )
    assert kernels_ladder.vendor_tile(1, 1, 1, "ampere_bf16_s16816gemm_bf16_128x256") is None
    assert kernels_ladder.VENDOR.intensity(4096) is None


def test_the_tile_of_the_library_is_that_of_its_configuration():
    found = kernels_ladder.specialized_tile(4096, 4096, 4096)
    assert found.rows >= 128
    assert found.columns >= 64


def test_names_and_titles_fit():
    assert len({rung.name for rung in RUNGS}) == len(RUNGS)
    assert all(len(rung.title) <= 30 and re.fullmatch("[a-z ]+", rung.name) for rung in RUNGS)


def test_what_kernels_without_edges_do_not_take():
    a = torch.ones(64, 64, dtype=torch.bfloat16)
    for given, said in [
        ((a, a), "multiples of"),
        ((a.float(), a), "float32"),
        ((a, a.mT), "contiguous"),
        ((a, a[:3]), "m x k by k x n"),
    ]:
        with pytest.raises(UsageError, match=said):
            empty_result(*given, (128, 32, 16))


TABLE = """==PROF== Connected to process 5
"ID","Process ID","thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg","Kernel Name",\
"Metric Name","Metric Unit","Metric Value"
"0","5","5  ""<default domain>:ladder naive:none:none:none:none:none:none"" ","ladder_naive",\
"l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum","sector","6,442,450,944"
"0","5","5  ""<default domain>:ladder naive:none:none:none:none:none:none"" ","ladder_naive",\
"dram__bytes_read.sum","byte","100"
"1","5","5  ""<default domain>:ladder vendor:none:none:none:none:none:none"" ","nvjet_tst_128x256_64x4_2x1_v_bz_NNN",\
"l1tex__m_xbar2l1tex_read_bytes.sum","byte","1,920,000,000"
"""


def test_a_table_of_ncu_is_read_and_shown(tmp_path, capsys):
    rows = ladder.predictions(4096)
    ladder.joined(rows, ladder.read_ncu(TABLE.splitlines()), 4096)
    first, last = rows[0], rows[-1]
    assert first["counted_bytes"] == first["predicted_bytes"] == 3 * 4096**3
    assert ladder.off(first) == 0.0
    assert last["predicted_bytes"] == 4096**3 * 3 // 128
    assert ladder.off(last) == pytest.approx(0.192, abs=1e-3)
    first["seconds"] = 0.05
    rows[1]["failed"] = "RuntimeError: " + "x" * 300
    path = tmp_path / "ladder.json"
    path.write_text(json.dumps({"size": 4096, "rungs": rows}))
    ladder.main(["--show", str(path)])
    shown = capsys.readouterr().out
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert "off by more than 10%: vendor" in shown
    assert re.search(r"a thread for each number +50\.000 +0\.28% +0\.667 +206\.16 GB +\+0\.0%", shown)


def test_ncu_is_asked_for_all_counters(tmp_path):
    command = ladder.ncu_command(4096, tmp_path / "log")
    asked = command[command.index("--metrics") + 1].split(",")
    assert {rung.counter for rung in RUNGS} <= set(asked)


def test_what_an_h200_counted():
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "ladder_h200.json"
    saved = json.loads(path.read_text())
    for row in saved["rungs"]:
        assert abs(ladder.off(row)) < 1e-4, row["rung"]
        assert row["repeats"]
    found = ladder.again(saved["rungs"], saved["size"])
    configured = next(row for row in found if row["rung"] == "specialized")  # its tile may have been another one then
    configured["predicted_bytes"] = saved["rungs"][found.index(configured)]["predicted_bytes"]
    assert found == saved["rungs"]


@pytest.mark.gpu
@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_values_on_a_gpu(rung):
    torch.manual_seed(0)
    a, b = (torch.randn(512, 512, device="cuda").bfloat16() for _ in range(2))
    expected = (a.double() @ b.double()).bfloat16()
    result = rung.multiply(a, b)
    torch.testing.assert_close(result, expected, atol=0.1, rtol=0.02)
    assert torch.equal(result, rung.multiply(a, b))
