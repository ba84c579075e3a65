"""`low_gc`: fewer garbage collections while many small objects are made that stay."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from contextlib import contextmanager

NEW_OBJECTS = 200_000
FULL_COLLECTION_EVERY = 32
"""One use in so many ends with a full collection."""

_uses = itertools.count(1)
_somebody_freezes = False
"""Whether the program had frozen objects when they were last counted, for which Python goes through all of them."""


@contextmanager
def low_gc() -> Iterator[None]:
    """Inside, Python's garbage collector runs only after many new objects.

    Each collection goes through all objects that are new since the last, and from time to time through all objects:
    with the default threshold of 700 this was a tenth of the time of a trace. What is made inside counts as old
    afterwards, since it stays: a collection at the end was a twentieth of the time.
    """
    global _somebody_freezes
    before = gc.get_threshold()
    raised = 0 < before[0] < NEW_OBJECTS
    if raised:
        gc.set_threshold(NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        try:
            if raised:
                collects = next(_uses) % FULL_COLLECTION_EVERY == 0
                if collects or not _somebody_freezes:  # then there are few to count
                    _somebody_freezes = gc.get_freeze_count() > 0
                if collects:  # nothing else collects the old generation
                    gc.collect()
                elif not _somebody_freezes:
                    gc.freeze()  # to the permanent generation and from there to the oldest, without a collection
                    gc.unfreeze()
        finally:  # also if Ctrl-C ends the collection
            gc.set_threshold(*before)
