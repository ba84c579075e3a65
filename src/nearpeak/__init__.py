"""How near its peak does your PyTorch code run, where did every millisecond go, and what would bring it back?

The public names below are imported on first use, so that `import nearpeak` is fast and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nearpeak import kernels, plan
    from nearpeak.bound.estimate import Estimate
    from nearpeak.capture.estimate import estimate
    from nearpeak.capture.fake import fake
    from nearpeak.capture.machine import machine
    from nearpeak.diagnose.finding import Finding, Waste
    from nearpeak.diagnose.findings import rule
    from nearpeak.diagnose.load import load
    from nearpeak.diagnose.profile import Profile
    from nearpeak.diagnose.run import profile
    from nearpeak.errors import NearpeakError
    from nearpeak.machines.model import Machine
    from nearpeak.measure import inputs
    from nearpeak.measure.bench import bench
    from nearpeak.measure.case import Case
    from nearpeak.measure.compare import compare
    from nearpeak.measure.sweep import sweep
    from nearpeak.measure.timing import Comparison, Timing
    from nearpeak.work.cost import Cost
    from nearpeak.work.declared import declare_cost, forget_cost
    from nearpeak.work.model import Work

__version__ = "0.1.0"

__all__ = [
    "Case",
    "Comparison",
    "Cost",
    "Estimate",
    "Finding",
    "Machine",
    "NearpeakError",
    "Profile",
    "Timing",
    "Waste",
    "Work",
    "bench",
    "compare",
    "declare_cost",
    "estimate",
    "fake",
    "forget_cost",
    "inputs",
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
    "Cost": "nearpeak.work.cost",
    "Estimate": "nearpeak.bound.estimate",
    "Finding": "nearpeak.diagnose.finding",
    "Machine": "nearpeak.machines.model",
    "NearpeakError": "nearpeak.errors",
    "Profile": "nearpeak.diagnose.profile",
    "Timing": "nearpeak.measure.timing",
    "Waste": "nearpeak.diagnose.finding",
    "Work": "nearpeak.work.model",
    "bench": "nearpeak.measure.bench",
    "compare": "nearpeak.measure.compare",
    "declare_cost": "nearpeak.work.declared",
    "estimate": "nearpeak.capture.estimate",
    "fake": "nearpeak.capture.fake",
    "forget_cost": "nearpeak.work.declared",
    "inputs": "nearpeak.measure.inputs",
    "kernels": "nearpeak.kernels",
    "load": "nearpeak.diagnose.load",
    "machine": "nearpeak.capture.machine",
    "plan": "nearpeak.plan",
    "profile": "nearpeak.diagnose.run",
    "rule": "nearpeak.diagnose.findings",
    "sweep": "nearpeak.measure.sweep",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'nearpeak' has no attribute {name!r}")
    module = import_module(home)
    value = module if name in ("inputs", "kernels", "plan") else getattr(module, name)
    globals()[name] = value
    return value


def load_ipython_extension(shell: Any) -> None:
    """What IPython calls for `%load_ext nearpeak`: the magics `%nearpeak` and `%%nearpeak`."""
    import_module("nearpeak.notebook").load_ipython_extension(shell)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
