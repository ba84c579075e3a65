import gc
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from nearpeak.profiling import torch_profiler
from nearpeak.profiling.torch_profiler import Profiler
from nearpeak.trace.kineto.host import line_of_mark
from nearpeak.trace.kineto.marks import mark_data_loading, mark_garbage_collections, mark_unseen_ops
from nearpeak.trace.kineto.read import read_trace

FILE = Path(__file__).name


def test_a_collection_is_seen_in_the_recording(tmp_path):
    before = list(gc.callbacks)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler, mark_garbage_collections():
        torch.ones(4).exp()
        gc.collect()
        torch.ones(4).exp()
    assert gc.callbacks == before
    profiler.export_chrome_trace(str(tmp_path / "step.json"))
    found = read_trace(tmp_path / "step.json")
    spans = [span for span in found.host if span.kind == "garbage collection"]
    assert len(spans) >= 1
    longest = max(spans, key=lambda span: span.seconds)
    first, last = found.spans[1], found.spans[-1]
    assert first[0] < longest.start_s < longest.start_s + longest.seconds < last[0] + last[1]
    assert [op.packet for op in found.trace.ops if "garbage" in op.name] == []


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
    assert line_of_mark(loaded.name) == f"{FILE}:{line}"
    collected = [line_of_mark(span.name) for span in recorded.host if span.kind == "garbage collection"]
    assert f"{FILE}:{line + 2}" in collected


def test_the_range_of_a_batch_is_no_function_that_a_mode_of_the_program_sees():
    class Count(TorchFunctionMode):
        functions = 0

        def __torch_function__(self, function, types, args=(), kwargs=None):
            self.functions += 1
            return function(*args, **(kwargs or {}))

    batches = DataLoader(torch.ones(8, 4), batch_size=2)
    counts = []
    for marks in nullcontext, mark_data_loading:
        with marks(), Count() as count:
            assert len(list(batches)) == 4
        counts.append(count.functions)
    assert counts[0] == counts[1] > 0


def test_a_loader_that_ends_ends_as_before():
    batches = iter(DataLoader(torch.ones(2, 4), batch_size=2))
    profiler = Profiler()
    assert [batch.shape for batch in batches] == [(2, 4)]
    profiler.discard()


def test_printed_tensors_and_new_ones_have_their_line(monkeypatch):
    monkeypatch.setattr(torch_profiler, "compiled_graph_count", lambda: 0)  # other tests compile
    printed, new = torch._tensor_str._str, torch.tensor
    profiler = Profiler()
    assert torch.tensor([1.0, 2.0]).exp().shape == (2,)
    line = sys._getframe().f_lineno - 1
    assert "meta" in str(torch.empty(2, device="meta"))
    assert str(torch.ones(2)) == "tensor([1., 1.])"  # of the host: nobody waits for it
    recorded = profiler.stop()
    assert (torch._tensor_str._str, torch.tensor) == (printed, new)
    waits = [line_of_mark(span.name) for span in recorded.host if span.kind == "synchronization"]
    assert waits == [f"{FILE}:{line + 2}"]
    sources = {op.source for op in recorded.trace.ops if op.source}
    assert sources == {f"{FILE}:{line}"}


def test_a_compiled_program_keeps_its_constructors():
    new = torch.tensor
    with mark_unseen_ops(constructors=False):
        assert torch.tensor is new


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes are forked here")
def test_a_forked_child_has_the_callbacks_of_the_program():
    before = list(gc.callbacks)
    with mark_garbage_collections():
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.callbacks == before else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert len(gc.callbacks) == len(before) + 1
    assert gc.callbacks == before
