import gc
import threading
from contextlib import contextmanager

import pytest

from nearpeak.trace import threads
from nearpeak.trace.python_time import sampled_stack
from nearpeak.trace.threads import MARGIN, collection_is_due, current_frames

pytestmark = pytest.mark.skipif(
    not threads.COLLECTS_WHEREVER_IT_ALLOCATES, reason="Python 3.12 collects at the end of an instruction"
)


@contextmanager
def waiting_thread(depth):
    """A thread whose stack has so many frames, none of which is an object yet."""
    arrived, leave = threading.Event(), threading.Event()

    def deeper(left):
        if left:
            deeper(left - 1)
        else:
            arrived.set()
            leave.wait()

    thread = threading.Thread(target=deeper, args=(depth,))
    thread.start()
    arrived.wait()
    try:
        yield thread.ident
    finally:
        leave.set()
        thread.join()


@contextmanager
def collections_noted():
    phases = []

    def note(phase, info):
        phases.append(phase)

    gc.callbacks.append(note)
    try:
        yield phases
    finally:
        gc.callbacks.remove(note)


def almost_due(kept, left):
    """Allocates until so many objects are left before a collection."""
    gc.collect()
    while gc.get_count()[0] < gc.get_threshold()[0] - left:
        kept.append([])


def test_no_garbage_is_collected_while_the_callers_of_a_frame_are_read():
    kept = []
    with waiting_thread(depth=20) as thread, collections_noted() as phases:
        almost_due(kept, left=MARGIN + 6)
        assert not collection_is_due()
        phases.clear()
        frame = current_frames()[thread]
        stack = sampled_stack(frame, is_running=True)
        assert (stack, phases) == (None, [])  # it stopped before the collection
        assert collection_is_due()
        stack = sampled_stack(current_frames()[thread], is_running=True)
        assert phases == ["start", "stop"]  # before the frames were asked for
        assert stack


@pytest.mark.parametrize("way", ["disabled", "no threshold"])
def test_a_program_without_collections_has_none(way):
    kept = []
    thresholds = gc.get_threshold()
    with collections_noted() as phases:
        almost_due(kept, left=2)
        assert collection_is_due()
        phases.clear()
        try:
            if way == "disabled":
                gc.disable()
            else:
                gc.set_threshold(0)
            kept.extend([] for _ in range(10))
            assert not collection_is_due()
            current_frames()
            seen = list(phases)
        finally:
            gc.enable()
            gc.set_threshold(*thresholds)
    assert seen == []
