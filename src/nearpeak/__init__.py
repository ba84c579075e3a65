"""How near its peak does your PyTorch code run, where did every millisecond go, and what would bring it back?

The public names below are imported on first use, so that `import nearpeak` is fast and needs no torch.
"""

from __future__ import annotations

import sys as _sys
from contextlib import nullcontext as _nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

from nearpeak import _display

if TYPE_CHECKING:
    from nearpeak import kernels, plan
    from nearpeak.bound.estimate import Estimate
    from nearpeak.calibrate.machine import machine
    from nearpeak.errors import NearpeakError
    from nearpeak.findings.engine import Waste, rule
    from nearpeak.fixes.engine import fix, fix_from, fixed
    from nearpeak.fixes.record import FixReport
    from nearpeak.fixes.script import apply_fixes
    from nearpeak.judging.judge import judge
    from nearpeak.judging.judgement import Judgement
    from nearpeak.machines.machine import Machine
    from nearpeak.measure import inputs
    from nearpeak.measure.bench import bench
    from nearpeak.measure.case import Case
    from nearpeak.measure.compare import compare
    from nearpeak.measure.sweep import sweep
    from nearpeak.measure.timing import Comparison, Timing
    from nearpeak.ops.cost import Cost
    from nearpeak.ops.declare import declare_cost, forget_cost
    from nearpeak.ops.work import Work
    from nearpeak.profiles.finding import Finding
    from nearpeak.profiles.profile import Profile
    from nearpeak.profiling.estimate import estimate
    from nearpeak.profiling.load import load
    from nearpeak.profiling.run import profile
    from nearpeak.trace.fake import fake

__version__ = "0.1.0"

__all__ = [
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
]

_HOME = {
    "Case": "nearpeak.measure.case",
    "Comparison": "nearpeak.measure.timing",
    "Cost": "nearpeak.ops.cost",
    "Estimate": "nearpeak.bound.estimate",
    "Finding": "nearpeak.profiles.finding",
    "FixReport": "nearpeak.fixes.record",
    "Judgement": "nearpeak.judging.judgement",
    "Machine": "nearpeak.machines.machine",
    "NearpeakError": "nearpeak.errors",
    "Profile": "nearpeak.profiles.profile",
    "Timing": "nearpeak.measure.timing",
    "Waste": "nearpeak.findings.engine",
    "Work": "nearpeak.ops.work",
    "apply_fixes": "nearpeak.fixes.script",
    "bench": "nearpeak.measure.bench",
    "compare": "nearpeak.measure.compare",
    "declare_cost": "nearpeak.ops.declare",
    "estimate": "nearpeak.profiling.estimate",
    "fake": "nearpeak.trace.fake",
    "fix": "nearpeak.fixes.engine",
    "fix_from": "nearpeak.fixes.engine",
    "fixed": "nearpeak.fixes.engine",
    "forget_cost": "nearpeak.ops.declare",
    "inputs": "nearpeak.measure.inputs",
    "judge": "nearpeak.judging.judge",
    "kernels": "nearpeak.kernels",
    "load": "nearpeak.profiling.load",
    "machine": "nearpeak.calibrate.machine",
    "plan": "nearpeak.plan",
    "profile": "nearpeak.profiling.run",
    "rule": "nearpeak.findings.engine",
    "sweep": "nearpeak.measure.sweep",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'nearpeak' has no attribute {name!r}")
    torch = _sys.modules.get("torch")
    # What is imported uses torch, and a mode of the program's would see that.
    with _nullcontext() if torch is None else torch._C.DisableTorchFunction():
        module = import_module(home)
    value = module if name in ("inputs", "kernels", "plan") else getattr(module, name)
    globals()[name] = value
    return value


# What renders a result is imported when a result is first shown or written.
_display.report = lambda result, full: str(import_module("nearpeak.render.results").report(result, full=full))
_display.card = lambda result: str(import_module("nearpeak.render.notebook").card(result))
_display.write = lambda result, path: import_module("nearpeak.render.report").write(result, path)


def load_ipython_extension(shell: Any) -> None:
    """What IPython calls for `%load_ext nearpeak`: the magics `%nearpeak` and `%%nearpeak`."""
    import_module("nearpeak.notebook").load_ipython_extension(shell)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
