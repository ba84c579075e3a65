from nearpeak.ops.op import Trace
from nearpeak.profiling.assemble import _with_usual_collections
from nearpeak.trace.kineto.host import HostSpan
from nearpeak.trace.kineto.read import KinetoTrace


def kinds(*generations, per_step):
    """The kinds of garbage collections of a profiled step, where clean steps have so many."""
    host = tuple(
        HostSpan(
            kind="garbage collection",
            name=f"nearpeak: garbage collection {generation} at train.py:9",
            start_s=float(number),
            seconds=0.5,
            op=None,
        )
        for number, generation in enumerate(generations)
    )
    recorded = KinetoTrace(
        path="",
        trace=Trace(ops=(), storages={}),
        kernels=(),
        spans=(),
        device="cpu",
        steps=(),
        step=None,
        wall_s=9.0,
        notes=(),
        host=host,
    )
    return [span.kind for span in _with_usual_collections(recorded, per_step).host]


def test_a_collection_that_clean_steps_do_not_have_is_not_part_of_the_step():
    assert kinds(0, 2, per_step=(1.0, 0.1, 0.1)) == ["garbage collection", "profiler"]


def test_of_many_collections_as_many_as_clean_steps_have_remain():
    assert kinds(0, 0, 0, per_step=(1.8, 0.0, 0.0)) == ["garbage collection", "garbage collection", "profiler"]


def test_a_collection_in_every_step_stays():
    assert kinds(2, per_step=(0.0, 0.0, 1.0)) == ["garbage collection"]
