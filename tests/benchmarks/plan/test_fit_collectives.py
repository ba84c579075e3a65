import pytest

from benchmarks.plan import fit_collectives
from nearpeak._records import to_json
from nearpeak.plan.cluster.collectives import load_collective_constants
from nearpeak.plan.validation.validate import read_collectives


def test_the_file_is_what_the_script_writes() -> None:
    points = fit_collectives.prepare(read_collectives(fit_collectives.ROWS))
    fitted = fit_collectives.fit_link("ampere", points)
    kept = load_collective_constants().links["ampere"]
    assert fitted.systems == kept.systems == ("a100_sxm",)
    for name, numbers in fitted.protocols.items():
        for field, value in to_json(numbers).items():
            assert value == pytest.approx(to_json(kept.protocols[name])[field], rel=0.02), (name, field)


def test_few_constants_for_many_rows() -> None:
    constants = load_collective_constants()
    fitted = sum(len(fit_collectives.FREE[name]) for link in constants.links.values() for name in link.protocols)
    fitted += 2 * sum(len(constants.links[kind].protocols) for kind in ("pcie", "host"))
    assert fitted < 130
    assert sum(link.rows for link in constants.links.values()) == 2100


def test_bandwidths_are_shares_of_the_link() -> None:
    for kind, link in load_collective_constants().links.items():
        for name, numbers in link.protocols.items():
            if kind in ("ampere", "hopper", "blackwell"):
                assert 0.3 < numbers.share < 0.9, (kind, name)
            assert numbers.base > 0
