"""`FixReport`: what was fixed, as data without torch; saved as JSON it is the certificate of a fixed model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nearpeak._display import Result, headline
from nearpeak._files import read_json, write_file
from nearpeak._records import Amount, Count, Seconds, Share, SignedSeconds, brief, from_json, to_json
from nearpeak.errors import FileProblem
from nearpeak.units import seconds

SCHEMA = 1
KIND = "nearpeak fix"
SiteStatus = Literal["replaced", "skipped", "rolled back"]
FixStatus = Literal["kept", "rolled back", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """The relative error of a result against its reference: the norm of the difference over the norm."""

    what: str
    """Which result on which inputs: "output, batch of the user", "gradients, 3 rows of 17, eval"."""
    original: Amount
    """That of the original, which is its own rounding."""
    fixed: Amount
    allowed: Amount
    """What `fixed` may be."""
    reference: Literal["float64", "float32", "original"]
    """The precision of the reference; "original" where there is none but the original itself."""

    @property
    def is_within(self) -> bool:
        """Whether the error is allowed."""
        return self.fixed <= self.allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Two ways of running a step, measured in turns."""

    before_s: Seconds
    after_s: Seconds
    ratio: Amount
    """After over before, the center of pairs."""
    low: Amount
    high: Amount
    confidence: Share
    pairs: Count
    verdict: Literal["FASTER", "SLOWER", "EQUIVALENT", "INCONCLUSIVE"]
    memory_before: Amount | None = None
    """Peak bytes of the device; None where its allocator keeps no statistics."""
    memory_after: Amount | None = None
    first_s: Seconds = 0.0
    """The first step after the change, with what it compiles."""

    @property
    def saved_s(self) -> float:
        """Seconds that the change saves per step."""
        return self.before_s * (1.0 - self.ratio)

    @property
    def saved_between_s(self) -> tuple[float, float]:
        """The interval of what it saves."""
        return self.before_s * (1.0 - self.high), self.before_s * (1.0 - self.low)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedSite:
    """A place where a fix applies, and what became of it."""

    fix: str
    path: str
    """Of the module; "" for the model itself."""
    what: str
    source: str
    computes: str
    """What is computed there: a certificate applies to a site that computes the same alone."""
    status: SiteStatus
    why: str = ""
    kernels: tuple[str, ...] = ()
    """The operators that ran there in a trace of the fixed model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedFix:
    """One fix with all of its sites: whether it is right, and what it saves."""

    id: str
    title: str
    status: FixStatus
    why: str = ""
    predicted_s: SignedSeconds | None = None
    """The predicted saving per step; None where it cannot be predicted."""
    speed: Speed | None = None
    """None where it was not measured, as a fix that is wrong."""
    errors: tuple[Errors, ...] = ()

    @property
    def worst(self) -> Errors | None:
        """The error that is nearest to what is allowed, or furthest beyond it."""
        return max(self.errors, key=lambda each: each.fixed / max(each.allowed, 1e-300), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixReport(Result):
    """What `nearpeak.fix` found in a model, changed, proved and measured."""

    model: str
    """The class of the model."""
    machine: str
    torch: str
    python: str
    nearpeak: str
    date: str
    trains: bool
    """Whether a step is training, with gradients, or inference."""
    batch: str
    """Shapes and dtypes of the batch."""
    fixes: tuple[AppliedFix, ...]
    sites: tuple[FixedSite, ...]
    errors: tuple[Errors, ...] = ()
    """Of the whole model with everything that was kept."""
    speed: Speed | None = None
    """Of the step with everything that was kept, against the original."""
    noise: Amount = 0.0
    """By which two runs of the original on the same batch differ, relative to their norm."""
    notes: tuple[str, ...] = ()
    schema: int = SCHEMA

    def __repr__(self) -> str:
        count = len(list(self.kept()))
        if self.speed is None or not count:
            return headline(f"FixReport of {self.model}: nothing helps, nothing was changed")
        times = f"{seconds(self.speed.before_s)} to {seconds(self.speed.after_s)} a step"
        return headline(f"FixReport of {self.model}: {count} fixes kept, {times}")

    def kept(self) -> Iterator[AppliedFix]:
        """The fixes that are in force."""
        return (each for each in self.fixes if each.status == "kept")

    def replaced(self) -> Iterator[FixedSite]:
        """The sites that were replaced."""
        return (site for site in self.sites if site.status == "replaced")

    def skipped(self) -> Iterator[FixedSite]:
        """The sites that were found and could not be replaced."""
        return (site for site in self.sites if site.status == "skipped")

    def save(self, path: str | Path) -> None:
        """Writes it as JSON: the certificate that `fix_from` applies and `nearpeak fix --verify` checks."""
        write_file(path, json.dumps(as_json(self), indent=1, allow_nan=False) + "\n")


def differences(certificate: FixReport, here: FixReport) -> list[str]:
    """What a certificate says and this machine does not confirm, line by line: fixes that are wrong or have no site."""
    lines = []
    sites = {(site.fix, site.path): site for site in here.sites}
    applied = {each.id: each for each in here.fixes}
    for site in certificate.replaced():
        now = sites.get((site.fix, site.path))
        if now is None or now.computes != site.computes:
            what = "is not there" if now is None else "computes something else"
            lines.append(f"{site.fix} at {site.path or 'the model'} {what} here.")
    for each in certificate.kept():
        now_fix = applied.get(each.id)
        if now_fix is not None and any(not error.is_within for error in now_fix.errors):
            lines.append(f"{each.id} is wrong here: {now_fix.why}.")
    return lines


def as_json(report: FixReport) -> dict[str, Any]:
    """The content of a certificate."""
    return {"kind": KIND, **to_json(report)}


def read(path: str | Path) -> FixReport:
    """Reads a certificate; FileProblem says what is wrong with the file."""
    data = read_json(path)
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise FileProblem(path, "it is no certificate of `nearpeak fix`")
    if data.get("schema") != SCHEMA:
        raise FileProblem(path, f"it has schema {brief(data.get('schema'))}, and this version reads {SCHEMA}")
    try:
        return from_json(FixReport, {key: value for key, value in data.items() if key != "kind"})
    except ValueError as error:
        raise FileProblem(path, str(error)) from None
