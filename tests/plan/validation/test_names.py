"""Names of GPUs and models as tables print them."""

from __future__ import annotations

import pytest

from nearpeak.machines import catalogue
from nearpeak.plan.validation.names import gpu_id


@pytest.mark.parametrize(
    ("name", "identifier"),
    (
        ("A100-80GB DGX", "a100-sxm-80gb"),
        ("A800", "a800-sxm-80gb"),
        ("A800-80GB", "a800-sxm-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40gb"),
        ("A100 PCIe 80GB", "a100-pcie-80gb"),
        ("H100 80GB HBM3", "h100-sxm"),
        ("H100 SXM5 80GB", "h100-sxm"),
        ("AMD Instinct MI300X", "mi300x"),
        ("4090", "rtx-4090"),
        ("GeForce RTX 4090", "rtx-4090"),
        ("GB200 NVL72", "gb200"),
        ("GH200 144GB", "gh200-144gb"),
        ("H20", "h20"),
        ("MI250X 1 GCD", "mi250x-gcd"),
        ("B200-180GB", "b200"),
        ("A100-80GB-SXM 330W", "a100-sxm-80gb"),
    ),
)
def test_a_name_of_a_table(name: str, identifier: str) -> None:
    assert gpu_id(name) == identifier


@pytest.mark.parametrize("name", ("TPU v5p", "A10G", "H100-48GB", "B2000", ""))
def test_no_neighbor_stands_in_for_another_gpu(name: str) -> None:
    assert gpu_id(name) is None


def test_every_machine_of_the_catalogue_is_found_by_its_id() -> None:
    for machine in catalogue.machines():
        assert gpu_id(machine.id) == machine.id
