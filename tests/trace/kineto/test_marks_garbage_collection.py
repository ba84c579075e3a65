import gc

import torch
from torch.profiler import ProfilerActivity, profile

from nearpeak.trace.kineto.marks import mark_garbage_collections
from nearpeak.trace.kineto.read import read_trace


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
