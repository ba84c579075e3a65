import gc
import sys

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from nearpeak.profiling.assemble import Profiler
from nearpeak.trace.kineto.host import line_of_mark


def test_batches_and_collections_have_the_line_that_asked_for_them():
    original = _BaseDataLoaderIter.__next__
    batches = iter(DataLoader(torch.ones(8, 4), batch_size=2))
    profiler = Profiler()
    batch, line = next(batches), sys._getframe().f_lineno
    batch.exp()
    gc.collect()
    recorded = profiler.stop()
    assert _BaseDataLoaderIter.__next__ is original
    (loaded,) = [span for span in recorded.host if span.kind == "input"]
    assert line_of_mark(loaded.name) == f"test_loading.py:{line}"
    collected = [line_of_mark(span.name) for span in recorded.host if span.kind == "garbage collection"]
    assert f"test_loading.py:{line + 2}" in collected


def test_a_loader_that_ends_ends_as_before():
    batches = iter(DataLoader(torch.ones(2, 4), batch_size=2))
    profiler = Profiler()
    assert [batch.shape for batch in batches] == [(2, 4)]
    profiler.discard()
