import dataclasses
from pathlib import Path

import pytest

from nearpeak.machines import calibrations, catalogue
from nearpeak.machines.machine import Achievable, Ceiling, LaunchCost, Link, Machine, Theoretical
from nearpeak.render.text import text as written
from nearpeak.render.views import machine as views

MADE_UP = Machine(
    id="made-up",
    name="Made-up GPU 80GB",
    kind="gpu",
    vendor="nvidia",
    architecture="hopper",
    processors=100,
    memory_bytes=80 * 2**30,
    memory_kind="HBM3",
    cache_bytes=50 * 2**20,
    shared_memory_bytes=228 * 2**10,
    clock_boost_hz=1.5e9,
    power_watts=700,
    link=Link(name="NVLink 4 x18", bandwidth=450e9, source="Sheet, https://example.org"),
    pcie=Link(name="PCIe 5.0 x16", bandwidth=63e9, source="Sheet, https://example.org"),
    theoretical=Theoretical(
        matrix={"bfloat16": 1000e12, "float64": 50e12}, vector={"float32": 60e12}, bandwidth=4e12, source="Sheet"
    ),
    achievable=Achievable(
        how="measured",
        note="2026-01-02, driver 570.86.15, torch 2.13.0",
        bandwidth=3.6e12,
        matrix={"bfloat16": 800e12, "float16": 790e12},
        vector={"float32": 54e12},
        matrix_random={"bfloat16": 750e12},
        matrix_sustained={"bfloat16": 700e12},
        cache_bandwidth=9e12,
        host_to_device=55e9,
        launch=LaunchCost(enqueue=4.2e-6, event_tick=0.0),
        ceilings={
            "bandwidth.read": Ceiling(value=3.5e12, spread=0.02, how="sum"),
            "bandwidth.copy": Ceiling(value=3.6e12, spread=0.004, how="copy"),
            "matrix.bfloat16": Ceiling(value=800e12, spread=0.011, how="4096"),
        },
    ),
    sources={
        "memory_bytes": "Sheet, https://example.org/" + "x" * 90,
        "matrix.bfloat16": "Paper, https://example.org",
        "matrix.float64": "Paper, https://example.org",
    },
)
STORED = calibrations.Calibration(
    machine=MADE_UP,
    key=calibrations.CalibrationKey(device="Made-up GPU 80GB", driver="570.86.15", torch="2.13.0"),
    date="2026-01-02T03:04:05+00:00",
    path=Path("/cache/machines/made-up.json"),
)
GOLDEN = """\
Made-up GPU 80GB (made-up)
kind        GPU, nvidia, hopper
processors  100 multiprocessors, boost 1.50 GHz, 700 W
memory      80.0 GiB HBM3
caches      L2 50 MiB, shared memory 228 KiB each
links       NVLink 4 x18 450 GB/s, PCIe 5.0 x16 63.0 GB/s

FLOP/s           datasheet  achievable  random  sustained  share  spread  FLOP/B
---------------  ---------  ----------  ------  ---------  -----  ------  ------
matrix float64      50.0 T           -       -          -      -       -       -
matrix float16           -       790 T       -          -      -       -     219
matrix bfloat16     1.00 P       800 T   750 T      700 T   80 %   1.1 %     222
vector float32      60.0 T      54.0 T       -          -   90 %       -    15.0

bandwidth               datasheet  achievable  share  spread
----------------------  ---------  ----------  -----  ------
memory                  4.00 TB/s   3.60 TB/s   90 %   0.4 %
last-level cache                -   9.00 TB/s      -       -
host to device, pinned  63.0 GB/s   55.0 GB/s   87 %       -
device to host, pinned  63.0 GB/s           -      -       -
device to device         450 GB/s           -      -       -

launch                           time
----------------------------  -------
enqueue (host)                4.20 us
smallest step of event times      0 s

Achievable: measured 2026-01-02, driver 570.86.15, torch 2.13.0.
Widest spread of repeats: 2.0 % (bandwidth.read).
Calibrated 2026-01-02T03:04:05+00:00, driver 570.86.15, torch 2.13.0.
Kept in /cache/machines/made-up.json

Sources (addresses: --json -)
  Sheet: memory_bytes
  Paper: matrix.{bfloat16,float64}"""


def widest(text):
    return max(len(line) for line in text.splitlines())


def test_a_calibrated_gpu():
    assert written(views.document(MADE_UP, STORED)) == GOLDEN


def test_a_cpu_before_calibration():
    machine = Machine(
        id="cpu-x-8",
        name="X",
        kind="cpu",
        vendor="amd",
        architecture="x86_64",
        processors=8,
        memory_bytes=16 * 2**30,
        cache_bytes=64 * 2**20,
        cache_levels={"L1d": 32 * 2**10, "L2": 2**19, "L3": 32 * 2**20},
        vector_bits=256,
        matrix_engine="AMX (bf16)",
    )
    assert written(views.document(machine)) == (
        "X (cpu-x-8)\n"
        "kind        CPU, amd, x86_64\n"
        "processors  8 cores, vectors of 256 bits, AMX (bf16)\n"
        "memory      16.0 GiB\n"
        "caches      L1d 32 KiB, L2 512 KiB, L3 32 MiB, last level in all 64 MiB\n"
        "\n"
        "Not calibrated: `nearpeak machine --calibrate` measures what this machine can\n"
        "reach."
    )


def test_a_machine_of_which_little_is_known():
    bare = Machine(
        id="cpu", name="CPU", kind="cpu", vendor="unknown", architecture="riscv64", processors=None, memory_bytes=None
    )
    assert written(views.document(bare)).startswith("CPU (cpu)\nkind        CPU, unknown, riscv64\n\nNot calibrated")


def test_without_achievable_figures_the_ridge_is_the_datasheets():
    text = written(views.document(dataclasses.replace(MADE_UP, achievable=None)))
    assert "matrix bfloat16     1.00 P     250" in text


@pytest.mark.parametrize("machine", catalogue.machines(), ids=lambda machine: machine.id)
def test_every_catalogue_machine_fits_80_columns(machine):
    text = written(views.document(machine))
    assert widest(text) <= 80
    assert "derated" in text
    assert "Sources" in text


def test_the_list_fits_80_columns_and_has_a_line_per_machine():
    machines = catalogue.machines()
    text = written(views.catalogue_document(machines))
    assert widest(text) <= 80
    assert [line.split()[0] for line in text.splitlines()[2 : 2 + len(machines)]] == [m.id for m in machines]
    line = next(line for line in text.splitlines() if line.startswith("h100-sxm"))
    assert line.split() == [
        "h100-sxm",
        "79.6",
        "GiB",
        "3.35",
        "TB/s",
        "989",
        "T",
        "1.98",
        "P",
        "50",
        "MiB",
        "450",
        "GB/s",
    ]


def test_the_networks_fit_80_columns():
    text = written(views.networks_document(catalogue.networks()))
    assert widest(text) <= 80
    assert "nvlink-5-nvl72" in text
