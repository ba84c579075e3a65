from nearpeak.bound.expected import CACHED
from nearpeak.machines.reference import reference_efficiency


def test_the_table_has_a_point_for_every_kind_in_order_of_size():
    found = reference_efficiency()
    assert {"any", "pointwise", "movement", "reduction", "normalization", "matrix/compute"} <= set(found.efficiency)
    for name, points in found.efficiency.items():
        assert points
        # tensors that are in the cache may be in one before the last level, whose bandwidth is the bound
        least = 0.4 if name.endswith(CACHED) else 0.9
        bounds = [point.bound_seconds for point in points]
        assert bounds == sorted(bounds)
        assert all(point.ratio > least for point in points)
