"""What all tests share: a cache directory of their own, and the tests that need a GPU."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from pathlib import Path

import hypothesis
import pytest
import torch

pytest_plugins = ["pytester"]  # runs pytest in a test, for the tests of the plugin

sys.path.insert(0, str(Path(__file__).parent))  # for planted.py

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the other cores have workers of their own

# Some environments forbid it: then each of the processes that tests start compiles the package anew, for a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported: kernels run on a CPU too

# Inductor compiles few kernels here: processes that do so, and headers that are compiled ahead, take longer than these.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")

# the same examples each time; a busy machine is slow, and not wrong
hypothesis.settings.register_profile("nearpeak", derandomize=True, deadline=None, max_examples=15)
hypothesis.settings.load_profile("nearpeak")

_cache = tempfile.TemporaryDirectory(prefix="nearpeak-tests-")
_not_run = pytest.StashKey[int]()


def pytest_configure() -> None:
    os.environ["NEARPEAK_CACHE_DIR"] = _cache.name
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts commands in the background so
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _errors_of_rules_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = sys.modules.get("nearpeak.findings.engine")  # imported here, it would slow tests that need no rules
    if engine is not None:
        monkeypatch.setattr(engine, "OWN_ERRORS_ARE_RAISED", True)


def pytest_unconfigure() -> None:
    gc.unfreeze()
    _cache.cleanup()


@pytest.hookimpl(trylast=True)  # after -m and -k have dropped what was not asked for
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    need_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if need_gpu and not torch.cuda.is_available():
        for item in need_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        config.stash[_not_run] = len(need_gpu)


def pytest_collection_finish() -> None:
    # or each collection of garbage goes through all tests and what they import: that takes longer than most tests do
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    count = config.stash.get(_not_run, 0)
    if count:
        tests = "1 test needs a GPU and was" if count == 1 else f"{count} tests need a GPU and were"
        terminalreporter.write_line(f"{tests} not run: pytest -m gpu")
