import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from made_jobs import TRANSFER_S, made_bucket_ranks, made_ranks  # type: ignore[import-not-found]

from nearpeak._records import from_json, to_json
from nearpeak.profiles.job import RankReport
from nearpeak.profiles.job_analysis import analyze_job
from nearpeak.profiles.rank_timeline import OpTotal
from nearpeak.render.text import text
from nearpeak.render.views.job import document, ranks_picture


def late_rank(activity, seconds=3e-3, rank=1, when=lambda step: True):
    def own(each, step):
        return {activity: seconds + (1e-3 if activity == "python" else 0.0)} if each == rank and when(step) else {}

    return own


def _beside_a_wait(segment, is_busy):
    """The wait of a rank that works for a millisecond until the collective ends."""
    ops, *others, communication = segment.seconds
    return replace(segment, seconds=(ops + 1e-3, *others, communication - 1e-3)) if is_busy else segment


@pytest.mark.parametrize("activity", ["input", "garbage collection", "python"])
def test_a_late_rank_is_named_with_its_cause(activity):
    job = analyze_job(made_ranks(own=late_rank(activity), jitter=1e-4), 3)
    (late,) = job.late
    assert (late.rank, late.cause, late.pattern) == (1, activity, "always")
    assert late.late_s == pytest.approx(3e-3, rel=0.3)


def test_a_rank_that_runs_more_ops_does_more_work():
    def ops(rank, step):
        return {"aten::mm": OpTotal(count=8 if rank == 1 else 4, seconds=0.022 if rank == 1 else 0.011, elements=0.0)}

    (late,) = analyze_job(made_ranks(own=late_rank("ops", 20e-3), ops=ops), 3).late
    assert (late.rank, late.cause) == (1, "more work") and "mm" in late.evidence


def test_the_same_ops_that_take_longer_are_slower_kernels_or_a_lower_clock():
    reports = made_ranks(own=late_rank("ops", 14e-3), host=str)
    assert analyze_job(reports, 3).late[0].cause == "slower kernels"
    clocked = [
        replace(report, timeline=replace(report.timeline, clock_hz=1.41e9 if report.timeline.rank == 1 else 1.755e9))
        for report in reports
    ]
    (late,) = analyze_job(clocked, 3).late
    assert late.cause == "lower clock" and "1,410 MHz, 1,755 MHz on the others" in late.evidence


def test_no_rank_is_accused_of_scatter():
    assert analyze_job(made_ranks(jitter=8e-4), 3).late == ()


def test_time_that_other_work_took_is_no_fault():
    reports = made_ranks(own=late_rank("python"), preempted=lambda rank, step: 3e-3 if rank == 1 else 0.0)
    assert analyze_job(reports, 3).late == ()


@pytest.mark.parametrize("taken_s", [0.0, 1e-3, 6e-3])
def test_slower_ops_beside_other_work_are_nobodys_fault(taken_s):
    job = analyze_job(made_ranks(own=late_rank("ops", 22e-3), preempted=lambda rank, step: taken_s, host=str), 3)
    assert bool(job.late) == (taken_s < 2e-3)
    assert any("may be the reason: the rank is not called late" in note for note in job.notes) == (taken_s > 2e-3)


def test_slower_ops_of_a_machine_that_ranks_share_are_nobodys_fault():
    job = analyze_job(made_ranks(own=late_rank("ops", 14e-3)), 3)
    assert job.late == ()
    assert any("Its ops take 15.0 ms, 11.0 ms on the others. Ranks of one machine" in note for note in job.notes)
    on_devices = [
        replace(report, timeline=replace(report.timeline, on_device=True))
        for report in made_ranks(own=late_rank("ops", 14e-3))
    ]
    assert [late.cause for late in analyze_job(on_devices, 3).late] == ["slower kernels"]


def test_a_rank_is_late_though_other_work_makes_another_one_last():
    def own(rank, step):
        taken = {"python": 31e-3} if rank == 0 and step % 2 else {}
        return {"input": 8e-3} if rank == 1 else taken

    (late,) = analyze_job(
        made_ranks(own=own, preempted=lambda rank, step: 30e-3 if rank == 0 and step % 2 else 0.0), 3
    ).late
    assert (late.rank, late.cause) == (1, "input")


def test_nobody_waits_for_a_rank_whose_work_runs_beside_a_collective():
    calls = [
        replace(
            report,
            timeline=replace(
                report.timeline,
                steps=tuple(
                    replace(
                        step,
                        segments=(*step.segments[:-2], _beside_a_wait(step.segments[-2], rank == 1), step.segments[-1]),
                    )
                    for step in report.timeline.steps
                ),
            ),
        )
        for rank, report in enumerate(made_ranks(preempted=lambda rank, step: 0.0))
    ]
    assert analyze_job(calls, 3).late == ()


def test_a_thread_that_ran_has_lost_its_processor_after_a_wait():
    def own(rank, step):
        return {"ops": 20e-3} if rank == 1 else {}

    def ops(rank, step):
        return {"aten::mm": OpTotal(count=8 if rank == 1 else 4, seconds=20e-3 if rank == 1 else 10e-3, elements=0.0)}

    def preempted(rank, step):
        return 15e-3 if rank == 1 else 0.0

    reports = made_ranks(own=own, ops=ops, preempted=preempted)
    assert analyze_job(reports, 3).late == ()
    ran = [
        replace(
            report,
            timeline=replace(
                report.timeline, steps=tuple(replace(step, processor_s=step.own_s) for step in report.timeline.steps)
            ),
        )
        for report in reports
    ]
    (late,) = analyze_job(ran, 3).late
    assert (late.rank, late.cause) == (1, "more work")


def test_a_device_goes_on_while_its_host_has_no_processor():
    reports = made_ranks(preempted=lambda rank, step: 8e-3 if rank == 1 else 0.0)
    devices = [replace(report, timeline=replace(report.timeline, on_device=True)) for report in reports]
    assert analyze_job(devices, 3).late == ()


@pytest.mark.parametrize("taken_s", [0.0, 4e-3])
def test_what_takes_longer_in_some_steps_may_be_other_work(taken_s):
    def own(rank, step):
        return {} if rank != 1 else {"input": 4e-3} if step < 7 else {"ops": 14e-3}

    job = analyze_job(made_ranks(own=own, preempted=lambda rank, step: taken_s), 3)
    assert [late.cause for late in job.late] == ([] if taken_s else ["input"])
    assert any("Not always the same parts of rank 1 take longer" in note for note in job.notes) == bool(taken_s)


def test_half_of_two_causes_cannot_be_told():
    def own(rank, step):
        return {"input": 2e-3, "python": 3e-3, "garbage collection": 2e-3} if rank == 1 else {}

    (late,) = analyze_job(made_ranks(own=own), 3).late
    assert (late.rank, late.cause) == (1, "cannot tell")


def test_a_little_late_without_a_cause_is_no_accusation():
    def own(rank, step):
        return {"input": 0.3e-3, "python": 1.3e-3, "garbage collection": 0.25e-3} if rank == 1 else {}

    job = analyze_job(made_ranks(own=own), 3)
    assert job.late == ()
    assert any("which no recorded activity explains" in note for note in job.notes)
    explained = analyze_job(made_ranks(own=late_rank("input", 0.85e-3)), 3)
    assert [(late.rank, late.cause) for late in explained.late] == [(1, "input")]


def test_bursts_are_told_from_a_rank_that_is_always_late():
    (late,) = analyze_job(made_ranks(own=late_rank("input", 5e-3, when=lambda step: step % 3 == 0)), 3).late
    assert (late.pattern, late.late_steps) == ("bursts", 4)


def test_ranks_that_are_late_in_turn():
    def own(rank, step):
        return {"input": 5e-3} if step % 3 == rank else {}

    (late,) = analyze_job(made_ranks(own=own), 3).late
    assert (late.rank, late.pattern, late.cause) == (None, "rotates", "input")


def test_a_collective_is_arrival_wait_transfer_and_tail():
    job = analyze_job(made_ranks(own=late_rank("input", 3e-3)), 3)
    (row,) = job.collectives
    assert row.wait_s == pytest.approx(2e-3, rel=1e-3)  # the mean of 3, 0 and 3 ms
    assert row.transfer_s == pytest.approx(TRANSFER_S, rel=1e-3)
    assert (row.last_rank, row.last_share) == (1, 1.0)
    assert row.bus_bandwidth == pytest.approx(4 / 3 * 4e6 / TRANSFER_S, rel=1e-3)


@pytest.mark.parametrize("seconds", [1e-3, 2e-3, 4e-3, 8e-3, 16e-3])
@pytest.mark.parametrize("activity", ["input", "python"])
def test_the_step_without_a_cause_is_that_of_a_run_without_it(activity, seconds):
    healthy = analyze_job(made_ranks(jitter=1e-4), 3)
    job = analyze_job(made_ranks(own=late_rank(activity, seconds), jitter=1e-4), 3)
    assert job.replayed_s == pytest.approx(job.step_s, rel=0.02)
    assert job.what_ifs[0].what.startswith("rank 1's")
    assert job.what_ifs[0].step_s == pytest.approx(healthy.step_s, rel=0.05)


def test_clocks_of_machines_are_aligned_by_the_ends_of_collectives():
    reports = made_ranks(own=late_rank("input"), host=lambda rank: f"host{rank}")
    shifted = [
        replace(report, timeline=replace(report.timeline, origin_s=100.0 * report.timeline.rank)) for report in reports
    ]
    (late,) = analyze_job(shifted, 3).late
    assert (late.rank, late.cause) == (1, "input")


def test_without_numbers_collectives_are_matched_by_order():
    job = analyze_job(made_ranks(own=late_rank("input"), numbered=False), 3)
    assert job.matched == 1.0 and job.late[0].rank == 1


def test_a_report_says_what_its_columns_are_and_how_long_ranks_had_no_processor():
    reports = made_ranks(preempted=lambda rank, step: 4e-3 if rank == 1 else 0.0)
    job = analyze_job([replace(report, wall_s=12e-3) for report in reports], 3)
    report = " ".join(text(document(job)).split())
    assert "12 steps of 14.0 ms recorded. A step takes 12.0 ms without the profiler." in report
    assert "more ranks than processors, kept a rank from its processor for 28.6 % of a step" in report
    assert "Preempted: other work had its processor, inside the other times." in report


def test_missing_ranks_are_named():
    job = analyze_job(made_ranks()[:2], 4)
    assert job.missing == (2, 3)
    assert "Missing: ranks 2, 3 of 4." in text(document(job))


def test_a_report_is_json_and_back():
    (report, *_) = made_ranks(count=1, steps=2)
    assert from_json(RankReport, to_json(report)) == report


def test_the_work_of_an_analysis_grows_with_its_ranks_and_not_with_their_square():
    def calls(count):
        reports, seen = made_ranks(count, own=late_rank("input"), jitter=1e-4), 0

        def see(frame, event, argument):
            nonlocal seen
            seen += event == "call"

        sys.setprofile(see)
        try:
            analyze_job(reports, count)
        finally:
            sys.setprofile(None)
        return seen

    assert calls(64) < 5 * calls(16)


@pytest.mark.parametrize(
    ("count", "buckets", "transfer_s", "delays"),
    [
        (2, 2, 2e-3, {0: 2e-3}),
        (2, 4, 1e-3, {0: 5e-3}),
        (3, 4, 2e-3, {2: 4e-3}),
        (4, 4, 4e-3, {0: 8e-3}),
        (4, 6, 4e-3, {3: 8e-3}),  # meanwhile the buckets before it end, which it would have to wait for
        (4, 6, 6e-3, {1: 10e-3}),
        (8, 4, 2e-3, {0: 12e-3}),
        (8, 8, 1e-3, {8: 6e-3}),
        (3, 3, 8e-3, {0: 20e-3}),
        (4, 4, 2e-3, {1: 3e-3, 3: 3e-3}),
    ],
)
def test_a_step_of_buckets_without_a_delay_is_that_of_a_run_without_it(count, buckets, transfer_s, delays):
    settings = {"buckets": buckets, "transfer_s": transfer_s, "jitter": 1e-4}
    healthy = analyze_job(made_bucket_ranks(count, **settings), count)
    job = analyze_job(made_bucket_ranks(count, delays=lambda rank: delays if rank == 1 else {}, **settings), count)
    assert healthy.late == ()
    assert job.replayed_s == pytest.approx(job.step_s, rel=0.02)
    assert job.what_ifs[0].what == "rank 1's Python"
    assert job.what_ifs[0].step_s == pytest.approx(healthy.step_s, rel=0.01)


def test_the_picture_has_a_bar_of_each_rank_and_names_the_late_one():
    job = analyze_job(made_ranks(own=late_rank("input")), 3)
    scene = ranks_picture(job)
    texts = [shape.text for shape in scene.shapes if hasattr(shape, "text")]
    assert {"rank 0", "rank 1 (late)", "rank 2", "input"} <= set(texts)
    assert any(part.startswith("Rank 1 is late in every step") for part in texts)
    assert "garbage collection" not in texts  # what no rank did is not in the legend
