"""The planner beside calculon, SimuMax, llm-analysis and aiconfigurator, on the rows that each of them can predict.

    python -m benchmarks.plan.peers

`measurements/peer_predictions.json` has what the peers answered, their versions and their settings. nearpeak is run
here on the same rows, each by constants that were fitted without the row's source. Writes `results/plan_peers.json` and
the table in `docs/plan.md`, and prints that table and the same by source.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.markdown_table import table
from nearpeak.plan.cluster.cluster import Cluster
from nearpeak.plan.models.catalogue import get_model
from nearpeak.plan.training.job import Job, precision_named
from nearpeak.plan.training.layout import Layout
from nearpeak.plan.training.memory import memory_by_stage
from nearpeak.plan.training.time import Planner
from nearpeak.plan.validation.inference import predict_inference, read_inference
from nearpeak.plan.validation.training import TIE, validate_training

HERE = Path(__file__).resolve().parents[1]
PEERS = HERE / "measurements" / "peer_predictions.json"
RESULTS = HERE / "results" / "plan_peers.json"
PAGE = HERE.parent / "docs" / "plan.md"
MARKS = ("<!-- peers -->", "<!-- end of peers -->")
"""Of the page: `section` stands between them."""
QUANTITIES = {
    "step": "training step",
    "memory": "peak memory",
    "decode": "decode",
    "tpot": "TPOT",
    "ttft": "TTFT",
    "throughput": "throughput",
}
"""Names in the files, and in the tables."""
TIMES = ("step_time_s", "tokens_per_s_per_gpu", "model_tflops_per_gpu", "mfu_pct")
"""Columns from which the time of a step follows."""
OWN_ROWS = "simumax-"
"""How ids of rows begin that a peer published itself and that are in no file of measurements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """One row: what was measured, and what nearpeak says; seconds, bytes or tokens/s."""

    source: str
    measured: float
    nearpeak: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Relative errors of a peer and of nearpeak over the same rows."""

    peer: str
    quantity: str
    source: str
    """The group of rows, or "all"."""
    rows: int
    """That both predict: the errors are over these."""
    peer_rows: int
    nearpeak_rows: int
    of: int
    """Rows of the files where this quantity was measured."""
    peer_mean: float
    peer_median: float
    nearpeak_mean: float
    nearpeak_median: float
    closer: float
    """Share of the rows where nearpeak is nearer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Pairs of layouts that differ by more than `CLOSE`, and how many a peer and nearpeak put in the right order."""

    peer: str
    pairs: int
    peer_right: int
    nearpeak_right: int


Rows = dict[str, dict[str, Predicted]]


def measured_rows() -> dict[str, set[str]]:
    """The rows of the files where each quantity was measured, whether or not anyone can predict them."""
    rows: dict[str, set[str]] = {name: set() for name in QUANTITIES}
    with (PEERS.parent / "measured_training.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if any(row[name] for name in TIMES):
                rows["step"].add(row["id"])
            if row["peak_mem_gib"] and "OUTCOME: OOM" not in row["notes"]:
                rows["memory"].add(row["id"])
    with (PEERS.parent / "measured_inference.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            single = row["conc_kind"] == "batch" or row["scenario"] == "single-stream decode"
            if row["decode_ms"] or row["tpot_ms"]:
                rows["decode" if single else "tpot"].add(row["id"])
            if row["ttft_ms"]:
                rows["ttft"].add(row["id"])
            if row["output_tok_s"] and not row["tpot_ms"] and not single:
                rows["throughput"].add(row["id"])
    return rows


def planner_rows(peers: dict[str, Any]) -> Rows:
    """nearpeak's predictions by quantity and row, each by constants fitted without the row's source."""
    folder = PEERS.parent
    training = validate_training(folder / "measured_training.csv", left_out=True)
    rows: Rows = {name: {} for name in QUANTITIES}
    for row in training.rows:
        assert row.run.seconds is not None
        rows["step"][row.run.id] = Predicted(source=row.run.group, measured=row.run.seconds, nearpeak=row.seconds)
    for peak in training.memory:
        assert peak.run.memory is not None
        rows["memory"][peak.run.id] = Predicted(source=peak.run.group, measured=peak.run.memory, nearpeak=peak.bytes)
    runs, _ = read_inference(folder / "measured_inference.csv")
    for item in predict_inference(runs, leave_out=True)[0]:
        if item.quantity in rows:
            rows[item.quantity][item.measured.id] = Predicted(
                source=item.measured.source, measured=item.actual, nearpeak=item.predicted
            )
    for own in peers["published"]["rows"]:
        seconds, allocated = own_row(own)
        rows["step"][own["id"]] = Predicted(source="SimuMax", measured=own["step_seconds"], nearpeak=seconds)
        rows["memory"][own["id"]] = Predicted(source="SimuMax", measured=own["memory_bytes"], nearpeak=allocated)
    return rows


def own_row(row: dict[str, Any]) -> tuple[float, float]:
    """Seconds of a step and bytes allocated on the fullest rank, for a row that SimuMax published."""
    base = get_model(row["model"])
    layers = row["layers"]
    cut = (
        replace(base, mixers="A" * layers, feeds="D" + "E" * (layers - 1)) if base.is_moe else base.with_layers(layers)
    )
    gpus = row["gpus"]
    ranks = gpus // (row["tp"] * row["pp"] * row["cp"])
    job = Job(
        model=cut,
        layout=Layout(
            gpus=gpus,
            tp=row["tp"],
            pp=row["pp"],
            cp=row["cp"],
            ep=row["ep"],
            global_batch=row["microbatches"] * ranks,
            sharding="zero1",
            overlap_gradients=False,
            overlap_pipeline=False,
        ),
        sequence=row["sequence"],
        precision=precision_named("bf16-fp32-grads"),
        year=2026.1,
        dropless=not base.is_moe,  # experts are padded to their capacity in these runs
    )
    seconds = Planner(Cluster.of(f"b200 x {gpus}")).time(job).seconds
    return seconds, max(stage.allocated for stage in memory_by_stage(job))


def compared(peers: dict[str, Any], rows: Rows) -> list[Comparison]:
    """Each peer and quantity, over all rows that both predict, and by source."""
    measured, comparisons = measured_rows(), []
    for peer in peers["peers"]:
        for quantity in QUANTITIES:
            answers = {row: one[peer] for row, one in peers["predictions"][quantity].items() if peer in one}
            if not answers:
                continue
            ours = rows[quantity]
            published = {row for row in answers if row.startswith(OWN_ROWS)}
            asked = published or measured[quantity]
            shares = {"peer_rows": len(answers), "nearpeak_rows": len(asked & ours.keys()), "of": len(asked)}
            both = {row: (ours[row], answer) for row, answer in answers.items() if row in ours}
            for source in ("all", *dict.fromkeys(mine.source for mine, _ in both.values())):
                some = [pair for pair in both.values() if source in ("all", pair[0].source)]
                comparisons.append(Comparison(peer=peer, quantity=quantity, source=source, **shares, **_errors(some)))
    return comparisons


def _errors(pairs: list[tuple[Predicted, float]]) -> dict[str, Any]:
    theirs = [abs(answer / mine.measured - 1) for mine, answer in pairs]
    ours = [abs(mine.nearpeak / mine.measured - 1) for mine, _ in pairs]
    return {
        "rows": len(pairs),
        "peer_mean": round(fmean(theirs), 4),
        "peer_median": round(median(theirs), 4),
        "nearpeak_mean": round(fmean(ours), 4),
        "nearpeak_median": round(median(ours), 4),
        "closer": round(fmean(one < other for one, other in zip(ours, theirs, strict=True)), 4),
    }


def ordered(peers: dict[str, Any], rows: Rows) -> list[Order]:
    """How often each peer and nearpeak prefer the faster of two layouts, over the pairs that both predict."""
    mine, answers = rows["throughput"], peers["predictions"]["throughput"]
    with (PEERS.parent / "layout_pairs.csv").open(newline="", encoding="utf-8") as file:
        pairs = [pair for pair in csv.DictReader(file) if pair["kind"] == "inference" and pair["a_over_b_speed"]]
    orders = []
    for peer in peers["peers"]:
        right, ours = [], []
        for pair in pairs:
            ids, speed = (pair["row_a"], pair["row_b"]), float(pair["a_over_b_speed"])
            if abs(speed - 1) <= TIE or any(peer not in answers.get(row, ()) or row not in mine for row in ids):
                continue
            a, b = (mine[row] for row in ids)
            per_gpu = speed * b.measured / a.measured  # from throughput to throughput per GPU
            right.append((answers[ids[0]][peer] / answers[ids[1]][peer] * per_gpu > 1) == (speed > 1))
            ours.append((a.nearpeak / b.nearpeak * per_gpu > 1) == (speed > 1))
        if right:
            orders.append(Order(peer=peer, pairs=len(right), peer_right=sum(right), nearpeak_right=sum(ours)))
    return orders


def tables(comparisons: Iterable[Comparison]) -> tuple[str, str]:
    """Markdown: one line per peer and quantity, and the same by source."""
    items = list(comparisons)
    errors = ("mean error: peer", "nearpeak", "median: peer", "nearpeak", "nearpeak nearer")
    whole = [
        (
            item.peer,
            QUANTITIES[item.quantity],
            f"{100 * item.peer_rows / item.of:.0f} %",
            f"{100 * item.nearpeak_rows / item.of:.0f} %",
            str(item.rows),
            *_figures(item),
        )
        for item in items
        if item.source == "all"
    ]
    split = [
        (item.peer, QUANTITIES[item.quantity], item.source, str(item.rows), *_figures(item))
        for item in items
        if item.source != "all"
    ]
    return (
        table(("peer", "what", "rows: peer", "nearpeak", "both", *errors), whole, 2),
        table(("peer", "what", "source", "rows", *errors), split, 3),
    )


def _figures(item: Comparison) -> tuple[str, ...]:
    shares = (item.peer_mean, item.nearpeak_mean, item.peer_median, item.nearpeak_median)
    return (*(f"{100 * share:.1f} %" for share in shares), f"{100 * item.closer:.0f} %")


def section(comparisons: Iterable[Comparison], orders: Iterable[Order]) -> str:
    """What stands between the marks of the page."""
    lines = [
        f"Of {item.pairs} pairs of serving layouts whose throughput per GPU differs by more than {100 * TIE:.0f} %,\n"
        f"{item.peer} puts {item.peer_right} in the right order, and nearpeak {item.nearpeak_right}."
        for item in orders
    ]
    return "\n\n".join((tables(comparisons)[0], *lines))


def with_section(page: str, text: str) -> str:
    """The page with this text between the marks; as it is where it has none."""
    before, mark, rest = page.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    return f"{before}{mark}\n\n{text}\n\n{end}{after}" if end else page


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    peers = json.loads(PEERS.read_text(encoding="utf-8"))
    rows = planner_rows(peers)
    comparisons = compared(peers, rows)
    used = {name: set(answers) for name, answers in peers["predictions"].items()}
    kept = {
        name: {row: asdict(one) for row, one in predictions.items() if row in used[name]}
        for name, predictions in rows.items()
    }
    orders = ordered(peers, rows)
    document = {
        "comparisons": [asdict(item) for item in comparisons],
        "order": [asdict(item) for item in orders],
        "nearpeak": kept,
    }
    RESULTS.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    text = section(comparisons, orders)
    print(text, tables(comparisons)[1], sep="\n\n")
    page = PAGE.read_text(encoding="utf-8")
    if page != with_section(page, text):
        PAGE.write_text(with_section(page, text), encoding="utf-8")


if __name__ == "__main__":
    main()
