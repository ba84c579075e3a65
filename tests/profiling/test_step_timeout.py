import threading
import time

import pytest

from nearpeak.profiling.script import StepTimeout, step_timeout
from nearpeak.profiling.session import Session


@pytest.mark.slow
def test_a_line_is_said_when_no_step_ends_and_again_after_longer_times():
    lines = []
    watch = Session(lines.append)
    with step_timeout(watch, lines.append, None, first_line_s=0.05):
        time.sleep(0.45)
        count = len(lines)
        assert count in (2, 3, 4)  # after 0.05, 0.1, 0.2 and 0.4 seconds
        assert lines[0].startswith("no step yet for")
        assert "--step MODULE:FUNCTION" in lines[0]
        watch.step_ends()
        time.sleep(0.2)
    assert any("no step after the first 1 for" in line for line in lines[count:])
    time.sleep(0.05)
    assert "nearpeak-waiting" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.slow
def test_steps_give_more_time_and_their_absence_ends_the_code():
    watch = Session(lambda line: None)
    begun = time.monotonic()
    with pytest.raises(StepTimeout), step_timeout(watch, lambda line: None, 0.3):
        for _ in range(3):
            time.sleep(0.15)
            watch.step_ends()
        try:
            time.sleep(60)
        except Exception:
            pytest.fail("the code must not be able to catch it")
    assert 0.7 < time.monotonic() - begun < 30
