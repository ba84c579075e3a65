"""Fewer looks for garbage while many small objects are made that stay."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from contextlib import contextmanager

NEW_OBJECTS = 200_000
FULL_COLLECTION_EVERY = 32
"""After so many times, Python looks through all objects once."""

_uses = itertools.count(1)


@contextmanager
def low_gc() -> Iterator[None]:
    """Inside, Python looks for cycles of dead objects only after many new ones.

    Each look goes through all objects that are new since the last, and from time to time through all there are: with
    the default of 700 this was a tenth of the time of a trace. What was made inside counts as old afterwards, since it
    stays: looking through all of it at the end was a twentieth of the time.
    """
    before = gc.get_threshold()
    raised = 0 < before[0] < NEW_OBJECTS
    if raised:
        gc.set_threshold(NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        if raised:
            if next(_uses) % FULL_COLLECTION_EVERY == 0:  # nobody looks for what is dead among the old ones otherwise
                gc.collect()
            elif gc.get_freeze_count() == 0:
                gc.freeze()  # into a list of its own, and from there to the oldest: both without a look
                gc.unfreeze()
        gc.set_threshold(*before)
