"""What is counted of worker processes, with a clock that is made up."""

import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from nearpeak.profiling.loader_starts import LoaderStarts, WorkerStarts
from nearpeak.trace.guard import Guard

FILE = Path(__file__).name


class Clock:
    """Each look at it takes a second."""

    now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


def counted(persistent=False, epochs=3, batches=4, workers=1, watched=True):
    starts = LoaderStarts(Guard(), Clock())
    loader = DataLoader(torch.ones(2 * batches, 4), batch_size=2, num_workers=workers, persistent_workers=persistent)
    line = 0
    with starts.watching():
        if not watched:
            starts.stop()
        for _ in range(epochs):
            line = sys._getframe().f_lineno + 1
            for _batch in loader:
                starts.steps += 1
    return starts.costs(), f"{FILE}:{line}"


def test_an_end_and_a_start_in_each_epoch():
    before = _MultiProcessingDataLoaderIter.__init__
    costs, line = counted()
    assert costs == WorkerStarts(line=line, epoch_steps=4.0, start_s=3.0)  # torch ends an iterator twice
    assert costs.seconds_per_step == pytest.approx(3.0 / 4)
    assert _MultiProcessingDataLoaderIter.__init__ is before


@pytest.mark.parametrize(
    "options",
    [{"persistent": True}, {"epochs": 1}, {"batches": 1}, {"workers": 0}, {"watched": False}],
    ids=["persistent", "one epoch", "one batch each", "no workers", "not watched"],
)
def test_what_costs_nothing_or_is_in_the_step_anyway(options):
    assert counted(**options)[0] is None
