"""`Fields`: typed reading of a Hugging Face config, with errors that name the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nearpeak.errors import UsageError

_LAYER_TYPES = {
    "full_attention": "A",
    "attention": "A",
    "sliding_attention": "W",
    "chunked_attention": "C",
    "linear_attention": "M",
    "mamba": "M",
}


class Fields:
    """The fields of one config; every read says what it expects."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data = data
        self.where = where

    def has(self, *names: str) -> bool:
        """Whether any of the names is there and not null."""
        return any(self.data.get(name) is not None for name in names)

    def integer(self, *names: str, default: int | None = None) -> int:
        """The first of the names that is there, a number that is not negative; `default` where none is."""
        for name in names:
            value = self.data.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or value != int(value):
                raise UsageError(
                    f"{self.where}: `{name}` must be a whole number that is not negative; given {value!r}."
                )
            return int(value)
        if default is None:
            also = f" (or `{'`, `'.join(names[1:])}`)" if len(names) > 1 else ""
            raise UsageError(f"{self.where}: the config has no `{names[0]}`{also}, which this model needs.")
        return default

    def flag(self, name: str, default: bool) -> bool:
        """True or False; `default` where the field is missing or null."""
        value = self.data.get(name)
        if value is None:
            return default
        if not isinstance(value, (bool, int)):
            raise UsageError(f"{self.where}: `{name}` must be true or false; given {value!r}.")
        return bool(value)

    def text(self, name: str, default: str = "") -> str:
        """A text; `default` where the field is missing or null."""
        value = self.data.get(name)
        return value if isinstance(value, str) else default

    def inner(self, name: str) -> Fields:
        """The fields of a nested object; none where it is missing."""
        value = self.data.get(name)
        return Fields(value if isinstance(value, Mapping) else {}, f"{self.where}, {name}")

    def texts(self, name: str) -> list[str] | None:
        """A list of texts, or None where the field is missing."""
        value = self.data.get(name)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
            raise UsageError(f"{self.where}: `{name}` must be a list of texts; given {value!r}.")
        return list(value)

    def numbers(self, name: str) -> list[int] | None:
        """A list of whole numbers, or None where the field is missing."""
        value = self.data.get(name)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, int) for item in value):
            raise UsageError(f"{self.where}: `{name}` must be a list of whole numbers; given {value!r}.")
        return list(value)

    def layers(self) -> int:
        """How many layers there are."""
        count = self.integer("num_hidden_layers", "n_layer", "n_layers", "num_layers")
        if not count:
            raise UsageError(f"{self.where}: `num_hidden_layers` must be at least 1; given 0.")
        return count

    def mixers(self, pattern: str) -> str:
        """One letter per layer, from `layer_types` where the config has it, else `pattern` over and over."""
        layers = self.layers()
        named = self.texts("layer_types")
        if named is None:
            return (pattern * layers)[:layers]
        if len(named) != layers:
            raise UsageError(
                f"{self.where}: `layer_types` has {len(named)} entries and `num_hidden_layers` is {layers}; "
                "they must agree."
            )
        unknown = sorted(set(named) - set(_LAYER_TYPES))
        if unknown:
            raise UsageError(f"{self.where}: `layer_types` has {unknown[0]!r}; valid: {', '.join(_LAYER_TYPES)}.")
        return "".join(_LAYER_TYPES[name] for name in named)

    def head_dim(self, hidden: int, heads: int) -> int:
        """Channels of a head: as given, else the hidden width shared out."""
        if self.has("head_dim"):
            return self.integer("head_dim")
        if not heads or hidden % heads:
            near = max((n for n in range(1, hidden + 1) if hidden % n == 0 and n <= max(heads, 1)), default=1)
            raise UsageError(
                f"{self.where}: `num_attention_heads` must divide `hidden_size` {hidden} where there is no `head_dim`; "
                f"given {heads}, nearest {near}."
            )
        return hidden // heads
