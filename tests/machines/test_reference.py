import pytest

from nearpeak.machines.reference import reference


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_the_table_has_a_point_for_every_kind_in_order_of_size(kind):
    found = reference(kind)
    assert {"any", "pointwise", "movement", "reduction", "normalisation", "matrix/compute"} <= set(found.efficiency)
    for points in found.efficiency.values():
        assert points
        bounds = [point.bound_seconds for point in points]
        assert bounds == sorted(bounds)
        assert all(point.ratio > 0.9 for point in points)
