"""Code is compiled in a step after warm-up."""

from __future__ import annotations

from collections.abc import Iterator

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step, is_recurring_stall, is_source_line
from nearpeak.units import seconds

_LOADS = ("cuModule", "cuLibrary", "cudaModule", "cudaLibrary", "hipModule", "Lazy Function", "Runtime Triggered")
"""Prefixes of calls that load an existing kernel."""


@rule("compilation", needs=["host"])
def compilation(step: Step) -> Iterator[Waste]:
    """Idle time in compilations that clean steps have too: shapes or values keep changing."""
    causes = step.idle_causes("compilation")
    idle_s = sum(cause.seconds for cause in causes)
    compiler, steps = step.profile.compiler, step.profile.steps
    seen_often = compiler is not None and steps > 0 and compiler.recompiled_in_steps >= steps
    if not causes or not (seen_often or is_recurring_stall(step.profile, idle_s)):
        return
    loads_s = sum(cause.seconds for cause in causes if cause.what.startswith(_LOADS))
    largest = max(causes, key=lambda cause: cause.seconds)
    count = sum(cause.count for cause in causes)
    only_loads = loads_s > 0.5 * idle_s
    yield Waste(
        title="Kernels are loaded during the step." if only_loads else "Code is compiled again in every step.",
        op=None,
        source=largest.where if is_source_line(largest.where) else "",
        idle={"compilation": idle_s},
        evidence=f"{count} {'time' if count == 1 else 'times'} in the step, most of it in "
        f"{largest.what or 'a compilation'}; the device was idle for {seconds(idle_s)}.{_graphs(step)}",
        reasoning="Code that is compiled once for all shapes is not compiled in a step: all of it is saved. What "
        "the more general code costs is not counted.",
        remedy=_LOAD if only_loads else _COMPILE,
    )


def _graphs(step: Step) -> str:
    compiler = step.profile.compiler
    if compiler is None or not compiler.recompiled_in_steps:
        return ""
    return f" {compiler.recompiled_in_steps} of {compiler.graphs} graphs were made after the run was warm."


_LOAD = (
    "Set CUDA_MODULE_LOADING=EAGER, and run each shape once before the first step that counts. Compile Triton kernels "
    "for constants that do not change from call to call."
)
_COMPILE = (
    "TORCH_LOGS=recompiles python ...            # says which shape or value changed\n"
    "torch.compile(model, dynamic=True)          # one compilation for all shapes\n"
    "torch._dynamo.mark_dynamic(x, 1)            # or for one dimension that changes\n"
    "Pad batches to a few lengths; pass numbers that change as tensors; call torch.compile once, not in the step."
)
