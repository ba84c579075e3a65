import dataclasses
import functools

import pytest
import torch

from nearpeak.errors import CaseError
from nearpeak.measure.case import Case, Resampled, as_case, describe_error, load
from nearpeak.ops.work import Work

X, Y, Z = torch.randn(2), torch.randn(3), torch.randn(4)


def found(tensors):
    return [tensor.numel() for tensor in tensors]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (torch.zeros(2, 3), "a tensor of shape (2, 3) of type Tensor"),
        (None, "None of type NoneType"),
        ("softmax", "'softmax' of type str"),
        (list(range(1000)), "... of type list"),
    ],
)
def test_what_cannot_be_called_is_refused_with_what_to_write_instead(value, shown):
    with pytest.raises(CaseError) as caught:
        Case(value)
    message = str(caught.value)
    assert shown in message
    assert "bench(torch.softmax, x, -1), not bench(torch.softmax(x, -1))" in message
    assert len(message) < 300


def test_a_case_calls_its_function_with_its_arguments():
    assert Case(lambda a, b, c: (a, b, c), 1, 2, c=3).call() == (1, 2, 3)


def test_a_case_is_named_after_its_function_or_its_type():
    assert Case(torch.softmax, X, -1).name == "softmax"
    assert Case(torch.nn.ReLU(), X).name == "ReLU"
    assert Case(functools.partial(torch.add, X), Y).name == "partial"
    assert Case(torch.exp, X, name="mine").name == "mine"


def test_a_case_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Case(torch.exp, X).fn = torch.sin


def test_a_case_on_other_arguments_keeps_the_rest():
    work, reset = Work(bytes_read=1), list
    case = Case(torch.softmax, X, work=work, reset=reset, name="mine", parameters={"n": "2"}, dim=0)
    other = case.with_arguments((Y,), {"dim": -1})
    assert (other.args, other.kwargs) == ((Y,), {"dim": -1})
    assert (other.fn, other.work, other.reset, other.name) == (torch.softmax, work, reset, "mine")
    assert other.parameters == {"n": "2"}


def test_tensors_are_found_through_lists_tuples_and_dictionaries():
    assert found(Case(print, X, [Y, (1, {"z": Z})], "text", None, key=[[X]]).tensors()) == [2, 3, 4, 2]
    assert found(Case(print, 1, "text", key=2).tensors()) == []


def test_tensors_are_found_in_a_closure():
    x, pair, model, unrelated = X, [Y, Z], torch.nn.Linear(5, 1, bias=False), 3

    def call():
        return x, pair, model, unrelated

    assert sorted(found(Case(call).hidden_tensors())) == [2, 3, 4, 5]
    assert found(Case(call).tensors()) == []


def test_tensors_are_found_in_defaults():
    def call(a, x=X, *, scale=2):
        return a, x, scale

    assert found(Case(call, 1).hidden_tensors()) == [2]


def test_tensors_are_found_in_partials_of_partials():
    call = functools.partial(functools.partial(torch.addmm, Y), X, beta=Z)
    assert sorted(found(Case(call).hidden_tensors())) == [2, 3, 4]


def test_tensors_are_found_behind_a_decorator():
    x = X

    def inner():
        return x

    @functools.wraps(inner)
    def outer():
        return inner()

    assert found(Case(outer).hidden_tensors()) == [2]


def test_parameters_of_a_module_and_of_its_method_are_found():
    model = torch.nn.Linear(2, 3)
    assert sorted(found(Case(model, X).hidden_tensors())) == [3, 6]
    assert sorted(found(Case(model.forward, X).hidden_tensors())) == [3, 6]


def test_a_cell_that_is_not_filled_yet_is_no_problem():
    def make():
        def call():
            return later

        case = Case(call)
        assert found(case.hidden_tensors()) == []
        later = X
        assert found(case.hidden_tensors()) == [2]

    make()


def test_a_case_is_taken_as_it_is_and_may_be_renamed():
    case = Case(torch.softmax, X, -1, work=Work(bytes_read=8))
    taken = as_case(case, (), {}, work=None, reset=None, name="renamed")
    assert (taken.name, taken.work, taken.args) == ("renamed", Work(bytes_read=8), (X, -1))


def test_a_case_with_more_arguments_is_refused():
    with pytest.raises(CaseError, match=r"either bench\(case\) or bench\(fn, \*args\)"):
        as_case(Case(torch.exp, X), (Y,), {})


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes cases.py and stands beside it."""
    monkeypatch.chdir(tmp_path)

    def write(text):
        (tmp_path / "cases.py").write_text(text)

    return write


def test_a_case_is_loaded_from_a_file(write):
    write("import torch\ndef softmax(rows: int = 2):\n    return torch.softmax, torch.ones(rows, 3), -1\n")
    builder = load("cases.py:softmax")
    case = builder.build(rows=5)
    assert case.call().shape == (5, 3)
    assert case.name == "softmax"
    assert case.parameters == {"rows": "5"}
    assert builder.build().parameters == {}


@pytest.mark.parametrize(
    ("returned", "result"),
    [("len, [1, 2]", 2), ("lambda: 7", 7), ("nearpeak.Case(max, 3, 4, name='own')", 4), ("(lambda: 8,)", 8)],
)
def test_a_builder_may_return_a_callable_a_tuple_or_a_case(write, returned, result):
    write(f"import nearpeak\ndef build():\n    return {returned}\n")
    case = load("cases.py:build").build()
    assert case.call() == result
    assert case.name == "build"


def test_a_case_file_may_import_its_neighbors(write, tmp_path):
    (tmp_path / "neighbor_of_cases.py").write_text("value = 5\n")
    write("from neighbor_of_cases import value\ndef build():\n    return lambda: value\n")
    assert load("cases.py:build").build().call() == 5


def refused(reference, **parameters):
    with pytest.raises(CaseError) as caught:
        load(reference).build(**parameters)
    return caught.value


@pytest.mark.parametrize("reference", ["cases.py", "softmax", "cases:softmax", "", ":softmax", "cases.txt:softmax"])
def test_a_reference_that_is_none_is_answered_with_the_form(reference):
    assert str(refused(reference)) == (
        f"Cannot read {reference!r} as a case. Write FILE.py:FUNCTION, for example cases.py:softmax."
    )


def test_a_missing_file_is_named_with_the_folder(write, tmp_path):
    assert str(refused("case.py:softmax")) == f"There is no file 'case.py' (from {tmp_path})."


def test_an_error_while_importing_names_the_place_and_keeps_the_cause(write):
    write("x = 1\ny = x / 0\n")
    error = refused("cases.py:softmax")
    assert "failed while it was imported: ZeroDivisionError: division by zero" in str(error)
    assert "cases.py:2" in str(error)
    assert isinstance(error.__cause__, ZeroDivisionError)


def test_a_syntax_error_is_reported_with_its_line(write):
    write("x = 1\ndef f(:\n")
    error = refused("cases.py:f")
    assert "SyntaxError" in str(error)
    assert "line 2" in str(error)


def test_a_missing_function_is_answered_with_the_nearest(write):
    write("def softmax():\n    return len, ''\ndef _hidden():\n    pass\n")
    assert str(refused("cases.py:softmx")) == "'softmx' does not exist in cases.py. Did you mean 'softmax'?"
    assert str(refused("cases.py:x")) == "'x' does not exist in cases.py. Valid: 'softmax'."


def test_a_file_without_functions_says_only_that(write):
    write("data = 1\n")
    assert str(refused("cases.py:softmax")) == "'softmax' does not exist in cases.py."


def test_a_name_that_cannot_be_called_is_refused(write):
    write("softmax = 3\ndef other():\n    return len, ''\n")
    assert str(refused("cases.py:softmax")) == "'softmax' is not callable in cases.py. Valid: 'other'."


@pytest.mark.parametrize("returned", ["None", "3", "()", "torch.ones(2)"])
def test_a_builder_that_returns_nothing_to_time_is_told_what_to_return(write, returned):
    write(f"import torch\ndef build():\n    return {returned}\n")
    message = str(refused("cases.py:build"))
    assert message.startswith("cases.py:build returned ")
    assert "a callable, a tuple (callable, *arguments), or a nearpeak.Case" in message


def test_a_mistyped_parameter_is_answered_with_the_nearest(write):
    write("def build(rows=1, columns=2):\n    return len, ''\ndef bare():\n    return len, ''\n")
    assert str(refused("cases.py:build", row=3)) == "cases.py:build has no parameter 'row'. Did you mean 'rows'?"
    assert str(refused("cases.py:bare", row=3)) == "cases.py:bare has no parameter 'row'. It takes none."


def test_a_builder_takes_any_parameter_where_it_says_so(write):
    write("def build(**sizes):\n    return lambda: sizes\n")
    assert load("cases.py:build").build(rows=3).call() == {"rows": 3}


def test_an_error_while_building_names_the_place_and_keeps_the_cause(write):
    write("def build(rows=1):\n    inputs = []\n    return inputs[rows]\n")
    error = refused("cases.py:build")
    assert str(error).startswith("cases.py:build failed while building its inputs: IndexError: list index out of range")
    assert "cases.py:3" in str(error)
    assert isinstance(error.__cause__, IndexError)


def test_an_error_is_described_on_one_line_with_the_users_place():
    def fails():
        raise ValueError("first\n   second line " + "x" * 1000)

    with pytest.raises(ValueError) as caught:
        fails()
    line = fails.__code__.co_firstlineno + 1
    text = describe_error(caught.value)
    assert text.startswith("ValueError: first second line xxx")
    assert text.endswith(f"(at {__file__}:{line})")
    assert "\n" not in text
    assert len(text) < 600


def test_the_place_is_the_users_line_and_not_one_inside_torch():
    with pytest.raises(RuntimeError) as caught:
        torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 5))
    assert f"{__file__}:" in describe_error(caught.value)
    with pytest.raises(RuntimeError) as caught:
        torch.nn.Linear(3, 4)(torch.ones(2, 5))
    assert f"{__file__}:" in describe_error(caught.value)


def test_an_error_that_was_never_raised_has_no_place():
    assert describe_error(KeyError("x")) == "KeyError: 'x'"


def test_tensors_are_found_in_a_dataclass():
    @dataclasses.dataclass
    class Batch:
        ids: torch.Tensor
        masks: list
        size: int = 3

    assert found(Case(print, Batch(ids=X, masks=[Y])).tensors()) == [2, 3]


def test_a_resampled_argument_changes_its_values_in_place():
    case = Case(torch.neg, Resampled(lambda seed: torch.full((3,), float(seed))))
    (x,) = case.args
    case.resample(5)
    assert case.args[0] is x
    assert case.call().tolist() == [-5.0] * 3
    assert as_case(case, (), {}, name="renamed").resampled == case.resampled


def test_a_resampled_argument_that_changes_its_shape_is_refused():
    case = Case(torch.neg, Resampled(lambda seed: torch.ones(3 + seed)), name="growing")
    with pytest.raises(
        CaseError, match=r"growing: a Resampled input has shape \(3,\) in one draw and \(5,\) in another"
    ):
        case.resample(2)


def test_a_file_that_ends_the_program_is_reported(write):
    write("import sys\nsys.exit(3)\n")
    assert "cases.py failed while it was imported: SystemExit: 3" in str(refused("cases.py:f"))
