import pytest
import torch

from nearpeak.work.cost import registered
from nearpeak.work.families import creation, indexing, movement, scattering, sorting, views


def exists(name):
    """Whether torch has an operator, or an overload of one, of this name."""
    namespace, operator, *overload = name.split(".")
    found = getattr(getattr(torch.ops, namespace), operator, None)
    if found is None:
        return any(schema.name == f"{namespace}::{operator}" for schema in torch._C._jit_get_all_schemas())
    return not overload or overload[0] in found.overloads()


@pytest.mark.parametrize("family", [creation, indexing, movement, scattering, sorting, views])
def test_the_names_of_these_families_exist_in_torch(family):
    names = [name for name, formula in registered().items() if formula.__module__ == family.__name__]
    assert names
    assert [name for name in names if not exists(name)] == []
