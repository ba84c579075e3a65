"""The view of each class of results: `document_of` makes a document of any of them, `report` its text.

Classes and views are named by text, so that neither an import of this module nor a card loads the views of all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from nearpeak._display import Result
from nearpeak.profiles.profile import Profile
from nearpeak.render.document import Document
from nearpeak.render.text import text
from nearpeak.render.views.profile import ReportOptions
from nearpeak.render.views.screen import screen

VIEWS: Mapping[tuple[str, str], tuple[str, str]] = {
    ("machines.machine", "Machine"): ("machine", "document"),
    ("measure.timing", "Timing"): ("timing", "document"),
    ("measure.timing", "Comparison"): ("timing", "comparison_document"),
    ("measure.timing", "Sweep"): ("sweep", "document"),
    ("comm.result", "CommRun"): ("comm", "document"),
    ("judging.judgement", "Judgement"): ("judgement", "document"),
    ("judging.judgement", "SuiteJudgement"): ("judgement", "suite_document"),
    ("bound.estimate", "Estimate"): ("estimate", "document"),
    ("profiles.profile", "Profile"): ("profile", "document"),
    ("profiles.finding", "Finding"): ("finding", "document"),
    ("profiles.job", "JobProfile"): ("job", "document"),
    ("diffs.difference", "Difference"): ("difference", "document"),
    ("fixes.record", "FixReport"): ("fix", "document"),
    ("plan.models.model", "Model"): ("plan.catalogue", "model_document"),
    ("plan.cluster.cluster", "Cluster"): ("plan.catalogue", "cluster_document"),
    ("plan.cluster.collectives", "Collective"): ("plan.collectives", "collective_document"),
    ("plan.training.plan", "MemoryPlan"): ("plan.training", "memory_document"),
    ("plan.training.fit", "FitPlan"): ("plan.training", "fit_document"),
    ("plan.training.plan", "TrainingPlan"): ("plan.training", "training_document"),
    ("plan.training.search", "SearchPlan"): ("plan.training", "search_document"),
    ("plan.serving.plan", "ServingPlan"): ("plan.serving", "document"),
    ("plan.validation.errors", "Validation"): ("plan.validation", "document"),
}
"""By the module of a result's class in `nearpeak` and its name: the module of `views` and the function."""


def document_of(result: Result) -> Document:
    """A result as a document."""
    kind = type(result)
    module, function = VIEWS[kind.__module__.removeprefix("nearpeak."), kind.__name__]
    document: Document = getattr(import_module(f"nearpeak.render.views.{module}"), function)(result)
    return document


def report(result: Any, *, full: bool = False) -> str:
    """A result as text. A profile has one screen of it, unless it is asked for in full."""
    if isinstance(result, Profile) and not full:
        return text(screen(result, ReportOptions(is_in_python=True)))
    return text(document_of(result))
