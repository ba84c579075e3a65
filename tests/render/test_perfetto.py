"""The timeline of a profile as a Chrome trace."""

import dataclasses
import json

import pytest
from synthetic import profile  # type: ignore[import-not-found]

from nearpeak.errors import UsageError
from nearpeak.profiles.profile import DeviceKernel
from nearpeak.render.perfetto import trace_json


def events(made, kind="X"):
    found = json.loads(trace_json(made, made.findings))["traceEvents"]
    return [event for event in found if event["ph"] == kind]


def tracks(made):
    return {event["tid"]: event["args"]["name"] for event in events(made, "M") if event["name"] == "thread_name"}


def test_every_kernel_is_there_with_what_is_known_of_its_op():
    made = profile(400)
    kernels = [event for event in events(made) if event["cat"] in ("kernel", "communication")]
    assert len(kernels) == len(made.timeline)
    for event, span in zip(kernels, made.timeline, strict=True):
        op = made.ops[span.op]
        args = event["args"]
        assert args["kernel"] == span.name
        assert (args["op"], args.get("module", ""), args["source"]) == (op.name, op.module, op.source)
        assert args["measured_us"] == pytest.approx(1e6 * op.measured_s, abs=1e-3)
        assert event["ts"] == pytest.approx(1e6 * span.start_s, abs=1e-3)
        assert event["dur"] == pytest.approx(1e6 * span.seconds, abs=2e-3)
        if op.modeled:
            assert args["lost_us"] == pytest.approx(1e6 * op.lost_s, abs=1e-3)
            assert args["bound_us"] == pytest.approx(1e6 * op.bound_s, abs=1e-3)
            assert args["limiter"] == op.limiter
        else:
            assert not {"bound_us", "lost_us", "limiter"} & set(args)


def test_streams_gaps_and_findings_have_tracks():
    made = profile(400)
    names = tracks(made)
    assert {"findings", "nothing runs", "stream 7", "stream 20"} <= set(names.values())
    gaps = [event for event in events(made) if event["cat"] == "idle"]
    assert [gap["name"] for gap in gaps] == [gap.cause for gap in made.gaps]
    assert gaps[0]["args"]["where"] == "train.py:9"
    assert names[gaps[0]["tid"]] == "nothing runs"


def test_a_cpu_has_ops_and_no_streams():
    made = profile(20)
    spans = tuple(dataclasses.replace(span, stream=0) for span in made.timeline)
    names = tracks(dataclasses.replace(made, device="cpu", timeline=spans)).values()
    assert "ops" in names and not any(name.startswith("stream") for name in names)


def test_findings_are_marks_at_their_first_kernel():
    made = dataclasses.replace(profile(400), modeled_share=1.0)
    marks = events(made, "i")
    assert [mark["name"] for mark in marks] == ["unfused-norm", "repeated-cast"]
    first = min(span.start_s for span in made.timeline if span.op in made.findings[0].ops)
    assert marks[0]["ts"] == pytest.approx(1e6 * first, abs=1e-3)
    assert marks[0]["args"]["saving_us"] == pytest.approx(1e6 * made.findings[0].saving_s, abs=1e-3)
    named = [event for event in events(made) if event["args"].get("findings") == "unfused-norm"]
    assert {event["args"]["op"] for event in named} == {made.ops[at].name for at in made.findings[0].ops}


def test_no_savings_where_the_grade_is_too_low():
    marks = events(dataclasses.replace(profile(400), modeled_share=0.7), "i")
    assert marks and not any("saving_us" in mark["args"] or "share_percent" in mark["args"] for mark in marks)


def test_nothing_on_a_track_begins_before_the_end_of_what_is_there():
    made = profile(400)
    spans = [
        DeviceKernel(name="long", start_s=0.0, seconds=3.3333333e-6, op=0, stream=7),
        DeviceKernel(name="within", start_s=1e-6, seconds=1e-6, op=1, stream=7),
        DeviceKernel(name="across", start_s=1.5e-6, seconds=5e-6, op=2, stream=7),
        DeviceKernel(name="after", start_s=3.3333333e-6, seconds=1e-6, op=3, stream=7),
    ]
    for each in (made, dataclasses.replace(made, timeline=tuple(spans))):
        ends = {}
        for event in sorted(events(each), key=lambda event: event["ts"]):
            assert event["ts"] >= ends.get(event["tid"], 0.0) - 1e-9
            ends[event["tid"]] = event["ts"] + event["dur"]
    assert set(tracks(each).values()) >= {"stream 7", "stream 7, beside (1)", "stream 7, beside (2)"}


def test_without_a_timeline_it_says_what_to_do():
    with pytest.raises(UsageError, match="profile again"):
        trace_json(dataclasses.replace(profile(10), timeline=()), ())


def test_an_op_that_is_not_there_is_no_error():
    made = profile(10)
    spans = tuple(
        dataclasses.replace(span, op=place) for span, place in zip(made.timeline, (99, -1, None), strict=False)
    )
    assert [event["args"] for event in events(dataclasses.replace(made, timeline=spans)) if event["cat"] != "idle"] == [
        {"kernel": span.name} for span in spans
    ]


@pytest.mark.parametrize("name", ["</script>{}", 'a"b\\{}', "\ud800{}", "\u202e{}", "{}" + "x" * 10_000])
def test_hostile_names_stay_names(name):
    made = profile(50, name=name)
    text = trace_json(made, made.findings)
    assert text.isascii()
    assert len(text) < 60 * 4000
    kernel = next(event for event in events(made) if event["cat"] == "kernel")
    assert "\u202e" not in kernel["name"]
