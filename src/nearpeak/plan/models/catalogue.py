"""The catalogue of models: Hugging Face configs of known models with their sources, in `model_catalogue.json`.

>>> get_model("llama-3-8b").parameters
8030261248
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from nearpeak.errors import UsageError, did_you_mean
from nearpeak.plan.models.config import from_config
from nearpeak.plan.models.model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """One model of the catalogue: the fields of its config that matter, and where it is published."""

    name: str
    title: str
    config: Mapping[str, Any]
    source: str


@cache
def catalogue_entries() -> Mapping[str, CatalogueEntry]:
    """All models of the catalogue by name, in file order."""
    text = resources.files("nearpeak.plan.models").joinpath("model_catalogue.json").read_text(encoding="utf-8")
    return {
        name: CatalogueEntry(name=name, title=data["title"], config=data["config"], source=data["source"])
        for name, data in json.loads(text)["models"].items()
    }


@cache
def get_model(name: str) -> Model:
    """The model of this name, such as "llama-3-8b"."""
    entry = catalogue_entries().get(name)
    if entry is None:
        raise UsageError(f"The catalogue has no model {name!r}. {did_you_mean(name, catalogue_entries())}")
    return from_config(entry.config, name=name, source=entry.source)


def catalogue_names() -> tuple[str, ...]:
    """All names, in file order."""
    return tuple(catalogue_entries())
