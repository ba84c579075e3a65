"""The memory of the host process: whether its pages are mapped anew, and how to have the C library keep them.

glibc gives large blocks back to the system when they are freed, and gets new ones for the next result: every page of
those costs a fault before its first byte is written, which can take several times as long as the operation itself.
"""

from __future__ import annotations

import ctypes
import sys

# From glibc's malloc.h, with the most that their int takes.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_MOST = 2**31 - 1


def page_faults() -> int:
    """Faults of this process so far that no disk was needed for; 0 where the system does not count them."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def keep_freed_memory() -> bool:
    """Has the C library keep what this process frees, as PyTorch keeps a GPU's memory; whether it can.

    It holds until the process ends, and cannot be taken back: for a process of one's own.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, _MOST))
