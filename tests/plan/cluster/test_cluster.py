import pytest

from nearpeak.errors import UsageError
from nearpeak.machines import catalogue
from nearpeak.plan.cluster.cluster import Cluster, RankGroup, parse_cluster, parse_systems, systems


def test_machine_gets_its_usual_system() -> None:
    cluster = Cluster.of("h100-sxm x 64")
    assert (cluster.gpus, cluster.nodes, cluster.domain_size) == (64, 8, 8)
    assert cluster.link_bandwidth == 450e9
    assert cluster.network_bandwidth == 50e9
    assert cluster.in_switch_reduction
    assert cluster.system == "dgx-h100"


def test_system_and_written_forms() -> None:
    assert Cluster.of("dgx-a100 x 16").network_bandwidth == 25e9
    assert Cluster.of("16x dgx-a100").gpus == 16
    assert Cluster.of("dgx-a100").gpus == 8
    assert parse_cluster("rtx-pro-6000-max-q x 1,024") == ("rtx-pro-6000-max-q", 1024)


def test_machine_object_is_kept() -> None:
    machine = catalogue.find("h200-sxm")
    assert Cluster.of(machine, gpus=32).machine is machine


def test_overrides() -> None:
    cluster = Cluster.of("h100-sxm", gpus=16, network="ethernet-100", adapters_per_node=1, adapters_shared=True)
    assert cluster.network_bandwidth == 12.5e9 / 8
    assert cluster.network_share(1, 1) == 12.5e9
    assert cluster.network_share(1, 8) == 12.5e9 / 8
    assert not Cluster.of("h100-sxm", in_switch_reduction=False).in_switch_reduction


def test_per_node_network_is_divided_among_gpus() -> None:
    assert Cluster.of("aws-p4d x 16").network_bandwidth == 50e9 / 8
    assert Cluster.of("aws-p5 x 16").network_bandwidth == 50e9


@pytest.mark.parametrize(("gpus", "domain"), [(8, 8), (64, 64), (72, 72), (128, 64), (144, 72), (256, 64), (96, 48)])
def test_rack_is_used_in_equal_blocks(gpus: int, domain: int) -> None:
    assert Cluster.of("gb200", gpus=gpus).domain == domain


def test_group_lies_where_the_stride_puts_it() -> None:
    cluster = Cluster.of("h100-sxm x 64")
    assert cluster.group(8) == RankGroup(ranks=8, ranks_per_domain=8, concurrent_groups=1)
    assert cluster.group(8, stride=8) == RankGroup(ranks=8, ranks_per_domain=1, concurrent_groups=8)
    assert cluster.group(16, stride=2) == RankGroup(ranks=16, ranks_per_domain=4, concurrent_groups=2)
    assert cluster.group(4).concurrent_groups == 2
    assert cluster.group(16, stride=2).domains == 4
    assert Cluster.of("gb200 x 128").group(64).domains == 1


def test_own_adapter_is_not_shared() -> None:
    cluster = Cluster.of("h100-sxm x 64")
    assert cluster.network_share(1, 1) == 50e9
    assert cluster.network_share(1, 8) == 50e9


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Cluster.of("h100-sxm x 12"), ("gpus=12", "gpus=8", "gpus=16")),
        (lambda: Cluster.of("h100 x 8"), ("'h100'", "h100-sxm")),
        (lambda: Cluster.of("h100-sxn x 8"), ("h100-sxm",)),
        (lambda: Cluster.of("h100-sxm", gpus=0), ("gpus=0", "gpus=1")),
        (lambda: Cluster.of("h100-sxm x 8", gpus=16), ("8 GPUs", "gpus=16")),
        (lambda: Cluster.of("h100-sxm x 16", network="infiniband-ndx"), ("network", "infiniband-ndr")),
        (lambda: Cluster.of("gb200 x 64", domain_size=10), ("domain_size=10", "domain_size=8")),
        (lambda: Cluster.of("h100-sxm x 16").group(32), ("ranks=32", "ranks=16")),
        (lambda: Cluster.of("h100-sxm x 16").group(4, stride=8), ("stride=8", "ranks=2")),
    ],
)
def test_error_names_the_field_and_the_nearest_value(call, words) -> None:
    with pytest.raises(UsageError) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


def test_every_system_builds_and_has_a_source() -> None:
    assert len(systems()) >= 20
    for system in systems():
        cluster = Cluster.of(f"{system.id} x {2 * system.domain_size}")
        assert cluster.domains == 2
        assert cluster.link_bandwidth > 0
        assert cluster.network_bandwidth > 0
        assert "http" in cluster.sources["system"]


def test_every_machine_of_the_catalogue_builds() -> None:
    for machine in catalogue.machines():
        assert Cluster.of(machine.id).gpus >= 1


def test_gpus_of_whose_links_nothing_is_known_are_one() -> None:
    assert Cluster.of("mi300a").gpus == 1
    with pytest.raises(UsageError, match=r"no bandwidth of the links.*gpus=1"):
        Cluster.of("mi300a x 4")


def test_catalogue_refuses_two_defaults_and_missing_fields() -> None:
    entry = '[sources.s]\ntitle = "t"\nurl = "u"\n[system.a]\nmachine = "h100-sxm"\nsource = "s"\n'
    entry += 'network = "ethernet-100"\n'
    with pytest.raises(ValueError, match="gpus_per_node"):
        parse_systems(entry)
    with pytest.raises(ValueError, match="no machine"):
        parse_systems(entry.replace("h100-sxm", "h1000"))
