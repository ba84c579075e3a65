"""`from_config`: a `Model` from a Hugging Face `config.json`, given as a path or as a dict.

>>> tiny = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
...         "intermediate_size": 128, "vocab_size": 100}
>>> from_config(tiny).parameters
95040
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nearpeak.plan.models.config_other_families  # noqa: F401  (fills FAMILIES)
from nearpeak.errors import UsageError, did_you_mean
from nearpeak.plan.models.config_families import FAMILIES
from nearpeak.plan.models.config_fields import Fields
from nearpeak.plan.models.model import Model


def from_config(config: str | Path | Mapping[str, Any], *, name: str = "", source: str = "") -> Model:
    """The model that a `config.json` describes; UsageError names the field that is missing or contradictory."""
    if isinstance(config, Mapping):
        data, where = dict(config), name or str(config.get("_name_or_path") or config.get("model_type") or "the config")
    else:
        path = Path(config)
        if path.is_dir():
            path = path / "config.json"
        data, where = _read(path), name or path.parent.name or path.stem
        source = source or str(path)
    for inner in ("text_config", "llm_config", "language_config"):
        if isinstance(data.get(inner), Mapping):  # the language model of a multimodal one
            data = {"tie_word_embeddings": data.get("tie_word_embeddings", False), **data[inner]}
    kind = data.get("model_type")
    if not isinstance(kind, str):
        raise UsageError(f"{where}: the config has no `model_type`. {did_you_mean('', FAMILIES)}")
    family = FAMILIES.get(kind)
    if family is None:
        raise UsageError(f"{where}: no model_type {kind!r} is known here. {did_you_mean(kind, FAMILIES)}")
    fields = Fields(data, where)
    values = family(fields)
    return Model(name=name or where, source=source or f"config of {where}", **values)


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"Cannot read the config {str(path)!r}: {error.strerror or error}.") from None
    except ValueError as error:
        raise UsageError(f"The config {str(path)!r} is no JSON: {error}.") from None
    if not isinstance(data, dict):
        raise UsageError(f"The config {str(path)!r} is no JSON object.")
    return data
