import gc
import weakref

import pytest

from nearpeak.ops import low_gc as module
from nearpeak.ops.low_gc import FULL_COLLECTION_EVERY, NEW_OBJECTS, low_gc


class Thing:
    pass


@pytest.fixture
def thawed(monkeypatch):
    gc.unfreeze()  # low_gc moves nothing where somebody has frozen objects, as tests/conftest.py has
    monkeypatch.setattr(module, "_somebody_freezes", False)
    yield
    gc.freeze()


@pytest.mark.usefixtures("thawed")
def test_thresholds_come_back_and_young_objects_are_old():
    before = gc.get_threshold()
    with low_gc():
        assert gc.get_threshold()[0] == NEW_OBJECTS
        things = [Thing() for _ in range(1000)]
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
    assert any(item is things for item in gc.get_objects(generation=2))


def test_what_somebody_has_frozen_stays_so():
    gc.freeze()
    before = gc.get_freeze_count()
    with low_gc():
        pass
    assert gc.get_freeze_count() == before


def test_frozen_objects_are_counted_seldom(monkeypatch):
    """Python goes through all of them: for the millions of a large program, in a tenth of a second."""
    gc.freeze()
    counts = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counts.append(None) or 1)
    monkeypatch.setattr(module, "_somebody_freezes", False)
    for _ in range(FULL_COLLECTION_EVERY):
        with low_gc():
            pass
    assert len(counts) == 2


def test_dead_cycles_are_found_in_the_end():
    with low_gc():
        thing = Thing()
        thing.itself = thing
        seen = weakref.ref(thing)
        del thing
    for _ in range(FULL_COLLECTION_EVERY):
        with low_gc():
            pass
    assert seen() is None


def test_a_collector_that_is_off_stays_so():
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        with low_gc():
            assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)
