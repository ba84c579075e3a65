"""The memory of the host process: whether its pages are mapped anew, and how to have the C library keep them.

glibc gives large blocks back to the system when they are freed, and gets new ones for the next result: every page of
those costs a fault before its first byte is written, which can take several times as long as the operation itself.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MANY_FAULTS = 256
"""Page faults of a call: those of 1 MiB in pages of 4 KiB, each some tenths of a microsecond, or more on a virtual
machine."""
# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_MOST = 2**31 - 1
_USUAL_MAPS = 65536
_LARGEST_KEPT = 32 * 2**20
"""glibc raises its threshold for mapped blocks up to this as larger ones are freed, and trims at twice of it."""


def page_faults() -> int:
    """Faults of this process so far that no disk was needed for; 0 where the system does not count them."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def keep_freed_memory() -> bool:
    """Has the C library keep what this process frees, as PyTorch keeps a GPU's memory; whether it can.

    It holds until the process ends: for a process of one's own.
    """
    mallopt = _mallopt()
    return mallopt is not None and bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, _MOST))


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """What is freed inside is kept until the end; then the C library is as it is after a large block was freed."""
    kept = keep_freed_memory()
    try:
        yield
    finally:
        mallopt = _mallopt()
        if kept and mallopt is not None:
            mallopt(_M_MMAP_MAX, _USUAL_MAPS)
            mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)
            mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST_KEPT)
            ctypes.CDLL(None).malloc_trim(0)


def _mallopt() -> Callable[[int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        function: Callable[[int, int], int] = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return None
    return function
