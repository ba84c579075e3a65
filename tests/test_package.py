"""The public surface, and what importing it costs."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from types import ModuleType

import pytest

import nearpeak
import nearpeak.render

PUBLIC = {
    "Case",
    "Comparison",
    "Cost",
    "Estimate",
    "Finding",
    "FixReport",
    "Judgement",
    "Machine",
    "NearpeakError",
    "Profile",
    "Timing",
    "Waste",
    "Work",
    "apply_fixes",
    "bench",
    "compare",
    "declare_cost",
    "estimate",
    "fake",
    "fix",
    "fix_from",
    "fixed",
    "forget_cost",
    "inputs",
    "judge",
    "kernels",
    "load",
    "machine",
    "plan",
    "profile",
    "rule",
    "sweep",
}

HEAVY = {"torch", "triton", "numpy"}

RENDERERS = sorted(module.name for module in pkgutil.walk_packages(nearpeak.render.__path__, "nearpeak.render."))


def python(*arguments: str) -> str:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True).stdout


def imported_by(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has after `code`."""
    output = python("-c", f"{code}\nimport sys\nprint(*sys.modules, file=sys.__stdout__)")
    return {name.partition(".")[0] for name in output.split()}


def test_exported_names():
    assert set(nearpeak.__all__) == PUBLIC
    assert set(nearpeak._HOME) == PUBLIC
    assert dir(nearpeak) == sorted([*PUBLIC, "__version__"])  # neither modules that were imported nor helpers
    assert dir(nearpeak.plan) == sorted(nearpeak.plan.__all__)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_exported_name_resolves(name: str):
    value = getattr(nearpeak, name)
    if name in ("inputs", "kernels", "plan"):
        assert isinstance(value, ModuleType)
    else:
        assert callable(value)
        assert value.__name__ == name


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'nearpeak' has no attribute 'bnech'"):
        _ = nearpeak.bnech


@pytest.mark.parametrize(
    "code",
    [
        "import nearpeak",
        "import nearpeak.cli.main",
        "from nearpeak import Machine, NearpeakError, Work",
        "from nearpeak.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass",
    ],
)
def test_light_imports_load_nothing_heavy(code: str):
    assert not imported_by(code) & HEAVY


def test_rendering_needs_no_torch():
    check = "assert not sys.modules.keys() & {'torch', 'triton'}, name"
    imported_by(f"import sys\nfor name in {RENDERERS}:\n __import__(name)\n {check}")


def test_help_imports_little():
    code = "from nearpeak.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass"
    output = python("-c", f"{code}\nimport sys\nprint(*sys.modules, file=sys.__stdout__)").rpartition("\n\n")[2]
    own = {name for name in output.split() if name.startswith("nearpeak")}
    allowed = {f"nearpeak{name}" for name in ("", "._display", "._files", "._stage_times", ".errors")}
    assert {name for name in own if not name.startswith("nearpeak.cli")} <= allowed
