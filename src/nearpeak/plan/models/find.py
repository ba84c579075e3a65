"""`find_model`: a model from the catalogue, from a config.json or a dict, or from a dozen numbers.

>>> find_model("llama-3-8b").layers
32
>>> find_model("layers=2, hidden=64, heads=4, intermediate=128, vocabulary=100").parameters
95040
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from nearpeak.errors import UsageError, did_you_mean
from nearpeak.plan.legal import nearest_divisor
from nearpeak.plan.models.catalogue import catalogue_names, get_model
from nearpeak.plan.models.config import from_config
from nearpeak.plan.models.model import MOST_LAYERS, Model

NUMBERS = "layers=32,hidden=4096,heads=32,kv_heads=8,intermediate=14336,vocabulary=128256"
_DERIVED = ("name", "source", "mixers", "feeds")
_FLAGS = ("true", "false")
_SUFFIXES = {"": 1, "k": 2**10, "m": 2**20}


def find_model(what: str | Path | Mapping[str, Any] | Model) -> Model:
    """The model of the catalogue, of a config.json (path or dict), or of numbers: "layers=32,hidden=4096,..."."""
    if isinstance(what, Model):
        return what
    if isinstance(what, Mapping):
        return from_config(what)
    text = str(what).strip()
    if text in catalogue_names():
        return get_model(text)
    if "=" in text:
        return from_numbers(text)
    if isinstance(what, Path) or text.endswith(".json") or "/" in text or _exists(text):
        return from_config(text)
    return get_model(text.lower())  # its error lists similar names


def _exists(text: str) -> bool:
    try:
        return Path(text).exists()
    except (OSError, ValueError):  # too long for a name, or with characters that none has
        return False


def from_numbers(text: str) -> Model:
    """A model from "name=value" pairs, separated by commas or spaces: the fields of `Model`, and `layers`.

    Defaults: `kv_heads` is `heads`, `head_dim` is `hidden` over `heads`. With `experts`, every layer but the first
    `dense_layers` has experts.
    """
    numbers = _pairs(text)
    layers = _required(numbers, "layers")
    dense = int(numbers.pop("dense_layers", 0))
    if numbers.get("experts", 0):
        numbers.setdefault("intermediate", 0)
    else:
        dense = layers
    hidden, heads = _required(numbers, "hidden", keep=True), _required(numbers, "heads", keep=True)
    numbers.setdefault("kv_heads", heads)
    if "head_dim" not in numbers:
        if hidden % heads:
            near = nearest_divisor(heads, hidden)
            raise UsageError(
                f"heads={heads} does not divide hidden={hidden}, and head_dim is not given. Nearest: heads={near}."
            )
        numbers["head_dim"] = hidden // heads
    _required(numbers, "vocabulary", keep=True)
    window = bool(numbers.get("window"))
    if layers > MOST_LAYERS:
        raise UsageError(f"layers={layers} must be at most {MOST_LAYERS:,}. Nearest: layers={MOST_LAYERS}.")
    if not 0 <= dense <= layers:
        near = min(max(dense, 0), layers)
        raise UsageError(f"dense_layers={dense} is not between 0 and layers={layers}. Nearest: dense_layers={near}.")
    return Model(
        name="by numbers",
        mixers=("W" if window else "A") * layers,
        feeds="D" * dense + "E" * (layers - dense),
        **numbers,
    )


def size_in_name(name: str) -> float | None:
    """The number of weights in a name, 7e9 for "llama-2-7b"; None where it has none.

    >>> size_in_name("llama-2-7b"), size_in_name("qwen3-0.6b"), size_in_name("grok-1")
    (7000000000.0, 600000000.0, None)
    """
    match = re.search(r"(?:^|[-_ ])(\d+(?:\.\d+)?)b(?:$|[-_ ])", name.lower())
    return float(match.group(1)) * 1e9 if match else None


def _pairs(text: str) -> dict[str, Any]:
    known = {field.name: str(field.type) for field in fields(Model) if field.name not in _DERIVED}
    valid = ["layers", "dense_layers", *known]
    numbers: dict[str, Any] = {}
    for part in re.split(r"[,\s]+", text.strip(", ")):
        field, equals, value = part.partition("=")
        if not equals or not field:
            raise UsageError(f"{part!r} is not NAME=NUMBER. A model by numbers reads {NUMBERS}")
        if field not in valid:
            raise UsageError(f"A model has no number {field!r}. {did_you_mean(field, valid)}")
        if field in numbers:
            raise UsageError(f"{field} is given twice: {numbers[field]} and {value}.")
        if known.get(field) == "bool":
            if value.lower() not in _FLAGS:
                raise UsageError(f"{field}={value!r} must be true or false.")
            numbers[field] = value.lower() == "true"
            continue
        number = re.fullmatch(r"([0-9]{1,15})([km]?)", value.lower())
        if number is None:
            raise UsageError(f"{field}={value!r} must be a whole number of at least 0, such as 4096 or 4k.")
        numbers[field] = int(number.group(1)) * _SUFFIXES[number.group(2)]
    return numbers


def _required(numbers: dict[str, Any], field: str, *, keep: bool = False) -> int:
    if field not in numbers:
        raise UsageError(f"A model by numbers needs {field}, which is not given. An example: {NUMBERS}")
    value = int(numbers[field] if keep else numbers.pop(field))
    if value < 1:
        raise UsageError(f"{field}={value} must be at least 1. Nearest: {field}=1.")
    return value
