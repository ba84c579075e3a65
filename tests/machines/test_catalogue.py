import dataclasses
import math
import tomllib
from importlib import resources

import pytest

from nearpeak.errors import UnknownMachine, UsageError
from nearpeak.machines import catalogue
from nearpeak.machines.machine import Machine

RAW = tomllib.loads(resources.files("nearpeak.machines").joinpath("catalogue.toml").read_text(encoding="utf-8"))
EACH_MACHINE = pytest.mark.parametrize("machine", catalogue.machines(), ids=lambda machine: machine.id)

LANES = {"7.0": 64, "7.5": 64, "8.0": 64, "8.6": 128, "8.9": 128, "9.0": 128, "10.0": 128, "10.3": 128, "12.0": 128}
LANES |= {"gfx908": 64, "gfx90a": 128, "gfx942": 128, "gfx950": 128}
"""float32 multiply-adds per multiprocessor and clock."""
MATRIX_FLOPS = {"7.0": 1024, "7.5": 1024, "8.0": 2048, "8.6": 1024, "8.9": 1024, "9.0": 4096, "10.0": 8192}
MATRIX_FLOPS |= {"10.3": 8192, "12.0": 1024, "gfx908": 1024, "gfx90a": 1024, "gfx942": 2048, "gfx950": 4096}
"""Dense 16-bit matrix FLOP per multiprocessor and clock: the most that any device of the generation has."""

SMALL = """
[sources.sheet]
title = "The sheet"
url = "https://example.org/sheet"
[sources.paper]
title = "The paper"
url = "https://example.org/paper"
[device.one]
name = "One 8GB"
vendor = "nvidia"
architecture = "hopper"
compute_capability = "9.0"
driver_names = ["NVIDIA One"]
memory_kind = "HBM3"
memory_bytes = 8_000_000_000
memory_bandwidth = 1e12
multiprocessors = 10
source = "sheet"
[device.one.matrix]
bfloat16 = 100e12
float8 = 200e12
[device.one.vector]
float32 = 10e12
[device.one.link]
name = "NVLink 4"
bandwidth = 450e9
links = 18
[device.one.pcie]
generation = 5
lanes = 16
bandwidth = 63e9
[device.one.sources]
matrix = "paper"
"matrix.float8" = "sheet"
multiprocessors = "paper"
[network.wire]
name = "Wire"
bandwidth = 25e9
per = "port"
source = "sheet"
"""


def figures(machine: Machine) -> set[str]:
    """The names of all figures that the machine has, as its `sources` spell them."""
    names = {"memory_bytes", "bandwidth"}
    optional = ("processors", "cache_bytes", "shared_memory_bytes", "clock_base_hz", "clock_boost_hz", "power_watts")
    names |= {name for name in optional if getattr(machine, name) is not None}
    names |= {f"matrix.{dtype}" for dtype in machine.theoretical.matrix}
    names |= {f"vector.{dtype}" for dtype in machine.theoretical.vector}
    names |= {"link.bandwidth"} if machine.link else set()
    names |= {"pcie.generation", "pcie.lanes", "pcie.bandwidth"} if machine.pcie else set()
    return names


def test_there_are_at_least_forty_devices_in_file_order():
    assert len(catalogue.machines()) >= 40
    assert [machine.id for machine in catalogue.machines()] == list(RAW["device"])


@pytest.mark.parametrize(
    "identifier",
    "v100-sxm-16gb t4 a10 a30 a40 a100-sxm-40gb a100-sxm-80gb a100-pcie-40gb a100-pcie-80gb l4 l40 l40s h100-sxm "
    "h100-pcie h100-nvl h800-sxm h20 h200-sxm h200-nvl gh200-96gb b100 b200 b300 gb200 rtx-3090 rtx-4090 rtx-5090 "
    "rtx-6000-ada rtx-a4000 rtx-a6000 rtx-pro-6000 mi250x-gcd mi300x mi325x mi355x".split(),
)
def test_the_devices_people_ask_for_are_there(identifier):
    assert catalogue.find(identifier).id == identifier


@EACH_MACHINE
def test_every_figure_has_a_source_with_an_address(machine):
    for name in figures(machine):
        assert ", http" in machine.sources[name], name
    for source in (machine.theoretical.source, *(link.source for link in (machine.link, machine.pcie) if link)):
        assert ", http" in source


@EACH_MACHINE
def test_every_driver_name_finds_its_device(machine):
    for name in RAW["device"][machine.id]["driver_names"]:
        assert catalogue.find(name) is machine
        assert catalogue.by_driver_name(name) is machine


@pytest.mark.parametrize(
    ("name", "identifier"),
    [
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40", "l40"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A40", "a40"),
        ("NVIDIA RTX A4000", "rtx-a4000"),
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA GH200 480GB", "gh200-96gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("NVIDIA GeForce RTX 3090 Ti", "rtx-3090-ti"),
    ],
)
def test_names_that_contain_each_other_are_kept_apart(name, identifier):
    assert catalogue.find(name).id == identifier


@pytest.mark.parametrize(
    ("name", "suggestions"),
    [
        ("NVIDIA H100", ["'h100-sxm'", "'h100-pcie'", "'h100-nvl'"]),
        ("H100-SXM", ["'h100-sxm'"]),
        ("nvidia l40", ["'l40' (NVIDIA L40)"]),
        ("a100", ["'a100-sxm-80gb'", "'a100-pcie-40gb'"]),
        ("rtx4090", ["'rtx-4090'"]),
        ("mi300", ["'mi300x'", "'mi300a'"]),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", ["'h100-sxm'"]),
    ],
)
def test_a_near_miss_is_an_error_with_suggestions_and_both_ways_out(name, suggestions):
    assert catalogue.by_driver_name(name) is None
    with pytest.raises(UnknownMachine) as raised:
        catalogue.find(name)
    message = str(raised.value)
    assert repr(name) in message
    assert all(suggestion in message for suggestion in suggestions), message
    assert "nearpeak machine --list" in message
    assert "nearpeak machine --calibrate" in message


@pytest.mark.parametrize("name", ["", "zzz", " h100-sxm", "h100-sxm ", "None"])
def test_a_name_like_nothing_is_an_error_without_a_guess_at_a_figure(name):
    with pytest.raises(UnknownMachine):
        catalogue.find(name)


def test_an_a100_with_40_gb_has_less_bandwidth_than_one_with_80():
    bandwidths = [
        catalogue.find(name).theoretical.bandwidth
        for name in ("a100-sxm-40gb", "a100-pcie-40gb", "a100-pcie-80gb", "a100-sxm-80gb")
    ]
    assert bandwidths == [1.555e12, 1.555e12, 1.935e12, 2.039e12]


@pytest.mark.parametrize(
    ("identifier", "dtype", "dense"),
    [
        ("a100-sxm-80gb", "bfloat16", 312e12),
        ("a100-sxm-80gb", "tfloat32", 156e12),
        ("h100-sxm", "bfloat16", 989.4e12),
        ("h100-sxm", "float8", 1979e12),
        ("h100-pcie", "bfloat16", 756e12),
        ("h200-sxm", "bfloat16", 989.4e12),
        ("b200", "bfloat16", 2250e12),
        ("b200", "float8", 4500e12),
        ("l40s", "bfloat16", 362e12),
        ("l4", "bfloat16", 121e12),
        ("rtx-4090", "bfloat16", 165.2e12),
        ("mi300x", "bfloat16", 1307.4e12),
    ],
)
def test_matrix_peaks_are_the_dense_ones(identifier, dtype, dense):
    assert catalogue.find(identifier).theoretical.peak(dtype) == pytest.approx(dense, rel=0.005)


@EACH_MACHINE
def test_figures_are_physical(machine):
    capability = RAW["device"][machine.id]["compute_capability"]
    ceilings = machine.theoretical
    if machine.processors and machine.clock_boost_hz:
        cycles = machine.processors * machine.clock_boost_hz
        assert ceilings.vector["float32"] == pytest.approx(2 * LANES[capability] * cycles, rel=0.03)
        for dtype in ("bfloat16", "float16"):
            assert ceilings.matrix.get(dtype, 0) <= 1.01 * MATRIX_FLOPS[capability] * cycles  # a sparse one is double
    assert ceilings.matrix.get("float8", math.inf) >= ceilings.matrix.get("bfloat16", 0)
    assert ceilings.matrix.get("float4", math.inf) >= ceilings.matrix.get("float8", 0)
    assert ceilings.matrix.get("tfloat32", 0) <= ceilings.matrix.get("bfloat16", math.inf)
    assert 1e11 < ceilings.bandwidth < 2e13
    assert 8e9 <= machine.memory_bytes <= 400e9
    assert 1 <= ceilings.peak("float16") / ceilings.bandwidth < 1000


@EACH_MACHINE
def test_achievable_is_derated_by_the_stated_factors(machine):
    assert machine.achievable.how == "derated"
    assert machine.achievable.bandwidth == pytest.approx(catalogue.BANDWIDTH_FACTOR * machine.theoretical.bandwidth)
    for engine, factor in (("matrix", catalogue.MATRIX_FACTOR), ("vector", catalogue.VECTOR_FACTOR)):
        peaks, reached = getattr(machine.theoretical, engine), getattr(machine.achievable, engine)
        assert reached == pytest.approx({dtype: factor * peak for dtype, peak in peaks.items()})
    for factor in ("0.98", "0.94", "0.96"):
        assert factor in machine.achievable.note


def test_networks_have_sources_and_bandwidths():
    networks = catalogue.networks()
    assert len({network.id for network in networks}) == len(networks) >= 5
    for network in networks:
        assert ", http" in network.source
        assert 1e9 < network.bandwidth < 2e12
        assert network.per in ("port", "node", "gpu")


def test_a_small_file_becomes_machines_with_the_source_of_each_figure():
    machine = catalogue.parse(SMALL).machines["one"]
    assert machine.link.name == "NVLink 4 x18"
    assert machine.pcie.name == "PCIe 5.0 x16"
    assert machine.cache_bytes is None
    assert machine.sources["matrix.bfloat16"] == "The paper, https://example.org/paper"
    assert machine.sources["matrix.float8"] == "The sheet, https://example.org/sheet"
    assert machine.sources["processors"].startswith("The paper")
    assert machine.sources["vector.float32"].startswith("The sheet")
    assert figures(machine) <= set(machine.sources)
    assert dataclasses.replace(machine, id="two").id == "two"


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("memory_bandwidth = 1e12", "", "memory_bandwidth"),
        ("memory_bandwidth = 1e12", "memory_bandwidth = -1.0", "memory_bandwidth"),
        ("memory_bandwidth = 1e12", "memory_bandwidth = inf", "memory_bandwidth"),
        ("memory_bandwidth = 1e12", "memory_bandwidth = nan", "memory_bandwidth"),
        ("memory_bandwidth = 1e12", 'memory_bandwidth = "1e12"', "memory_bandwidth"),
        ("multiprocessors = 10", "multiprocessors = true", "multiprocessors"),
        ("multiprocessors = 10", "multiprocesors = 10", "multiprocesors"),
        ("bfloat16 = 100e12", "bf16 = 100e12", "matrix.bf16"),
        ("float32 = 10e12", "", "vector"),
        ("lanes = 16", "", "pcie.lanes"),
        ('name = "NVLink 4"', "", "link.name"),
        ('vendor = "nvidia"', "vendor = 3", "vendor"),
        ('driver_names = ["NVIDIA One"]', 'driver_names = "NVIDIA One"', "driver_names"),
        ('multiprocessors = "paper"', 'multiprocessors = "nowhere"', "sources.multiprocessors"),
        ('multiprocessors = "paper"', 'power_watts = "paper"', "sources.power_watts"),
    ],
)
def test_a_malformed_entry_is_an_error_that_names_device_and_field(old, new, complaint):
    assert old in SMALL
    with pytest.raises(ValueError, match=r"device 'one'") as raised:
        catalogue.parse(SMALL.replace(old, new, 1))
    assert f"'{complaint}'" in str(raised.value)


def test_a_device_without_a_source_is_an_error():
    with pytest.raises(ValueError, match="has no source"):
        catalogue.parse(SMALL.replace('multiprocessors = 10\nsource = "sheet"', "multiprocessors = 10"))


def test_a_driver_name_belongs_to_one_device():
    second = SMALL[SMALL.index("[device.one]") : SMALL.index("[network")].replace("device.one", "device.two")
    with pytest.raises(ValueError, match=r"device 'two'.*'NVIDIA One' belongs to 'one'"):
        catalogue.parse(SMALL + second)


@pytest.mark.parametrize(
    ("addition", "complaint"),
    [("[gpu.x]\nname = 'x'", "unknown table 'gpu'"), ("[device.Two]\nname = 'x'\ndriver_names = []", "lower-case")],
)
def test_a_misplaced_or_misspelt_table_is_an_error(addition, complaint):
    with pytest.raises(ValueError, match=complaint):
        catalogue.parse(SMALL + addition)


def test_a_network_per_something_else_is_an_error():
    with pytest.raises(ValueError, match=r"network 'wire', field 'per'"):
        catalogue.parse(SMALL.replace('per = "port"', 'per = "rack"'))


def test_memory_is_what_the_driver_reports():
    assert catalogue.find("h200-sxm").memory_bytes == 143_771 * 2**20
    assert catalogue.find("h100-sxm").memory_bytes == 81_559 * 2**20  # sold as 80 GB
    assert "nvidia-smi" in catalogue.find("h200-sxm").sources["memory_bytes"]


def test_a_machine_is_derated_by_what_is_asked():
    h100 = catalogue.find("h100-sxm")
    theoretical = catalogue.derate(h100, {})
    assert theoretical.achievable.bandwidth == h100.theoretical.bandwidth
    assert theoretical.achievable.matrix == h100.theoretical.matrix
    half = catalogue.derate(h100, {"matrix": 0.5}).achievable
    assert half.peak("bfloat16") == 0.5 * h100.theoretical.peak("bfloat16")
    assert half.bandwidth == h100.theoretical.bandwidth and "x 0.5 (matrix)" in half.note
    for wrong in ({"matrix": 1.5}, {"memory": 0.0}, {"link": 0.5}):
        with pytest.raises(UsageError, match="memory, matrix and vector, each above 0 and at most 1"):
            catalogue.derate(h100, wrong)
    with pytest.raises(UsageError, match="has no datasheet"):
        catalogue.derate(dataclasses.replace(h100, theoretical=None), {})
