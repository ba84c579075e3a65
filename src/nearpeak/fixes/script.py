"""`fix_script`: runs a script as `python` would, finds its model and optimizer, and fixes them while it runs.

The model is the largest module that is called inside no other one, with gradients between two steps of an optimizer
where the script trains. After some steps it is fixed at the end of one, on the batch of that step, and the script goes
on with the fixed model. `apply_fixes` does the same from inside of a program, with a certificate and without measuring.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import _pytree as pytree

from nearpeak.errors import NearpeakError, UsageError, message_of
from nearpeak.fixes.engine import FixedModel, fix_from
from nearpeak.fixes.record import FixReport, read
from nearpeak.measure.options import Progress
from nearpeak.profiling.script import find_module, find_script, report_exit, script_import_path
from nearpeak.profiling.session import StopRun
from nearpeak.trace.modules import watch_module_calls

WARM_UP_STEPS = 3
INFERENCE_CALLS = 5
"""Calls without gradients, and none with, after which a script counts as one that does not train."""
Fixer = Callable[..., FixedModel]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptFix:
    """What became of a script."""

    report: FixReport | None
    """None if its model was not fixed."""
    exit_code: int
    problem: str = ""
    """Why it was not."""


def fix_script(
    path: str | Path | None,
    arguments: Sequence[str] = (),
    *,
    module: str | None = None,
    fixer: Fixer,
    stop: bool = False,
    progress: Progress | None = None,
    ends_process: bool = False,
) -> ScriptFix:
    """Runs a script with its arguments, and calls `fixer(model, *args, optimizer=..., **kwargs)` in it once.

    Args:
        path: The script.
        arguments: Its command line.
        module: A module instead, as `python -m module ...`.
        fixer: `fix`, or `fix_from` with a certificate. What it raises ends the fixing and not the script.
        stop: End the script as soon as its model is fixed.
        progress: Called with lines of text.
        ends_process: Whether nothing but the report follows the script.
    """
    if (path is None) == (module is None):
        raise UsageError("Give either a script or a module.")
    say = progress or (lambda line: None)
    folder = Path.cwd() if path is None else Path(path).resolve()
    exit_code = 0

    def report(error: BaseException) -> None:
        nonlocal exit_code
        if not isinstance(error, StopRun):
            exit_code = report_exit(error)

    with script_import_path(folder if folder.is_dir() else folder.parent, restore=not ends_process):
        main = find_script(path) if path is not None else find_module(module or "")
        say(f"running {main.name}")
        watch = _ProgramWatch(fixer, say, stop=stop)
        with watch.watching():
            main.run(arguments, None, report, end_pools=ends_process)
    return ScriptFix(report=watch.report, exit_code=exit_code, problem=watch.why_not(main.name))


def apply_fixes(certificate: str | Path | None = None) -> bool:
    """Applies a certificate to the model of this program after its first steps, without measuring or verifying.

    One line at the start of a program. The file is that of the environment variable NEARPEAK_FIX if none is given;
    without both nothing happens. It holds data alone, and nothing of it is executed. A model that computes something
    else than the certificate says stays as it is, and a warning says why.

    Returns:
        Whether there is a certificate.
    """
    file = certificate or os.environ.get("NEARPEAK_FIX")
    if not file:
        return False
    watch = _ProgramWatch(partial(fix_from, read(file)), lambda line: None, stop=False, steps=1)
    watch.start()
    return True


class _ProgramWatch:
    """Follows the calls of a program until its model can be fixed."""

    def __init__(self, fixer: Fixer, say: Progress, *, stop: bool, steps: int = WARM_UP_STEPS) -> None:
        self._warm_up = steps
        self._warns = False
        self.report: FixReport | None = None
        self.problem = ""
        self._fixer, self._say, self._stop = fixer, say, stop
        self._depth = 0
        self._search = ExitStack()
        self._hooks = ExitStack()
        """Those of the model."""
        self._step_hook = ExitStack()
        """It is not removed in a step, where torch goes through the hooks: others may follow it."""
        self._candidates: dict[int, nn.Module] = {}
        self._without_gradients: dict[int, int] = {}
        self._model: nn.Module | None = None
        self._call: tuple[tuple[Any, ...], dict[str, Any], torch.dtype | None] | None = None
        self._steps = 0
        self._is_busy = False
        self._is_done = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, a program is watched."""
        with self._search, self._hooks, self._step_hook:
            self._enter()
            yield

    def start(self) -> None:
        """Watches from now on; nobody asks afterwards, so that a problem is a warning."""
        self._warns = True
        self._enter()

    def _enter(self) -> None:
        self._search.enter_context(watch_module_calls(self._before, self._after))
        handle = register_optimizer_step_post_hook(self._stepped)
        self._step_hook.callback(handle.remove)

    def why_not(self, name: str) -> str:
        """Why nothing was fixed; "" if it was."""
        if self.report is not None:
            return ""
        if self.problem:
            return self.problem
        return (
            f"{name} took {self._steps} steps of an optimizer, and a model is fixed after {WARM_UP_STEPS} of them, or "
            f"after {INFERENCE_CALLS} calls without gradients. Let it run longer."
        )

    def _before(self, module: nn.Module, _args: Any) -> None:
        if self._depth == 0 and not self._is_busy:
            if torch.is_grad_enabled():
                self._candidates[id(module)] = module
            else:
                count = self._without_gradients[id(module)] = self._without_gradients.get(id(module), 0) + 1
                if count >= INFERENCE_CALLS and not self._candidates:
                    self._follow(module)
        self._depth += 1

    def _after(self, _module: nn.Module) -> None:
        self._depth -= 1

    def _follow(self, module: nn.Module) -> None:
        """Keeps the arguments of a module's calls from now on; the search for it is over."""
        self._model = module
        self._search.close()
        before = module.register_forward_pre_hook(self._keep, with_kwargs=True)
        self._hooks.callback(before.remove)
        if not self._candidates:
            after = module.register_forward_hook(self._called)
            self._hooks.callback(after.remove)

    def _keep(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._is_busy or self._is_done or torch.is_grad_enabled() != bool(self._candidates):
            return
        device = next(
            (leaf.device.type for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), "cpu"
        )
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        self._call = args, dict(kwargs), autocast

    def _called(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        """A call without gradients is over."""
        if self._call is not None and not self._is_busy and not self._is_done:
            self._fix(None)

    def _stepped(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._is_busy or self._is_done:
            return
        self._steps += 1
        if self._model is None:
            owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            trained = [
                (sum(each.numel() for each in module.parameters()), module)
                for module in self._candidates.values()
                if any(id(parameter) in owned for parameter in module.parameters())
            ]
            if trained:
                self._follow(max(trained, key=lambda each: each[0])[1])
        elif self._steps >= self._warm_up and self._call is not None:
            self._fix(optimizer)

    def _fix(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Fixes the model here and now; errors are told, and the program goes on."""
        assert self._model is not None and self._call is not None
        args, kwargs, autocast = self._call
        device = next(self._model.parameters(), torch.zeros(())).device.type
        self._is_busy = True
        self._hooks.close()  # the hooks of ours are no part of the model that is fixed
        self._say(f"fixing {type(self._model).__name__}")
        try:
            with torch.autocast(device, autocast, enabled=autocast is not None), torch.enable_grad():
                trains = optimizer is not None
                self.report = self._fixer(self._model, *args, optimizer=optimizer, trains=trains, **kwargs).report
        except NearpeakError as error:
            self.problem = str(error)
        except Exception as error:
            self.problem = f"The model could not be fixed: {type(error).__name__}: {message_of(error)}"
        finally:
            self._is_busy, self._is_done = False, True
            self._call = None
            self._candidates.clear()
        if self.problem and self._warns:
            warnings.warn(f"nearpeak did not apply the certificate. {self.problem}", stacklevel=2)
        if self._stop:
            raise StopRun
