import gc
import weakref

from nearpeak.work import garbage
from nearpeak.work.garbage import rarely_collected


class Thing:
    pass


def test_thresholds_come_back_and_young_objects_are_old():
    before = gc.get_threshold()
    with rarely_collected():
        assert gc.get_threshold()[0] == garbage.NEW_OBJECTS
        things = [Thing() for _ in range(1000)]
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
    assert any(item is things for item in gc.get_objects(generation=2))


def test_dead_cycles_are_found_in_the_end():
    with rarely_collected():
        thing = Thing()
        thing.itself = thing
        seen = weakref.ref(thing)
        del thing
    for _ in range(garbage.FULL_LOOK):
        with rarely_collected():
            pass
    assert seen() is None


def test_a_collector_that_is_off_stays_so():
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        with rarely_collected():
            assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)
