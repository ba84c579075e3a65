import importlib.util
from pathlib import Path

import pytest

from nearpeak._records import to_json
from nearpeak.plan.cluster.collectives import load_collective_constants
from nearpeak.plan.validation.collectives import read_collectives

SCRIPT = Path(__file__).parents[2] / "benchmarks/plan/fit_collectives.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("fit_collectives", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_file_is_what_the_script_writes(script) -> None:
    points = script.prepare(read_collectives(script.ROWS))
    fitted = script.fit_link("ampere", points)
    kept = load_collective_constants().links["ampere"]
    assert fitted.systems == kept.systems == ("a100_sxm",)
    for name, numbers in fitted.protocols.items():
        for field, value in to_json(numbers).items():
            assert value == pytest.approx(to_json(kept.protocols[name])[field], rel=0.02), (name, field)


def test_few_constants_for_many_rows(script) -> None:
    constants = load_collective_constants()
    fitted = sum(len(script.FREE[name]) for link in constants.links.values() for name in link.protocols)
    fitted += 2 * sum(len(constants.links[kind].protocols) for kind in ("pcie", "host"))
    assert fitted < 130
    assert sum(link.rows for link in constants.links.values()) == 2100


def test_bandwidths_are_shares_of_the_link() -> None:
    for kind, link in load_collective_constants().links.items():
        for name, numbers in link.protocols.items():
            if kind in ("ampere", "hopper", "blackwell"):
                assert 0.3 < numbers.share < 0.9, (kind, name)
            assert numbers.base > 0
