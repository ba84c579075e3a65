"""`Measuring`: what one test measures, held against the bars of its marker; it fails, skips or passes by that."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import pytest

from nearpeak import __version__
from nearpeak.diagnose.profile import Profile
from nearpeak.errors import EnvironmentProblem, NearpeakError, UsageError
from nearpeak.machines.model import Machine
from nearpeak.machines.store import Key
from nearpeak.measure.case import Case
from nearpeak.measure.timing import Timing
from nearpeak.pytest_plugin import WROTE
from nearpeak.pytest_plugin.bars import bars_of
from nearpeak.pytest_plugin.baselines import Baseline, machine_text, path_of, read, write
from nearpeak.pytest_plugin.judge import Figure, failure, figure_of, grade_text, judge, too_low

FOLDER = "tests/nearpeak_baselines"
"""Where baselines are, where the configuration does not say."""
_names = pytest.StashKey[dict[str, str]]()
"""Which test has the baseline of a name, in a run that writes them."""


class Measuring:
    """The measurements of one test.

    The machine decides whether a test can tell anything: where it cannot, the test is skipped, and says why.
    """

    def __init__(self, item: pytest.Item) -> None:
        self._item = item
        self._marked = item.get_closest_marker("nearpeak") is not None
        self._count = 0
        try:
            self.bars = bars_of((mark.args, mark.kwargs) for mark in item.iter_markers("nearpeak"))
        except UsageError as error:
            _fail(str(error))

    def begins(self) -> None:
        """Before the test: skips it where the device is not the one that it is for."""
        self._count = 0  # a test may be run again
        wanted = self.bars.device
        if wanted is None:
            return
        import_torch()
        import torch

        from nearpeak.measure.machine import key_here

        kind = "gpu" if torch.cuda.is_available() else "cpu"
        if wanted in ("gpu", "cpu"):
            if wanted != kind:
                found = "there is none" if wanted == "gpu" else "there is a GPU, which would be measured"
                pytest.skip(f"nearpeak: needs a {wanted.upper()}, and {found}")
        elif wanted != (device := key_here().device):
            pytest.skip(f"nearpeak: is for {wanted}, and this is {device}")

    def ends(self) -> None:
        """After the test: one that is marked and measured nothing has not met its bars."""
        __tracebackhide__ = True
        if self._marked and self._count == 0 and self.bars.asked:
            _fail(
                f"The test has bars ({', '.join(self.bars.asked)}) and measured nothing: call nearpeak_profile(fn, "
                "*args) or nearpeak_bench(fn, *args) in it."
            )

    def profile(
        self, fn: Callable[..., Any] | Case, *args: Any, on: str | Machine | None = None, **options: Any
    ) -> Profile:
        """`nearpeak.profile(fn, *args)`, whose result is held against the bars of the test."""
        __tracebackhide__ = True
        import_torch()
        from nearpeak.diagnose import run

        machine = self._machine() if on is None else on
        try:
            measured = run.profile(fn, *args, on=machine, **options)
        except EnvironmentProblem as error:
            pytest.skip(f"nearpeak: {error}")
        self._hold(measured)
        return measured

    def bench(self, fn: Callable[..., Any] | Case, *args: Any, **options: Any) -> Timing:
        """`nearpeak.bench(fn, *args)`, whose result is held against the bars of the test."""
        __tracebackhide__ = True
        import_torch()
        from nearpeak.measure import bench

        has_work = options.get("work") is not None or (isinstance(fn, Case) and fn.work is not None)
        if self.bars.of_bound is not None and has_work and options.get("machine") is None:
            options["machine"] = self._machine()
        try:
            measured = bench.bench(fn, *args, **options)
        except EnvironmentProblem as error:
            pytest.skip(f"nearpeak: {error}")
        self._hold(measured)
        return measured

    def _machine(self) -> Machine:
        """This machine as far as it is known; it is measured only where that was asked for."""
        __tracebackhide__ = True
        from nearpeak.capture.machine import machine
        from nearpeak.measure.machine import known_here

        known = known_here()
        if known is None and not self._option("--nearpeak-calibrate"):
            pytest.skip(
                "nearpeak: this machine was never measured, so there are no bounds: run `nearpeak machine "
                "--calibrate` once, or pytest with --nearpeak-calibrate"
            )
        return known or machine()

    def _hold(self, measured: Profile | Timing) -> None:
        """Fails or skips the test; returns where all bars are met."""
        __tracebackhide__ = True
        self._count += 1
        figure, bars = figure_of(measured), self.bars
        told = f"{figure.name}: {figure} {figure.kind} time, grade {figure.grade}"
        self._item.user_properties.append(("nearpeak", told))  # for --junit-xml
        if not bars.asked:
            return
        if too_low(figure, bars):
            pytest.skip(f"nearpeak: cannot tell: {figure} has {grade_text(figure)}, and the test wants {bars.grade}")
        baseline, missing = None, ""
        update = bool(self._option("--nearpeak-update"))
        try:
            if bars.baseline is not None and not update:
                baseline, missing = self._baseline()
            judged = judge(measured, bars, baseline)
            if any(each.verdict == "missed" for each in judged):
                pytest.fail(failure(measured, judged))  # with the line that measured it
            if bars.baseline is not None and update:
                self._write(figure)
        except NearpeakError as error:
            _fail(str(error))
        unsure = "; ".join(each.line for each in judged if each.verdict == "unsure")
        if unsure or missing:
            pytest.skip(f"nearpeak: {missing or f'cannot tell: {unsure}'}")

    def _baseline(self) -> tuple[Baseline | None, str]:
        """That of this machine; None, and why the test cannot tell, where there is none."""
        path, key = self._path(), key_of_machine()
        found = read(path)
        baseline = found.of(key)
        if baseline is not None:
            return baseline, ""
        others = "; ".join(machine_text(each.key) for each in found.baselines)
        has = f"there is one of {others}" if others else f"{self._shown(path)} is not there"
        return None, (f"no baseline of this machine ({machine_text(key)}): {has}. --nearpeak-update writes one")

    def _write(self, figure: Figure) -> None:
        path, node = self._path(), self._item.nodeid
        taken = self._item.config.stash.setdefault(_names, {})
        owner = taken.setdefault(path.name, f"{node} {self._count}")
        if owner != f"{node} {self._count}":
            raise UsageError(
                f"The baseline {path.stem!r} holds one figure, and {owner.rpartition(' ')[0]} has measured it already: "
                "measure once in a test, and give every test a name of its own."
            )
        write(
            path,
            Baseline(
                key=key_of_machine(),
                seconds=figure.seconds,
                low=figure.low,
                high=figure.high,
                kind=figure.kind,
                date=datetime.now(UTC).isoformat(timespec="seconds"),
                nearpeak=__version__,
            ),
        )
        self._item.user_properties.append((WROTE, f"{self._shown(path)}: {figure}"))

    def _path(self) -> Path:
        """The file of the baseline; each set of parameters of a test has its own."""
        assert self.bars.baseline is not None
        config = self._item.config
        folder = config.rootpath / (str(config.getini("nearpeak_baselines")) or FOLDER)
        parameters = getattr(getattr(self._item, "callspec", None), "id", "")
        return path_of(folder, self.bars.baseline + (f"_{_as_name(parameters)}" if parameters else ""))

    def _shown(self, path: Path) -> str:
        root = self._item.config.rootpath
        return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)

    def _option(self, name: str) -> Any:
        return self._item.config.getoption(name)


def import_torch() -> None:
    """Skips the test where torch cannot be imported: nothing can be measured without it."""
    __tracebackhide__ = True
    try:
        import torch  # noqa: F401
    except ImportError as error:
        pytest.skip(f"nearpeak: torch cannot be imported: {error}")


def key_of_machine() -> Key:
    """What baselines of this machine are kept by."""
    from nearpeak.measure.machine import key_here

    return key_here()


def _as_name(parameters: str) -> str:
    """The id of a test's parameters as part of the name of a file; a hash tells apart what would be the same."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", parameters)[:60]
    if safe == parameters:
        return safe
    from hashlib import sha256

    return f"{safe}_{sha256(parameters.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


def _fail(message: str) -> NoReturn:
    __tracebackhide__ = True
    pytest.fail(message, pytrace=False)
