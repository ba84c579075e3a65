from __future__ import annotations

import inspect

import pytest

from nearpeak import errors
from nearpeak.errors import NearpeakError, did_you_mean

CLASSES = [item for _, item in inspect.getmembers(errors, inspect.isclass) if issubclass(item, Exception)]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("NearpeakError", 1),
        ("UsageError", 2),
        ("UnknownMachine", 2),
        ("FileProblem", 2),
        ("CaseError", 2),
        ("UntrustworthyMeasurement", 3),
        ("EnvironmentProblem", 4),
        ("KernelUnavailable", 4),
    ],
)
def test_exit_codes(name: str, code: int):
    assert getattr(errors, name).exit_code == code


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_every_error_is_in_the_tree_of_the_docstring(error: type[Exception]):
    assert issubclass(error, NearpeakError)
    assert error.__name__ in errors.__doc__


def test_did_you_mean_names_at_most_three():
    valid = [f"h100-{suffix}" for suffix in ("sxm", "pcie", "nvl", "sxm5", "sxm4")]
    assert did_you_mean("h100-smx", valid).count("'") <= 6


def test_did_you_mean_ignores_case():
    assert did_you_mean("H100-SXM", ["h100-sxm", "mi300x"]) == "Did you mean 'h100-sxm'?"


def test_did_you_mean_lists_all_when_none_is_near():
    assert did_you_mean("abacus", ["h100-sxm", "b200"]) == "Valid: 'b200', 'h100-sxm'."
