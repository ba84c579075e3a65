import pytest

from nearpeak.errors import UsageError
from nearpeak.ops.cost import Cost, accesses, cost_of, registered
from nearpeak.ops.declare import declare_cost, forget_cost, operator_name
from nearpeak.ops.op import Op
from nearpeak.ops.tensor import Tensor


def tensor(storage, *shape, dtype="bfloat16"):
    strides = tuple(4 ** (len(shape) - place - 1) for place in range(len(shape)))
    return Tensor(shape=shape, strides=strides, dtype=dtype, storage=storage)


X, WEIGHT, RESULT = tensor(0, 4, 4), tensor(1, 4, 4), tensor(2, 4, 4)
OP = Op(name="mylib.norm.default", arguments={"x": X, "weight": WEIGHT, "eps": 1e-6}, outputs=(RESULT,))


@pytest.fixture(autouse=True)
def unchanged():
    """No test leaves a declaration behind."""
    before = dict(registered())
    yield
    registered().clear()
    registered().update(before)
    from nearpeak.ops import declare

    declare._declared.clear()
    declare._hidden.clear()


def test_without_a_declaration_only_what_it_writes_is_charged():
    cost = cost_of(OP)
    assert (cost.model, cost.work.bytes_read, cost.work.bytes_written) == ("operands", 0, 32)


def test_the_short_form_reads_what_is_named():
    declare_cost("mylib::norm", reads=["x"], vector_flops=lambda op: 3 * op.tensor("x").elements)
    cost = cost_of(OP)
    assert (cost.model, cost.family) == ("formula", "declared")
    assert (cost.work.bytes_read, cost.work.bytes_written) == (32, 32)
    assert cost.vector_flops == {"float32": 48}


def test_the_short_form_reads_all_that_is_not_just_written():
    declare_cost("mylib::norm", flops=1000, family="matrix")
    cost = cost_of(OP)
    assert (cost.family, cost.work.bytes_read, cost.flops) == ("matrix", 64, {"bfloat16": 1000})
    out = Op(name="mylib.norm.out", arguments={"x": X, "out": RESULT}, outputs=(), mutated=("out",))
    assert (cost_of(out).work.bytes_read, cost_of(out).work.bytes_written) == (32, 32)


def test_the_long_form_is_a_formula():
    @declare_cost("mylib::norm")
    def norm(op):
        x = op.tensor("x")
        return Cost(family="declared", reads=accesses((x, x.bytes / 2)), writes=accesses(*op.written))

    assert cost_of(OP).work.bytes_read == 16
    assert norm(OP) == cost_of(OP)


def test_an_overload_goes_before_the_operator():
    declare_cost("mylib::norm", reads=["x"])
    declare_cost("mylib::norm.default", reads=["x", "weight"])
    assert cost_of(OP).work.bytes_read == 64


def test_a_second_declaration_is_an_error_that_says_where_the_first_is():
    @declare_cost("mylib::norm")
    def norm(op):
        return Cost(family="declared")

    with pytest.raises(UsageError, match=r"mylib\.norm has a cost already \(declared in .*test_declare\.py:\d+\)"):
        declare_cost("mylib.norm", reads=["x"])
    declare_cost("mylib.norm", reads=["x"], replace=True)
    assert cost_of(OP).work.bytes_read == 32
    forget_cost("mylib::norm")
    assert cost_of(OP).model == "operands"


def test_a_formula_of_the_library_is_replaced_only_when_asked_and_comes_back():
    op = Op(name="aten.relu.default", arguments={"self": X}, outputs=(RESULT,))
    before = cost_of(op)
    with pytest.raises(UsageError, match="nearpeak's own"):
        declare_cost("aten::relu", reads=[])
    declare_cost("aten::relu", reads=[], replace=True)
    declare_cost("aten::relu", reads=["self"], flops=8, replace=True)
    assert cost_of(op).flops == {"bfloat16": 8}
    forget_cost("aten::relu")
    assert cost_of(op) == before


def test_what_is_wrong_in_a_declaration_is_named():
    declare_cost("mylib::norm", reads=["wieght"])
    with pytest.raises(UsageError, match=r"no argument 'wieght'.*weight"):
        cost_of(OP)
    declare_cost("mylib::norm", flops=lambda op: op.tensor("y").elements, replace=True)
    with pytest.raises(UsageError, match=r"declared for mylib\.norm failed: KeyError.*x, weight, eps"):
        cost_of(OP)
    declare_cost("mylib::norm", replace=True)(lambda op: 12)
    with pytest.raises(UsageError, match="gave 12, which is no"):
        cost_of(OP)
    declare_cost("mylib::norm", flops=-1, replace=True)
    with pytest.raises(UsageError, match="negative"):
        cost_of(OP)


@pytest.mark.parametrize("name", ["norm", "mylib::", "a.b.c.d", "", 3, lambda: None])
def test_what_names_no_operator_is_an_error(name):
    with pytest.raises(UsageError, match="names no operator"):
        operator_name(name)


def test_forgetting_what_was_not_declared_is_an_error():
    declare_cost("mylib::norm", reads=["x"])
    with pytest.raises(UsageError, match=r"mylib\.nrom has no declared cost.*mylib\.norm"):
        forget_cost("mylib::nrom")
