"""A data loader ends its worker processes after each epoch and starts new ones for the next."""

from __future__ import annotations

from collections.abc import Iterator

from nearpeak.findings.engine import Waste, rule
from nearpeak.findings.step import Step
from nearpeak.profiles.idle import WORKERS_STARTED
from nearpeak.units import seconds


@rule("workers-restarted", needs=["host"])
def workers_restarted(step: Step) -> Iterator[Waste]:
    """The share of a step in the time in which workers were started and ended."""
    for cause in step.idle_causes("input"):
        if cause.what != WORKERS_STARTED:
            continue
        yield Waste(
            title="A data loader starts its worker processes again in every epoch.",
            op=None,
            source=step.line_that_writes("DataLoader") or cause.where,
            idle={"input": cause.seconds},
            causes=(cause,),
            evidence=f"Ending and starting workers at {cause.where} takes {seconds(cause.seconds * cause.count)} once "
            f"in {cause.count} steps, {seconds(cause.seconds)} for each of them.",
            reasoning="Workers that stay cost nothing at the next epoch. The time until they have the first batch "
            "remains, and is not in this.",
            remedy="DataLoader(..., persistent_workers=True)  # and made once, before the first epoch",
        )
