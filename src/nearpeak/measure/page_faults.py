"""Page faults of the host process, and how to make glibc's malloc keep freed memory.

glibc returns large blocks to the system when they are freed and maps new ones for the next result. Every new page costs
a page fault before its first byte is written, which can take several times as long as the operation itself.
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
    """Minor page faults of this process so far; 0 where the system does not count them."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def keep_freed_memory() -> bool:
    """Makes malloc keep what this process frees, as torch's allocator does on a GPU; False where that is impossible.

    The setting lasts until the process ends.
    """
    mallopt = _mallopt()
    return mallopt is not None and bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, _MOST))


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Inside, malloc keeps freed memory. Afterwards it has the settings that it has after a large block was freed."""
    changed = keep_freed_memory()
    try:
        yield
    finally:
        mallopt = _mallopt()
        if changed and mallopt is not None:
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
