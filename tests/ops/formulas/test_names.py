"""Formulas stand under names that torch has."""

import torch
import torch.ao.quantization.fx._decomposed
import torch.distributed._symmetric_memory  # registers operators, as the line above does

from nearpeak.ops.cost import registered
from nearpeak.ops.custom_schemas import custom_schemas

CHECKED = "2.13"
"""The torch whose names these are. Others lack what is newer or was removed."""
MOST_UNKNOWN = 0.03


def exists(name):
    """Whether torch has an operator, or an overload of one, of this name."""
    if name in ("host", "inductor", "partial", "unknown"):  # ops of traces, each of a name of its own
        return True
    namespace, operator, *overload = name.split(".")
    if namespace == "higher_order":
        return hasattr(torch.ops.higher_order, operator)
    schemas = torch._C._jit_get_schemas_for_operator(f"{namespace}::{operator}")
    overloads = {schema.overload_name or "default" for schema in schemas}
    return bool(overloads) and overloads.issuperset(overload)


def is_custom(name):
    return "." in name and bool(custom_schemas(name.replace(".", "::", 1)))


def test_the_names_of_all_formulas_exist_in_torch():
    # See test_own_kernels.py for ours, and test_serving.py for those of libraries that need not be installed.
    torch_s = (name for name in registered() if not name.startswith("nearpeak.") and not is_custom(name))
    missing = sorted(name for name in torch_s if not exists(name))
    assert len(registered()) > 1200
    if torch.__version__.startswith(CHECKED):
        assert missing == []
    else:
        print(f"torch {torch.__version__} does not have {' '.join(missing)}")
        assert len(missing) / len(registered()) < MOST_UNKNOWN


def test_a_name_that_torch_does_not_have_is_seen():
    assert exists("aten.sum.dim_IntList")
    assert not exists("aten.sum.sideways")
    assert not exists("aten.summ")
    assert not exists("higher_order.flex_inattention")
