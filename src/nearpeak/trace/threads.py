"""The stacks of other threads, read without harm to them."""

from __future__ import annotations

import gc
import sys
from types import FrameType

COLLECTS_WHEREVER_IT_ALLOCATES = sys.version_info < (3, 12)
"""Python 3.11 makes the object of a frame when it is asked for, and may collect garbage then. Callbacks and finalizers
of the collection give way to other threads, the frame returns, and what is read after that is anything."""
MARGIN = 64
"""Objects that the frames of the threads, and of a few callers, may need."""


def current_frames() -> dict[int, FrameType]:
    """The frame that each thread is in; a collection that is due comes first.

    Whoever goes on to the callers of a frame asks `collection_is_due` before each of them.
    """
    if collection_is_due():
        gc.collect(0)
    return sys._current_frames()


def collection_is_due() -> bool:
    """Whether Python may collect garbage while it makes a few frames."""
    if not COLLECTS_WHEREVER_IT_ALLOCATES or not gc.isenabled():
        return False
    threshold = gc.get_threshold()[0]
    return threshold > 0 and gc.get_count()[0] + min(MARGIN, threshold // 2) > threshold
