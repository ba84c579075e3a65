import pytest
import torch

from nearpeak.ops.cost import cost_of, registered
from nearpeak.ops.formulas import views
from nearpeak.ops.work import Work

SCRIPT_ONLY = {
    "aten.__getitem__",  # of lists and dictionaries, as the next
    "aten.get",
    "aten.keys",
    "aten._grad_sum_to_size",  # a reduction that may do nothing
    "aten._ncf_unsqueeze",
    "aten._ncf_view",
    "aten._unwrap_optional",
    "aten.as_tensor",
    "aten.local_value",  # of remote references, as the next
    "aten.to_here",
}
NOT_VIEWS = {
    "aten.coalesce",  # sorts and sums a sparse tensor
    "aten.positive",  # with the pointwise operators; it is never dispatched
}


def derived():
    """Operators that return an alias of an argument and write none, by their schemas."""
    found = set()
    for schema in torch._C._jit_get_all_schemas():
        aliased = any(value.alias_info is not None for value in schema.returns)
        written = any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments)
        if schema.name.startswith("aten::") and aliased and not written:
            found.add(schema.name.replace("::", "."))
    return found


def test_the_views_are_those_that_the_schemas_tell(checked_torch):
    assert {*views.VIEWS, *views.MAY_COPY, *SCRIPT_ONLY, *NOT_VIEWS} == derived()


def test_every_view_is_registered_as_one():
    formulas = registered()
    for name in (*views.VIEWS, *views.UNMARKED_VIEWS, *views.IN_PLACE_VIEWS, *views.METADATA):
        assert formulas[name] is views.view, name


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.view(8, 2),
        lambda x: x.t(),
        lambda x: x.transpose(0, 1),
        lambda x: x.permute(1, 0),
        lambda x: x.unsqueeze(0).expand(5, 4, 4),
        lambda x: x[1:3],
        lambda x: x[0],
        lambda x: x[:, None],
        lambda x: x.split(2),
        lambda x: x.chunk(2, 1),
        lambda x: x.unbind(),
        lambda x: x.narrow(0, 1, 2),
        lambda x: x.diagonal(),
        lambda x: x.detach(),
        lambda x: x.as_strided((2, 2), (1, 1)),
        lambda x: x.unfold(0, 2, 1),
        lambda x: x.reshape(16),
        lambda x: torch.ops.aten._unsafe_view(x, [16]),
        lambda x: torch.ops.aten._reshape_alias(x, [16], [1]),
        lambda x: torch.ops.aten.lift_fresh(x),
        lambda x: torch.view_as_complex(x.view(8, 2)),
        lambda x: torch.view_as_real(torch.view_as_complex(x.view(8, 2))),
        lambda x: torch.ops.aten.alias(x),
        lambda x: x.view(torch.int32),
        lambda x: torch.ops.aten.is_same_size(x, x),
        lambda x: x.clone().unsqueeze_(0),
    ],
)
def test_views_move_nothing(dispatched, call):
    ops = [op for op in dispatched(call, torch.randn(4, 4)) if op.packet != "aten.clone"]
    assert ops
    for op in ops:
        found = cost_of(op)
        assert (found.family, found.work, found.model) == ("view", Work(), "formula"), op.name


def test_a_reshape_that_copies_is_charged(dispatched):
    with torch.inference_mode():
        ops = dispatched(lambda x: x.t().reshape(16), torch.randn(4, 4))
    assert sum(cost_of(op).work.bytes for op in ops) == 2 * 64


def test_a_call_that_may_copy_is_charged_by_its_storages(dispatched):
    (op,) = [op for op in dispatched(lambda x: x.t().contiguous(), torch.randn(4, 4)) if "clone" in op.name]
    assert views.view_or_copy(op).work == Work(bytes_read=64, bytes_written=64)
    (op,) = dispatched(lambda x: x.view(16), torch.randn(4, 4))
    assert views.view_or_copy(op).family == "view"
