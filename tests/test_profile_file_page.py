"""docs/profile_file.md has every field of a saved profile, and no other."""

from __future__ import annotations

import dataclasses
import re
import typing
from pathlib import Path

import pytest

from nearpeak._files import DEEPEST, LARGEST_BYTES
from nearpeak.profiles.profile import SCHEMA, Profile

PAGE = (Path(__file__).parents[1] / "docs" / "profile_file.md").read_text(encoding="utf-8")


def dataclasses_in(hint: object) -> dict[str, type]:
    """All dataclasses that a field of this type can hold, and what their fields hold."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        found = {hint.__name__: hint}
        for inner in typing.get_type_hints(hint).values():
            found |= dataclasses_in(inner)
        return found
    return {name: cls for inner in typing.get_args(hint) for name, cls in dataclasses_in(inner).items()}


SAVED = dataclasses_in(Profile)


def section(name: str) -> str:
    found = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"the page has no section {name}"
    return found[1]


@pytest.mark.parametrize("name", SAVED)
def test_every_field_is_on_the_page(name):
    listed = re.findall(r"^\| `(\w+)` \|", section(name), re.MULTILINE)
    assert sorted(listed) == sorted(field.name for field in dataclasses.fields(SAVED[name]))


def test_all_parts_of_a_profile_were_looked_at():
    assert {"Profile", "ProfiledOp", "Waterfall", "Part"} <= set(SAVED)


def test_the_version_and_the_limit_are_those_of_the_code():
    assert f"The version of this page: {SCHEMA}." in PAGE
    assert f'"schema": {SCHEMA}' in PAGE
    assert f"more than {LARGEST_BYTES // 2**20} MiB" in PAGE
    assert f"more than {DEEPEST} deep" in PAGE
