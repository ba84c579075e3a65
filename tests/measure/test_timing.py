import re
from pathlib import Path

import pytest

import nearpeak
from nearpeak.measure.timing import Flag, flag_names, grade_of, make_flag

SOURCE = Path(nearpeak.__file__).parent


def raised_in_source():
    """Every flag name that some code outside the table mentions as a string."""
    texts = [
        file.read_text() for file in SOURCE.rglob("*.py") if file.name != "flags.py" and "selftest" not in file.parts
    ]
    return {name for text in texts for name in re.findall(r'"([A-Z]+(?:_[A-Z]+)*)"', text)}


@pytest.mark.parametrize("name", flag_names())
def test_every_flag_has_a_severity_and_a_remedy(name):
    flag = make_flag(name, "what was seen")
    assert flag.name == name
    assert flag.evidence == "what was seen"
    assert flag.severity in ("note", "doubt", "wrong")
    assert flag.remedy.endswith(".")
    assert len(flag.remedy) > 15


def test_every_flag_that_the_code_raises_exists():
    texts = [file.read_text() for file in SOURCE.rglob("*.py")]
    names = {name for text in texts for name in re.findall(r'make_flag\(\s*"(\w+)"', text)}
    assert len(names) > 15
    assert names <= set(flag_names())


@pytest.mark.parametrize("name", flag_names())
def test_every_flag_is_raised_somewhere(name):
    assert name in raised_in_source()


def test_an_unknown_flag_is_a_mistake_of_ours():
    with pytest.raises(KeyError):
        make_flag("NO_SUCH_FLAG", "")


def flag(severity):
    return Flag(name="X", severity=severity, evidence="", remedy="")


@pytest.mark.parametrize(
    ("severities", "expected"),
    [
        ([], "A"),
        (["note"] * 5, "A"),
        (["doubt"], "B"),
        (["note", "doubt", "note"], "B"),
        (["doubt", "doubt"], "C"),
        (["doubt"] * 5, "C"),
        (["wrong"], "F"),
        (["doubt", "doubt", "wrong", "note"], "F"),
    ],
)
def test_grades(severities, expected):
    assert grade_of(flag(severity) for severity in severities) == expected
