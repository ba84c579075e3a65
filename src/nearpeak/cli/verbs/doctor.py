"""Check the installation: what is installed, what is missing, and what to do.

Ends with 4 if a package that nearpeak needs is missing, and with 0 otherwise.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from nearpeak._display import printable
from nearpeak.cli.output import print_result

PACKAGES = ("torch", "platformdirs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of one check. "absent" is optional, "missing" is required."""

    name: str
    state: Literal["ok", "absent", "missing"]
    found: str
    advice: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All checks, in the order in which they are shown."""

    checks: tuple[Check, ...]
    ok: bool


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON; - is stdout")


def run(arguments: argparse.Namespace) -> int:
    """Run all checks, print them, and return the exit code."""
    checks = tuple(run_checks())
    report = Report(checks=checks, ok=all(check.state != "missing" for check in checks))
    print_result(text(report), report, arguments.json)
    return 0 if report.ok else 4


def text(report: Report) -> str:
    """The report for people: one line per check, advice below it, a verdict at the end."""
    width = max(len(check.name) for check in report.checks)
    lines = []
    for check in report.checks:
        lines.append(f"{check.state:7}  {check.name:{width}}  {check.found}")
        if check.advice:
            lines.append(f"{'':7}  {'':{width}}  -> {check.advice}")
    missing = [check.name for check in report.checks if check.state == "missing"]
    lines += ["", f"Missing: {', '.join(missing)}." if missing else "Nothing that nearpeak needs is missing."]
    return printable("\n".join(lines))


def run_checks() -> Iterator[Check]:
    """Every check. None of them measures anything."""
    import platform

    from nearpeak import __version__

    yield Check(name="nearpeak", state="ok", found=__version__)
    yield Check(name="python", state="ok", found=f"{platform.python_version()}, {sys.executable}")
    for package in PACKAGES if platform.system() == "Darwin" else (*PACKAGES, "nvidia-ml-py"):
        yield _package(package)
    yield _triton()
    yield _cpu()
    yield _gpu()
    yield _cache()


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _package(package: str) -> Check:
    version = _version(package)
    if version is None:
        return Check(name=package, state="missing", found="not installed", advice=f"pip install {package}")
    if package == "torch":
        problem = _import_torch()
        if isinstance(problem, Exception):
            found = f"{version}, but it cannot be imported: {type(problem).__name__}: {problem}"
            return Check(name=package, state="missing", found=found, advice="Install torch again.")
    return Check(name=package, state="ok", found=version)


def _import_torch() -> Any:
    """The module, or the error that its import raises."""
    from importlib import import_module

    try:
        return import_module("torch")
    except (ImportError, OSError, RuntimeError) as error:
        return error


def _triton() -> Check:
    version = _version("triton") or _version("pytorch-triton")
    if version is not None:
        return Check(name="triton", state="ok", found=version)
    advice = "Only fused kernels need it. CUDA builds of torch for Linux bring it."
    return Check(name="triton", state="absent", found="not installed", advice=advice)


def _cpu() -> Check:
    from nearpeak.machines.cgroups import cpu_limit
    from nearpeak.machines.detect import detect_cpu
    from nearpeak.units import gibibytes, significant

    facts = detect_cpu()
    cores = "unknown number of cores" if facts.processors is None else f"{facts.processors} cores"
    found = f"{facts.name}, {cores}, {gibibytes(facts.memory_bytes)}"
    quota = cpu_limit()
    if quota is not None:
        found += f", limited to {significant(quota)} CPUs of time by its container"
    return Check(name="cpu", state="ok", found=found)


def _gpu() -> Check:
    from nearpeak.devices.nvml import scan_gpus

    scan = scan_gpus()
    torch = _import_torch()
    usable = not isinstance(torch, Exception) and torch.cuda.is_available()
    if scan.gpus:
        names = ", ".join(gpu.name for gpu in scan.gpus)
        found = f"{names}, driver {scan.gpus[0].driver_version or 'unknown'}"
        if usable:
            return Check(name="gpu", state="ok", found=found)
        return Check(name="gpu", state="missing", found=f"{found}, but torch cannot use it", advice=_gpu_advice(torch))
    if usable:
        return Check(name="gpu", state="ok", found=f"{torch.cuda.get_device_name()} ({scan.problem})")
    advice = "The CPU is measured instead. `nearpeak machine --list` names the GPUs of the catalogue."
    return Check(name="gpu", state="absent", found=f"none: {scan.problem}", advice=advice)


def _gpu_advice(torch: Any) -> str:
    import os

    if isinstance(torch, Exception):
        return "Install torch first."
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA. Install one with CUDA."
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides every GPU. Unset it."
    return f"torch was built for CUDA {torch.version.cuda}. Check that the driver is new enough for it."


def _cache() -> Check:
    import os

    from nearpeak._files import cache_folder

    try:
        folder = cache_folder()
    except ImportError:
        return Check(name="cache", state="absent", found="unknown without platformdirs")
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if existing.is_dir() and os.access(existing, os.W_OK):
        count = len(list((folder / "machines").glob("*.json")))
        advice = None if count else "nearpeak machine --calibrate"
        calibrations_text = "no calibration yet" if count == 0 else f"{count} calibration{'s' if count > 1 else ''}"
        return Check(name="cache", state="ok", found=f"{folder}, {calibrations_text}", advice=advice)
    advice = "Calibrations cannot be kept. Set NEARPEAK_CACHE_DIR to a folder that can be written."
    return Check(name="cache", state="absent", found=f"{folder} cannot be written", advice=advice)
