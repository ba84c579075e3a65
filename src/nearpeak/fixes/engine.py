"""`fix`: applies the fixes of the registry to a model one at a time, and keeps what is right and faster.

Each fix is found anew in the model as it is by then, applied to all of its sites, and verified at its sites and in the
whole model (`verify`); what is wrong is rolled back. Then all are measured in the same turns: the original, with the
first fix, with the first two, and so on, so that a step is run once per turn for the fix that it ends with and the one
that follows. What is not faster is rolled back, and the others are applied again without it. At the end everything that
was kept is verified together, and run once more to see which operators ran at each site. Whatever ends this, an error
or Ctrl-C, the model is as it was.
"""

from __future__ import annotations

import copy
import datetime
import inspect
import itertools
import math
import platform
import random
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils import _pytree as pytree

import nearpeak
from nearpeak.bound.estimate import Estimate, estimate_trace
from nearpeak.calibrate.machine import known_machine
from nearpeak.devices.backends import backend_of, find_backend
from nearpeak.devices.device import GpuBackend
from nearpeak.devices.process_state import preserve_random_state
from nearpeak.errors import NearpeakError, UsageError
from nearpeak.fixes.arguments import ArgumentState, preserve_module_state, undisturbed_stack
from nearpeak.fixes.edits import MARK, Edits
from nearpeak.fixes.record import AppliedFix, Errors, FixedSite, FixReport, FixStatus, Speed, read
from nearpeak.fixes.registry import OPTIMIZER, Fix, ModelRun, Site, fixes, observe
from nearpeak.fixes.verify import (
    Inputs,
    Reference,
    check_causality,
    floating,
    problem,
    reduced,
    relative_error,
    run_error,
    variants,
)
from nearpeak.fixes.verify import run as run_module
from nearpeak.machines.machine import Machine
from nearpeak.measure.bench import quiet_collector
from nearpeak.measure.compare import CONFIDENCE, verdict
from nearpeak.measure.options import Progress
from nearpeak.measure.statistics import median, signed_rank_center
from nearpeak.ops.op import Op
from nearpeak.trace.cuda_ops.target import target_of
from nearpeak.trace.interrupts import defer_signals
from nearpeak.trace.trace import trace
from nearpeak.units import seconds

MARGIN = 0.005
"""A change of the step that is certainly less than this share is none, and not timed further."""
NEAR_BOUND = 0.95
"""A site whose expected time is within this share of its bound is left alone."""
LOOKS = (7, 10, 16, 24, 32, 48)
"""Numbers of pairs after which the interval is looked at: at each look it may end."""
MAX_SECONDS = 45.0
"""Of all steps in the same turns, beyond the first look: another look is not begun if it would take longer."""
BLOCK_SECONDS = 0.05
LESS_MEMORY = 0.95
"""A fix that is not faster is kept if it is not slower and the peak memory is at most this share."""
OPTIMIZER_STEPS = 2


class FixedModel:
    """A model with its fixes in force: `report` says what was done, `undo` puts everything back.

    Also a context manager, which undoes at its end.
    """

    def __init__(self, model: nn.Module, report: FixReport, edits: Sequence[Edits]) -> None:
        self.model = model
        self.report = report
        self._edits = list(edits)

    def __repr__(self) -> str:
        return repr(self.report)

    def _repr_html_(self) -> str:
        return self.report._repr_html_()

    def undo(self) -> None:
        """Puts the same objects back; a second call does nothing."""
        while self._edits:
            self._edits[-1].undo()
            self._edits.pop()

    def __enter__(self) -> FixedModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def fix(
    model: nn.Module,
    *args: Any,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    trains: bool | None = None,
    only: Iterable[str] = (),
    without: Iterable[str] = (),
    require: bool = False,
    progress: Progress | None = None,
    **kwargs: Any,
) -> FixedModel:
    """Changes a model so that it runs faster, as far as that is proven on `model(*args, **kwargs)`.

    The model is changed in place and alone: no class and no module of Python's. Weights, buffers, gradients, the
    optimizer's state and random states are as before; `undo()` of the result puts the original code back.

    Args:
        model: The model, on the device that it is for.
        args: A batch as the program has it; a typical one, for its sizes decide what is faster.
        optimizer: The optimizer, whose step is then part of what is measured and may be fixed too. One whose step calls
            the model itself, such as LBFGS, has no part in it.
        loss: The scalar of the model's output that is differentiated; the `loss` of the output if it has one, or drawn
            cotangents.
        trains: Whether gradients are needed; by default if the model is in training mode and has parameters that do.
        only: Ids of the fixes to try; those that change the numerics, such as "tf32", must be named here.
        without: Ids of fixes to leave out.
        require: Raise `UsageError`, with the model as it was, if a site was found and could not be replaced.
        progress: Called with lines of text.
        kwargs: Keyword arguments of the model.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    >>> with fix(model, torch.ones(2, 4), only=["channels-last"]) as fixed:
    ...     fixed.report
    <FixReport of Sequential: nothing helps, nothing was changed>
    """
    chosen = fixes(only, without)
    engine = _Engine(model, args, kwargs, optimizer, loss, trains, progress or (lambda line: None))
    try:
        report = engine.fix(chosen)
        if require and (missed := list(report.skipped())):
            places = ", ".join(f"{site.fix} at {site.path or site.what} ({site.why})" for site in missed[:3])
            raise UsageError(f"{len(missed)} sites were found and not replaced: {places}. The model is as it was.")
    except BaseException:
        engine.undo()
        raise
    return FixedModel(model, report, engine.edits)


@contextmanager
def fixed(model: nn.Module, *args: Any, **options: Any) -> Iterator[FixedModel]:
    """`fix` for a block: at its end the model is as it was."""
    result = fix(model, *args, **options)
    try:
        yield result
    finally:
        result.undo()


def fix_from(
    certificate: str | Path | FixReport,
    model: nn.Module,
    *args: Any,
    optimizer: torch.optim.Optimizer | None = None,
    trains: bool | None = None,
    **kwargs: Any,
) -> FixedModel:
    """Applies what a certificate has kept, without measuring or verifying again.

    The model runs once on its batch, and a site is changed if it computes what the certificate says of it. UsageError
    names the first site that is not there, computes something else or cannot be replaced here, and nothing is changed.
    """
    report = certificate if isinstance(certificate, FixReport) else read(certificate)
    engine = _Engine(model, args, kwargs, optimizer, None, trains, lambda line: None)
    try:
        engine.apply(report)
    except BaseException:
        engine.undo()
        raise
    return FixedModel(model, report, engine.edits)


def refuse_patched(model: nn.Module) -> None:
    """UsageError if another program has replaced forwards of the model, or nearpeak has fixed it before."""
    for path, module in model.named_modules():
        own = vars(module).get("forward")
        where = f"the forward of {path or 'the model'} ({type(module).__name__})"
        function = getattr(own, "__func__", own)
        if own is not None and function is not type(module).forward:  # which a fixed module has after it was pickled
            if getattr(function, MARK, False):
                raise UsageError(f"nearpeak has fixed this model before: {where}. Call undo() of that result first.")
            raise UsageError(
                f"{where} was replaced on this object by {_origin(function)}. Two patchers of one model overwrite each "
                "other: load the model without that one, and fix it again."
            )
        for kind in type(module).__mro__:
            if "forward" in vars(kind):
                origin = _origin(vars(kind)["forward"])
                if origin.partition(".")[0] != kind.__module__.partition(".")[0] and origin != "__main__":
                    raise UsageError(
                        f"{where} was replaced in its class by {origin}, where the class is of {kind.__module__}. Two "
                        "patchers of one model overwrite each other: load the model without that one, and fix it again."
                    )
                break


def _origin(function: Any) -> str:
    """The module whose code a function has, whatever its `__module__` says: decorators copy that."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    space = getattr(function, "__globals__", {})
    return str(space.get("__name__") or getattr(function, "__module__", None) or type(function).__module__)


@dataclass(slots=True)
class _InForce:
    """A fix that is in force, and right."""

    fix: Fix
    edits: Edits
    sites: list[Site]
    speed: Speed | None = None
    """None until it is measured."""
    was_alone: bool = False
    """Whether it was measured against the original."""

    @property
    def computes(self) -> set[tuple[str, str, str]]:
        """What was verified: its places with what they compute."""
        return {(site.place, site.what, site.computes) for site in self.sites}


class _Engine:
    """The work of one `fix`."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        optimizer: torch.optim.Optimizer | None,
        loss: Callable[[Any], Tensor] | None,
        trains: bool | None,
        say: Progress,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise UsageError(f"fix takes a torch.nn.Module, and got {type(model).__name__}.")
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        refuse_patched(model)
        self.model, self.args, self.kwargs, self.optimizer = model, args, kwargs, optimizer
        needs = any(parameter.requires_grad for parameter in model.parameters())
        self.trains = (model.training and needs) if trains is None else trains
        self.state = ArgumentState(args, kwargs)
        self.loss = loss
        self.say = say
        self.kept: list[_InForce] = []
        self.pending: Edits | None = None
        self.results: dict[str, AppliedFix] = {}
        """By the id of the fix."""
        self.sites: list[FixedSite] = []
        self.step_estimates: dict[tuple[str, ...], Estimate] = {}
        """Of the whole step, by the ids of the fixes in force."""
        self.device_savings: dict[str, float] = {}
        """The predicted savings of the device alone, by the id of the fix."""
        self.notes: list[str] = []
        if optimizer is not None and _needs_closure(optimizer):
            self.notes.append(f"A step of {type(optimizer).__name__} calls the model itself, and is not measured.")
            self.optimizer = None
        self.machine = known_machine()
        self.own_bytes = _allocated(next(model.parameters(), torch.zeros(())).device)
        """What the program itself has allocated on the device."""
        self.original: nn.Module | None = None
        """A copy of the model as it was; None where there is no memory for it."""
        self.reference: Reference | None = None
        self.proof = self._batch()
        """The part of the batch that is compared with a wide reference."""

    @property
    def edits(self) -> list[Edits]:
        """The logs of what is in force."""
        return [each.edits for each in self.kept]

    def undo(self) -> None:
        """Puts everything back."""
        if self.pending is not None:
            self.pending.undo()
        while self.kept:
            self.kept[-1].edits.undo()
            self.kept.pop()

    def observe(self) -> ModelRun:
        """What the model shows as it is now."""
        try:
            with self.state.restoring():
                run = observe(
                    self.model, self.args, self.kwargs, optimizer=self.optimizer, loss=self.loss, trains=self.trains
                )
                run.argument_changes = self.state.changes()
            return run
        except NearpeakError:
            raise
        except Exception as error:
            raise UsageError(
                f"The model cannot be run on this batch: {run_error(error)}. Pass the arguments that the program calls "
                "it with."
            ) from error

    def fix(self, chosen: Sequence[Fix]) -> FixReport:
        """Tries all fixes, and reports."""
        run = self.observe()
        if self.loss is None and isinstance(_loss_of(run.output), Tensor):
            self.loss = _loss_of
        self._prepare_reference()
        speed = self._keep_faster(chosen, run)
        measured = len(self.kept)
        final = self._verify_together()
        if not self.kept:
            speed = None
        elif len(self.kept) < measured:
            speed = self._measure()
        self._note_kernels()
        return FixReport(
            model=type(self.model).__name__,
            machine=_machine_name(run.device),
            torch=torch.__version__,
            python=platform.python_version(),
            nearpeak=nearpeak.__version__,
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            trains=self.trains,
            batch=_batch_text(self.args, self.kwargs),
            fixes=tuple(self.results.values()),
            sites=tuple(self.sites),
            errors=tuple(final),
            speed=speed,
            noise=0.0 if self.reference is None else self.reference.noise,
            notes=tuple(self.notes),
        )

    def _prepare_reference(self) -> None:
        size = sum(tensor.nbytes for tensor in self.model.state_dict().values() if isinstance(tensor, Tensor))
        device = next(self.model.parameters(), torch.zeros(())).device
        backend = find_backend(device)
        free = None if backend is None else backend.available_bytes(device.index or 0)
        if free is not None and 3 * size > free:
            self.notes.append(
                "There is no memory for a second copy of the model: changes were verified at their sites alone."
            )
            return
        try:
            self.original = copy.deepcopy(self.model)
        except Exception as error:
            raise UsageError(f"The model cannot be copied for a comparison: {run_error(error)}.") from error
        self.reference = Reference(self.original, scalar=self.loss)
        try:
            try:
                with torch.compiler.set_stance("force_eager"):
                    self.reference.probe(reduced(self._batch()))
                self.proof = reduced(self._batch())
            except NearpeakError:
                raise
            except Exception:  # a model need not take a part of its batch
                self.reference.probe(self._batch())
        except NearpeakError:
            raise
        except Exception as error:
            raise UsageError(f"The model cannot be run alone on this batch: {run_error(error)}.") from error
        if self.reference.noise > 0:
            self.notes.append(f"Two runs of the original differ by {self.reference.noise:.1e} of their norm.")

    def _batch(self) -> Inputs:
        return Inputs(name="the batch", args=self.args, kwargs=self.kwargs, grad=self.trains)

    @property
    def is_proof_a_part(self) -> bool:
        """Whether less than the batch is compared with a wide reference."""
        return self.proof.args is not self.args or self.proof.kwargs is not self.kwargs

    def _step(self) -> _Step:
        return _Step(self.model, self.args, self.kwargs, self.state, self.loss, self.optimizer, self.trains)

    def _omits(self, *tried: Fix) -> tuple[str, ...]:
        """The outputs that fixes leave out."""
        return tuple(name for each in (*(kept.fix for kept in self.kept), *tried) for name in each.omits)

    def _keep_faster(self, chosen: Sequence[Fix], run: ModelRun) -> Speed | None:
        """Puts what is right in force, and takes out again what is not faster; the speed of all that stays."""
        while True:
            for each in chosen:  # again after something was taken out: another fix of the same place may apply then
                if each.id not in self.results and self._try(each, run):
                    try:
                        run = self.observe()
                    except UsageError as error:  # it was verified on a part of the batch
                        self._roll_back(each, run_error(error.__cause__ or error))
                        self._take_out(self.kept[-1:])
            if not self.kept:
                return None
            only = self.kept[0]
            if len(self.kept) == 1 and only.speed is not None and only.was_alone:
                return only.speed
            try:
                speed = self._measure()
                slow = [each for each in self.kept if self.results[each.fix.id].status != "kept"]
            except _WayFailed as failure:
                slow = [self._turns[failure.way - 1]]
                self._roll_back(slow[0].fix, run_error(failure.error))
            if not slow:
                status, why = _decide(speed)
                if status == "kept" or speed.verdict == "INCONCLUSIVE":
                    return speed
                slow = [*self.kept]
                for kept in slow:
                    self._roll_back(kept.fix, f"all fixes together are {why}")
            self._take_out(slow)
            run = self.observe()

    def _try(self, tried: Fix, run: ModelRun) -> bool:
        """Applies one fix to all of its sites; whether it is right, and in force."""
        try:
            found = list(tried.sites(run))
        except Exception as error:  # one pattern that fails must not end the others
            self.notes.append(f"{tried.id}: its sites could not be looked for, {run_error(error)}.")
            return False
        if not found:
            return False
        started = time.perf_counter()
        self.say(f"{tried.id}: {_count(found, 'site')}")
        changed, skipped = self._change(found)
        self.sites += [_site_record(tried, site, "skipped", why) for site, why in skipped]
        edits = self.pending
        assert edits is not None
        result = AppliedFix(id=tried.id, title=tried.title, status="skipped", why="no site could be replaced")
        if changed:
            result = self._judge(tried, changed, edits)
        self.results[tried.id] = result
        is_right = result.status == "kept"
        status = "replaced" if is_right else "rolled back"
        self.sites += [_site_record(tried, site, status, result.why) for site in changed]
        self.say(f"{tried.id}: {'right' if is_right else result.status} after {seconds(time.perf_counter() - started)}")
        self._settle(tried, changed, is_right)
        return is_right

    def _change(self, found: Iterable[Site]) -> tuple[list[Site], list[tuple[Site, str]]]:
        """Changes sites, with `pending` as the log: those that were, and the others with the reasons."""
        self.pending = edits = Edits()
        changed: list[Site] = []
        skipped: list[tuple[Site, str]] = []
        for site in found:
            why = site.skip
            if not why:
                mark = edits.mark()
                try:
                    site.change(edits)
                    changed.append(site)
                    continue
                except UsageError as error:
                    edits.undo(mark)
                    why = str(error)
                except Exception as error:  # one site that fails must not end the others
                    edits.undo(mark)
                    why = f"it could not be changed: {run_error(error)}"
            skipped.append((site, why))
        return changed, skipped

    def _settle(self, tried: Fix, changed: list[Site], is_right: bool, speed: Speed | None = None) -> None:
        """The pending changes are in force from now on, or undone."""
        assert self.pending is not None
        if is_right:
            self.kept.append(_InForce(tried, self.pending, changed, speed))
        else:
            self.pending.undo()
        self.pending = None

    def _roll_back(self, fix: Fix, why: str) -> None:
        """Writes down that a fix is not kept."""
        self.results[fix.id] = replace(self.results[fix.id], status="rolled back", why=why)
        self.sites = [
            replace(each, status="rolled back", why=why) if each.fix == fix.id and each.status == "replaced" else each
            for each in self.sites
        ]

    def _take_out(self, slow: Sequence[_InForce]) -> None:
        """Undoes these fixes, and applies those anew that were found in the model with them."""
        first = min(self.kept.index(each) for each in slow)
        later = self.kept[first:]
        if any(each.fix.launches for each in slow):  # the others were measured with it
            for each in self.kept:
                each.speed = None
        for each in reversed(later):
            each.edits.undo()
        del self.kept[first:]
        for each in later:
            if each in slow:
                continue
            run = self.observe()
            changed, _ = self._change(each.fix.sites(run))
            again = _InForce(each.fix, self.pending or Edits(), changed)
            is_right = bool(changed)
            speed = each.speed
            if not changed:
                self._roll_back(each.fix, "it has no site without a fix that was rolled back")
            elif not again.computes <= each.computes:  # other code than was verified and measured
                judged = self._judge(each.fix, changed, again.edits)
                is_right, speed = judged.status == "kept", None
                self.results[each.fix.id] = judged
            self.sites = [site for site in self.sites if (site.fix, site.status) != (each.fix.id, "replaced")]
            status = "replaced" if is_right else "rolled back"
            self.sites += [_site_record(each.fix, s, status, self.results[each.fix.id].why) for s in changed]
            self._settle(each.fix, changed, is_right, speed)

    def _judge(self, tried: Fix, changed: list[Site], edits: Edits) -> AppliedFix:
        """Whether changes that are in force are right; its status is "kept" then, until they are measured."""
        result = AppliedFix(id=tried.id, title=tried.title, status="rolled back")
        try:
            with self.state.restoring():
                captured = self._capture(changed, edits)
                try:
                    predicted_s, at_bound = self._predict(tried, changed, captured, edits)
                except Exception as error:  # code that fake tensors cannot run, or a kernel without a cost
                    self.notes.append(f"What {tried.id} saves is not predicted: {run_error(error)}.")
                    predicted_s, at_bound = None, False
                result = replace(result, predicted_s=predicted_s)
                if at_bound:
                    return replace(result, why=f"its sites are within {1 - NEAR_BOUND:.0%} of their bound already")
                self.state.restore()
                errors = [] if tried.changes_numerics else self._check(tried, changed, captured, edits)
        except torch.OutOfMemoryError:
            return replace(result, why="there was not enough memory to verify it")
        except Exception as error:
            return replace(result, why=run_error(error))
        result = replace(result, errors=tuple(errors))
        wrong = problem(errors)
        return replace(result, why=f"wrong: {wrong}") if wrong else replace(result, status="kept")

    def _capture(self, changed: Sequence[Site], edits: Edits) -> dict[int, Inputs]:
        """The inputs of one site of each kind, by the place of the site, from a run of the model without the fix."""
        kinds: dict[tuple[str, str], int] = {}
        for place, site in enumerate(changed):
            if site.call is not None and site.call.path:
                kinds.setdefault((site.what, site.computes), place)
        inputs: dict[int, Inputs] = {}
        if not kinds:
            return inputs
        with edits.suspended(), ExitStack() as stack:
            stack.enter_context(preserve_random_state())
            stack.enter_context(preserve_module_state(self.model))
            # Hooks come after it: what hooks that it finds have filled is emptied again.
            for place in kinds.values():
                call = changed[place].call
                assert call is not None

                def keep(_module: Any, args: Any, kwargs: Any, place: int = place) -> None:
                    if place not in inputs:
                        args, kwargs = pytree.tree_map_only(Tensor, _detached, (args, kwargs))
                        inputs[place] = Inputs(name="the batch", args=args, kwargs=kwargs, grad=self.trains)

                handle = call.module.register_forward_pre_hook(keep, with_kwargs=True)
                stack.callback(handle.remove)
            with self.state.restoring(), torch.set_grad_enabled(self.trains):
                self.model(*self.args, **self.kwargs)
        return inputs

    def _check(self, tried: Fix, changed: Sequence[Site], captured: dict[int, Inputs], edits: Edits) -> list[Errors]:
        """At one site of each kind, on drawn inputs too and in float32; then in the whole model on its batch."""
        errors: list[Errors] = []
        for place, inputs in captured.items():
            call = changed[place].call
            assert call is not None
            with edits.suspended():
                original = copy.deepcopy(call.module)
            changed_copy = copy.deepcopy(call.module)
            try:
                part = reduced(inputs)
                run_module(original, part)
            except Exception:  # a module need not take a part of its inputs
                part = inputs
            errors += _check_module(original, changed_copy, part, self.trains)
            if problem(errors):
                return errors
        if any(site.path == OPTIMIZER for site in changed) and self.optimizer is not None:
            errors += _check_optimizer(self.optimizer, edits)
        if self.reference is not None:
            errors += self._check_batch(self.reference, self._omits(tried), in_full=tried.compiles)
            errors += self._check_series(tried)
        for site in changed:
            if site.loop is not None and not problem(errors):
                errors.append(self._check_loop(site.loop, edits))
        return errors

    def _check_batch(self, reference: Reference, omits: tuple[str, ...], *, in_full: bool) -> list[Errors]:
        """On the part of the batch that has a wide reference, and on all of it.

        Compiled code runs on the batch alone: a compiler that has seen a part of it compiles for all sizes after it.
        """
        if not self.is_proof_a_part:
            return reference.check(self.model, self.proof, omits)
        with torch.compiler.set_stance("force_eager"):
            errors = reference.check(self.model, self.proof, omits)
        return [*errors, *(reference.check_all(self.model, self._batch(), omits) if in_full else [])]

    def _check_series(self, *tried: Fix) -> list[Errors]:
        """On calls in a row, for changes that do something only then."""
        calls = max((each.series for each in (*(kept.fix for kept in self.kept), *tried)), default=1)
        if calls == 1 or self.reference is None:
            return []
        row = replace(self.proof, name=f"{calls} calls in a row", series=calls)
        return self.reference.check(self.model, row, self._omits(*tried))

    def _check_loop(self, loop: Callable[[nn.Module], Tensor], edits: Edits) -> Errors:
        """The results of a loop in float32, where two ways of rounding hardly ever choose another token."""
        with preserve_random_state():
            changed = loop(copy.deepcopy(self.model).float())
            with edits.suspended():
                original = loop(copy.deepcopy(self.model).float())
        share = 1.0 if changed.shape != original.shape else float((changed != original).double().mean())
        return Errors(what="results of a loop in float32", original=0.0, fixed=share, allowed=0.0, reference="original")

    def _predict(
        self, tried: Fix, changed: Sequence[Site], captured: dict[int, Inputs], edits: Edits
    ) -> tuple[float | None, bool]:
        """The predicted saving per step, from estimates with and without the fix; and whether all sites are at their
        bound already."""
        if self.machine is None or any(site.loop is not None for site in changed):  # one call does not show a loop
            return None, False
        at_bound = self._are_at_bound(captured, changed, edits)
        if all(site.path == OPTIMIZER for site in changed):
            estimate: Callable[..., Estimate] = self._estimate_update
        else:  # of the step: what the host does in a site is hidden there behind the device, or not
            estimate = self._estimate_step
        with edits.suspended():
            was = estimate()
        now = estimate(tried)
        if was.expected_s is None or now.expected_s is None:
            return None, at_bound
        if was.expected_device_s is not None and now.expected_device_s is not None:
            self.device_savings[tried.id] = was.expected_device_s - now.expected_device_s
        return was.expected_s - now.expected_s or None, at_bound  # what no op shows, as compilation, is not predicted

    def _are_at_bound(self, captured: dict[int, Inputs], changed: Sequence[Site], edits: Edits) -> bool:
        """Whether all sites, as they were, are expected to take little longer than their bound."""
        assert self.machine is not None
        if not captured or any(site.in_step for site in changed):
            return False
        with edits.suspended():
            for place, inputs in captured.items():
                call = changed[place].call
                assert call is not None
                before = _estimate(call.module, inputs.args, inputs.kwargs, self.trains or None, self.machine)
                if before.expected_s is None or before.fused_s < NEAR_BOUND * before.expected_s:
                    return False
        return True

    def _estimate_step(self, *tried: Fix) -> Estimate:
        """The estimate of the step as it is: with what is in force, and a fix that is tried."""
        assert self.machine is not None
        key = tuple(each.id for each in (*(kept.fix for kept in self.kept), *tried))
        if key not in self.step_estimates:
            with preserve_module_state(self.model):
                self.step_estimates[key] = _estimate(self._step().run, (), {}, None, self.machine)
        return self.step_estimates[key]

    def _estimate_update(self, *_tried: Fix) -> Estimate:
        """The estimate of the optimizer's step as it is."""
        assert self.machine is not None
        return _estimate(self._step().update, (), {}, None, self.machine)

    @property
    def _turns(self) -> list[_InForce]:
        """The fixes in force in the order in which they are measured: without gaps between launches, kernels show."""
        others = [site for each in self.kept if not each.fix.launches for site in each.sites]
        if any(site.call is not None and not site.call.path for site in others):  # the forward that graphs are around
            return self.kept
        return sorted(self.kept, key=lambda each: not each.fix.launches)

    def _measure(self) -> Speed:
        """Measures the fixes in force that have not been, and all of them against the original, in the same turns."""
        turns, count = self._turns, len(self.kept)
        singles = {(place, place + 1): each for place, each in enumerate(turns) if each.speed is None}
        pairs = list(dict.fromkeys([*singles, (0, count)]))
        self.say(f"measuring {_count(singles or self.kept, 'fix')} in turns")
        runner = self._step()

        @contextmanager
        def first_fixes(in_force: int) -> Iterator[None]:
            with ExitStack() as stack:
                for each in reversed([each for each in self.kept if each in turns[in_force:]]):
                    stack.enter_context(each.edits.suspended())
                yield

        speeds: dict[tuple[int, int], Speed] = {}
        looped = {
            place + 1: site for place, each in enumerate(turns) for site in each.sites if site.loop is not None
        }  # from this way on, the step is a loop
        in_loop = [pair for pair in pairs if looped and pair[1] >= min(looped)]
        with runner.ready():
            ours = _allocated(runner.device) - self.own_bytes
            if in_loop:
                site = looped[min(looped)]
                assert site.loop is not None
                speeds = time_in_turns(partial(site.loop, self.model), first_fixes, in_loop, runner.device)
                for pair, speed in speeds.items():
                    calls = site.loop_calls
                    speeds[pair] = replace(speed, before_s=speed.before_s / calls, after_s=speed.after_s / calls)
            restore = self.state.restore if self.state else None
            rest = [pair for pair in pairs if pair not in speeds]
            if rest:
                speeds |= time_in_turns(runner.run, first_fixes, rest, runner.device, restore=restore)
        for pair, speed in speeds.items():
            if speed.memory_before is not None and speed.memory_after is not None:
                speeds[pair] = replace(
                    speed, memory_before=speed.memory_before - ours, memory_after=speed.memory_after - ours
                )
        for pair, each in singles.items():
            each.speed, each.was_alone = speeds[pair], pair[0] == 0
            status, why = _decide(speeds[pair])
            self.results[each.fix.id] = replace(self.results[each.fix.id], speed=speeds[pair], why=why)
            if any(before.fix.launches for before in turns[: pair[0]]) and each.fix.id in self.device_savings:
                self.results[each.fix.id] = replace(
                    self.results[each.fix.id], predicted_s=self.device_savings[each.fix.id]
                )
            self.say(f"{each.fix.id}: {status}, {speeds[pair].ratio:.3f} x the time")
            if status != "kept":
                self._roll_back(each.fix, why)
        return speeds[0, count]

    def _verify_together(self) -> list[Errors]:
        """The errors of the whole model with all that was kept, on all inputs; what makes it wrong is rolled back."""
        while self.kept:
            errors: list[Errors] = []
            if self.reference is not None and self.original is not None:
                self.say("verifying the whole model")
                autocast = all(each.dtype == torch.float32 for each in self.model.parameters())
                omits = self._omits()
                errors += self._check_batch(self.reference, omits, in_full=True)
                errors += self._check_series()
                with torch.compiler.set_stance("force_eager"):  # else each size and mode would be compiled anew
                    drawn = variants(self.proof.args, self.proof.kwargs, trains=self.trains, autocast=autocast)
                    for inputs in itertools.islice(drawn, 1, None):
                        errors += self.reference.check(self.model, inputs, omits)
                    errors += check_causality(self.original, self.model, self.proof)
            wrong = "" if any(each.fix.changes_numerics for each in self.kept) else problem(errors)
            if not wrong:
                return errors
            last = self.kept[-1]
            last.edits.undo()
            self.kept.pop()
            self._roll_back(last.fix, f"wrong in the whole model: {wrong}")
        return []

    def _note_kernels(self) -> None:
        """Writes down which operators ran at each site of the fixed model."""
        if not self.kept:
            return
        try:
            step = self._step()
            with step.ready():
                traced = trace(step.run, live=True, keep_compiled=True)
        except Exception as error:
            self.notes.append(f"Which kernels run is not known: {run_error(error)}.")
            return
        self.sites = [
            replace(site, kernels=tuple(_kernels_at(site.path, traced.ops))) if site.status == "replaced" else site
            for site in self.sites
        ]

    def apply(self, report: FixReport) -> None:
        """Changes the sites that a certificate has replaced."""
        for id in dict.fromkeys(site.fix for site in report.replaced()):
            (wanted,) = fixes([id])
            found = {(site.place, site.what): site for site in wanted.sites(self.observe())}
            edits = Edits()
            self.kept.append(_InForce(wanted, edits, []))
            for site in report.replaced():
                if site.fix != id:
                    continue
                here = found.get((site.path, site.what))
                if here is None or here.computes != site.computes:
                    what = "computes something else" if (site.path, site.what) in found else "is not there"
                    raise UsageError(
                        f"The certificate has {id} at {site.path or 'the model'} ({site.what}), and that {what} in "
                        "this model. Nothing was changed: fix it anew."
                    )
                if here.skip:
                    raise UsageError(
                        f"The certificate has {id} at {site.path or 'the model'} ({site.what}), which cannot be "
                        f"replaced here: {here.skip}. Nothing was changed: fix it anew."
                    )
                here.change(edits)


def _decide(speed: Speed) -> tuple[FixStatus, str]:
    """Whether to keep a right fix with this speed, and why not."""
    if speed.verdict == "FASTER":
        return "kept", ""
    less = speed.memory_before and speed.memory_after and speed.memory_after <= LESS_MEMORY * speed.memory_before
    if less and speed.verdict == "EQUIVALENT":
        return "kept", "as fast, with less memory"
    words = {"SLOWER": "slower", "EQUIVALENT": "not faster", "INCONCLUSIVE": "not seen to be faster"}
    return "rolled back", f"{words[speed.verdict]}: {speed.ratio:.3f} x the time [{speed.low:.3f}, {speed.high:.3f}]"


class _WayFailed(Exception):
    """A step did not run in one of the ways."""

    def __init__(self, way: int, error: Exception) -> None:
        super().__init__(way)
        self.way, self.error = way, error


def time_in_turns(
    step: Callable[[], object],
    way: Callable[[int], Any],
    pairs: Sequence[tuple[int, int]],
    device: torch.device,
    *,
    restore: Callable[[], object] | None = None,
    seed: int = 0,
) -> dict[tuple[int, int], Speed]:
    """Times a step in several ways, in turns, until the interval of each pair of ways decides or the time is spent.

    The same model is switched by the context `way(number)`, so that all ways have the same weights and memory, where
    `compare` takes two cases that exist side by side. Ways of pairs that are decided are no longer run. `restore` runs
    before each step and is not timed.

    A turn runs the ways in ascending or in descending order, which chance decides: the ways of a pair are neighbors in
    time then, and what changes slowly, such as the clock of a hot GPU, cancels in their ratio. In a random order, it is
    noise of several percent between steps of a quarter of a second.
    """
    backend = backend_of(device)
    index = device.index or 0
    # On one thread of a CPU, the processor time is the time of the step without that of other processes.
    is_alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if is_alone else time.perf_counter

    def run(calls: int) -> float:
        backend.synchronize(index)
        start = clock()
        for _ in range(calls):
            step()
        backend.synchronize(index)
        return clock() - start

    def block(number: int, calls: int) -> float:
        with way(number):
            if restore is None:
                return run(calls) / calls
            taken_s = 0.0
            for _ in range(calls):
                restore()
                taken_s += run(1)
            return taken_s / calls

    first_s: dict[int, float] = {}
    memory: dict[int, float | None] = {}
    warm: dict[int, float] = {}
    for number in sorted({number for pair in pairs for number in pair}):
        try:
            first_s[number] = block(number, 1)
            taken_s, memory[number] = _with_peak_memory(backend, index, partial(block, number, 1))
        except Exception as error:
            if number == 0:
                raise
            raise _WayFailed(number, error) from error
        warm[number] = taken_s
    calls = max(1, math.ceil(BLOCK_SECONDS / max(min(warm.values()), 1e-9)))
    chance = random.Random(seed)
    rounds: list[dict[int, float]] = []
    results: dict[tuple[int, int], Speed] = {}
    undecided = list(pairs)
    spent_s = 0.0
    with quiet_collector():
        for look in LOOKS:
            active = sorted({number for pair in undecided for number in pair})
            if rounds:  # the first look is taken, however long it is
                spent_s += (look - len(rounds)) * calls * sum(warm[number] for number in active)
                if spent_s > MAX_SECONDS:
                    break
            while len(rounds) < look:
                order = active if chance.random() < 0.5 else active[::-1]
                rounds.append({number: block(number, calls) for number in order})
            for pair in undecided:
                results[pair] = _speed_of(pair, rounds, memory, first_s)
            undecided = [pair for pair in undecided if results[pair].verdict == "INCONCLUSIVE"]
            if not undecided:
                break
    return results


def _speed_of(
    pair: tuple[int, int],
    rounds: Sequence[dict[int, float]],
    memory: dict[int, float | None],
    first_s: dict[int, float],
) -> Speed:
    """The speed of the second way of a pair against the first, from the turns that both were run in."""
    before, after = pair
    times = [(each[before], each[after]) for each in rounds if before in each and after in each]
    center = signed_rank_center([math.log(now / was) for was, now in times], CONFIDENCE)
    low, high = math.exp(center.interval.low), math.exp(center.interval.high)
    return Speed(
        before_s=median([was for was, _ in times]),
        after_s=median([now for _, now in times]),
        ratio=math.exp(center.value),
        low=low,
        high=high,
        confidence=center.interval.confidence,
        pairs=len(times),
        verdict="FASTER" if high < 1 else verdict(low, high, MARGIN),  # small savings of several fixes add up
        memory_before=memory[before],
        memory_after=memory[after],
        first_s=first_s[after],
    )


def _allocated(device: torch.device) -> float:
    """Bytes that torch's allocator has handed out on a GPU; 0 on a CPU, which keeps no statistics."""
    backend = find_backend(device)
    current = None if backend is None else backend.allocator_bytes(device.index or 0, "current")
    return 0.0 if current is None else current[0]


def _with_peak_memory(backend: Any, index: int, run: Callable[[], float]) -> tuple[float, float | None]:
    if not isinstance(backend, GpuBackend):
        return run(), None
    torch.cuda.reset_peak_memory_stats(index)
    return run(), backend.peak_allocated_bytes(index)


class _Step:
    """One step of the program, as far as it is known: forward, backward if it trains, and the optimizer."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        state: ArgumentState,
        loss: Callable[[Any], Tensor] | None,
        optimizer: torch.optim.Optimizer | None,
        trains: bool,
    ) -> None:
        self.state = state
        """To be restored before each further step, if there is any."""
        self._model, self._args, self._kwargs, self._loss, self._trains = model, args, kwargs, loss, trains
        self._optimizer = optimizer if trains else None
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        tensors = [
            each for each in (*model.parameters(), *pytree.tree_leaves((args, kwargs))) if isinstance(each, Tensor)
        ]
        self.device = tensors[0].device if tensors else torch.device("cpu")
        self._cotangents: list[Tensor] | None = None

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Inside, steps may run; afterwards weights, gradients and the optimizer's state are as before."""
        with undisturbed_stack() as stack:
            stack.enter_context(preserve_random_state())
            stack.enter_context(_preserve_gradients(self._parameters))
            stack.enter_context(preserve_module_state(self._model))
            stack.callback(self.state.restore)
            if self._optimizer is not None:
                stack.enter_context(preserve_optimizer(self._optimizer))
            yield

    def run(self) -> None:
        """One step."""
        with torch.set_grad_enabled(self._trains):
            output = self._model(*self._args, **self._kwargs)
        if not self._trains:
            return
        if self._loss is not None:
            total = self._loss(output)
            gradients = torch.autograd.grad(total, self._parameters, allow_unused=True)
        else:
            results = [each for each in floating(output) if each.requires_grad]
            if self._cotangents is None or len(self._cotangents) != len(results):
                self._cotangents = [torch.randn_like(each) for each in results]
            gradients = torch.autograd.grad(results, self._parameters, self._cotangents, allow_unused=True)
        self.update(gradients)

    def update(self, gradients: Sequence[Tensor | None] | None = None) -> None:
        """The optimizer's part of it; with gradients that are nowhere written, for an estimate."""
        if self._optimizer is None:
            return
        gradients = [torch.empty_like(each) for each in self._parameters] if gradients is None else gradients
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        self._optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None


@contextmanager
def _preserve_gradients(parameters: Sequence[Tensor]) -> Iterator[None]:
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        with defer_signals():
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    parameters = inspect.signature(type(optimizer).step).parameters
    return "closure" in parameters and parameters["closure"].default is inspect.Parameter.empty


@contextmanager
def preserve_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """At the end, the parameters of an optimizer, its state and its options are as before, in the same tensors.

    Hooks of the program see none of the steps in between.
    """
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    state = {parameter: dict(optimizer.state[parameter]) for parameter in parameters if parameter in optimizer.state}
    tensors = [
        *parameters,
        *(each for values in state.values() for each in values.values() if isinstance(each, Tensor)),
    ]
    groups = [(group, dict(group)) for group in optimizer.param_groups]
    tensors += [each for _, options in groups for each in options.values() if isinstance(each, Tensor)]
    copies = [(tensor, tensor.detach().clone()) for tensor in tensors]
    hooks = [(each, dict(each)) for each in _step_hooks(optimizer)]
    for each, _ in hooks:
        for key in [key for key, hook in each.items() if not _is_own(hook)]:
            del each[key]
    try:
        yield
    finally:
        with defer_signals():
            for each, before in hooks:
                each.clear()
                each.update(before)
            for group, options in groups:
                group.clear()
                group.update(options)
            for parameter in parameters:
                if parameter in state:  # the same dictionary, with what it held
                    optimizer.state[parameter].clear()
                    optimizer.state[parameter].update(state[parameter])
                else:
                    optimizer.state.pop(parameter, None)
            _restore(copies)


def _step_hooks(optimizer: torch.optim.Optimizer) -> Iterator[dict[int, Any]]:
    """The registers of what torch calls around a step: of this optimizer, and of all."""
    own = (getattr(optimizer, name, None) for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"))
    yield from (each for each in (*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks) if each)


def _is_own(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).partition(".")[0] == "nearpeak"


@torch.no_grad()
def _restore(copies: Sequence[tuple[Tensor, Tensor]]) -> None:
    for tensor, value in copies:
        tensor.copy_(value)


def _check_module(original: nn.Module, changed: nn.Module, inputs: Inputs, trains: bool) -> list[Errors]:
    """A module of its own against its original, in its own precision and, where that is narrow, in float32 too."""
    errors: list[Errors] = []
    narrow = any(
        each.dtype in (torch.float16, torch.bfloat16) for each in (*original.parameters(), *floating(inputs.args))
    )
    for width in (None, torch.float32) if narrow else (None,):
        if width is not None:
            original, changed = copy.deepcopy(original).to(width), copy.deepcopy(changed).to(width)
            args, kwargs = pytree.tree_map_only(Tensor, _in_float32, (inputs.args, inputs.kwargs))
            inputs = replace(inputs, args=args, kwargs=kwargs)
        reference = Reference(original)
        reference.probe(inputs)
        for each in variants(inputs.args, inputs.kwargs, trains=trains, scaled=True):
            name = each.name if width is None else f"{each.name} in float32"
            errors += reference.check(changed, replace(each, name=name))
            if problem(errors):
                return errors
    return errors


def _check_optimizer(optimizer: torch.optim.Optimizer, edits: Edits) -> list[Errors]:
    """The updates of some steps with drawn gradients, against those of the original in float64.

    Of one parameter of each size in each group: float64 copies of all would not fit beside a large model.
    """
    chosen = [_one_of_each_size(group["params"]) for group in optimizer.param_groups]
    generator = torch.Generator().manual_seed(0)
    start = [each.detach().clone() for group in chosen for each in group]
    # in the layout of the parameter, as autograd writes gradients: fused kernels read all alike
    drawn = [torch.empty_like(each).copy_(torch.randn(each.shape, generator=generator) * 1e-2) for each in start]

    def moved(wide: bool) -> Tensor:
        with _with_copies(optimizer, chosen, wide=wide) as copies, preserve_optimizer(optimizer):
            for _ in range(OPTIMIZER_STEPS):
                for parameter, gradient in zip(copies, drawn, strict=True):
                    parameter.grad = gradient.to(parameter.dtype, copy=True)
                optimizer.step()
            return torch.cat([(now.detach().double() - was).flatten() for now, was in zip(copies, start, strict=True)])

    with preserve_random_state():
        with edits.suspended():
            reference, original = moved(wide=True), moved(wide=False)
        changed = moved(wide=False)
    unit = max(torch.finfo(each.dtype).eps for each in start)
    own, error = relative_error(original, reference), relative_error(changed, reference)
    size = sum(float(each.double().norm()) ** 2 for each in start) ** 0.5 / max(float(reference.norm()), 1e-30)
    return [
        Errors(
            what=f"parameters after {OPTIMIZER_STEPS} steps of the optimizer",
            original=own,
            fixed=error,
            allowed=1.5 * own + unit * size + 4 * unit,
            reference="float64",
        )
    ]


def _one_of_each_size(parameters: Sequence[Tensor]) -> list[Tensor]:
    """The first parameter of each shape, dtype and device."""
    return list({(each.shape, each.dtype, each.device): each for each in reversed(parameters)}.values())[::-1]


@contextmanager
def _with_copies(
    optimizer: torch.optim.Optimizer, chosen: Sequence[Sequence[Tensor]], *, wide: bool
) -> Iterator[list[Tensor]]:
    """Inside, the groups of an optimizer have copies of these parameters alone, with copies of their states.

    `wide` makes them float64.
    """

    def copied(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().double() if wide else tensor.detach().clone()

    def copied_state(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        return copied(value) if value.is_floating_point() and value.dim() else value.detach().clone()

    before, owned = optimizer.state, [group["params"] for group in optimizer.param_groups]
    copies = [[copied(each).requires_grad_() for each in group] for group in chosen]
    state: defaultdict[Tensor, Any] = defaultdict(dict)
    for parameters, group in zip(chosen, copies, strict=True):
        for parameter, new in zip(parameters, group, strict=True):
            if parameter in before:
                state[new] = {name: copied_state(value) for name, value in before[parameter].items()}
    try:
        optimizer.state = state
        for options, parameters in zip(optimizer.param_groups, copies, strict=True):
            options["params"] = parameters
        yield [each for group in copies for each in group]
    finally:
        with defer_signals():
            optimizer.state = before
            for options, parameters in zip(optimizer.param_groups, owned, strict=True):
                options["params"] = parameters


def _estimate(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], grad: bool | None, machine: Machine
) -> Estimate:
    return estimate_trace(trace(function, *args, kwargs=kwargs, grad=grad, target=target_of(machine)), machine)


def _loss_of(output: Any) -> Any:
    """The loss that a model's output has itself."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) and loss.dim() == 0 else None


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _in_float32(tensor: Tensor) -> Tensor:
    return tensor.detach().float().requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else tensor


def _site_record(tried: Fix, site: Site, status: Any, why: str) -> FixedSite:
    return FixedSite(
        fix=tried.id, path=site.place, what=site.what, source=site.line, computes=site.computes, status=status, why=why
    )


_PLUMBING = frozenset(
    "view reshape transpose permute t detach alias expand unsqueeze squeeze slice select split _unsafe_view empty "
    "lift_fresh".split()
)


def _kernels_at(path: str, ops: Sequence[Op]) -> Iterator[str]:
    """The operators that compute in a module, each once; those of nearpeak and of compilers first."""
    inside = dict.fromkeys(
        op.name
        for op in ops
        if (op.phase == "optimizer" if path == OPTIMIZER else not path or f"{op.module}.".startswith(f"{path}."))
        and op.packet.partition(".")[2] not in _PLUMBING
    )
    yield from sorted(inside, key=lambda name: name.startswith("aten."))


def _batch_text(args: Any, kwargs: Any) -> str:
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    return ", ".join(f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in tensors[:8])


def _machine_name(device: torch.device) -> str:
    backend = find_backend(device)
    return str(device) if backend is None else backend.properties(device.index or 0).name


def _count(items: Collection[Any], noun: str) -> str:
    plural = "es" if noun.endswith("x") else "s"
    return f"{len(items)} {noun}{'' if len(items) == 1 else plural}"
