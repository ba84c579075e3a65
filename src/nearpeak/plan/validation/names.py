"""Models and GPUs as published tables name them, and what the catalogues call them.

>>> model_id("meta-llama/Llama-3.1-8B-Instruct"), model_id("Qwen/Qwen3-235B-A22B-FP8")
('llama-3-8b', 'qwen3-235b-a22b')
>>> gpu_id("A100-80GB-SXM 330W"), gpu_id("RTX PRO 6000 Blackwell Server")
('a100-sxm-80gb', 'rtx-pro-6000-server')
"""

from __future__ import annotations

import re
from functools import cache

from nearpeak.machines import catalogue as machines
from nearpeak.plan.models.catalogue import catalogue_names

_ENDINGS = (
    r"-(instruct|chat|it|base|hf|fp8|fp4|nvfp4|mxfp4|bf16|int8|int4|awq|gptq|dynamic"
    r"|0528|0324|v0\.\d|2507|128e|16e|17b)$"
)
_MODELS = (  # as they stand in tables, without makers, hyphens between words and endings
    (r"deepseek-(v3|r1)(\.\d)?(-.*)?", "deepseek-v3"),
    (r"(meta-)?llama-?2-(\d+b)", r"llama-2-\2"),
    (r"(meta-)?llama-?3(\.[013])?-(8b|70b)", r"llama-3-\3"),
    (r"(meta-)?llama-?3\.2-(1b|3b)", r"llama-3.2-\2"),
    (r"(meta-)?llama-?3(\.1)?-405b", "llama-3.1-405b"),
    (r"llama-?4-(scout|maverick)(-.*)?", r"llama-4-\1"),
    (r"qwen-?(\d(?:\.\d)?)-(.+)", r"qwen\1-\2"),
    (r"kimi-k2(\.\d)?(-.*)?", "kimi-k2"),
    (r"minimax-m2(\.\d)?(-.*)?", "minimax-m2"),
    (r"glm-?4\.[567](-355b.*)?", "glm-4.5"),
    (r"qwen3-coder-480b(-.*)?", "qwen3-coder-480b-a35b"),
    (r"mistral-7b(-.*)?", "mistral-7b"),
    (r"gpt-?oss-(\d+b)", r"gpt-oss-\1"),
    (r"gpt-?3-(.+)", r"gpt-3-\1"),
    (r"13b \(test-13b\.json\)", "gpt-3-13b"),
)
_FORMS = ("sxm", "pcie", "nvl", "gcd", "server", "max-q")
_MAKERS = r"\b(nvidia|amd|instinct|geforce|tesla|quadro|radeon)\b"
MEMORY_TOLERANCE = 0.08
"""How far a printed memory size may be from that of the catalogue: GB and GiB differ by 7 %."""


@cache
def model_id(name: str) -> str | None:
    """The name of the catalogue for a model as tables or Hugging Face name it; None where it has none."""
    plain = name.lower().rsplit("/", 1)[-1].replace("_", "-").strip()
    if plain in catalogue_names():
        return plain
    before = ""
    while before != plain:
        before, plain = plain, re.sub(_ENDINGS, "", plain)
    for pattern, replacement in _MODELS:
        match = re.fullmatch(pattern, plain)
        if match:
            plain = match.expand(replacement)
            break
    return plain if plain in catalogue_names() else None


@cache
def gpu_id(name: str) -> str | None:
    """The id of the catalogue for a GPU as tables or drivers name it; None where it is not known, or not of that size.

    The family must be named ("A100", "MI300X"). A form (SXM, PCIe) and a memory size that are named must be those of
    the catalogue; a form that is not named is SXM where there is one, and a size the largest.
    """
    plain = re.sub(r"[\s_/()]+", "-", re.sub(_MAKERS, " ", name.lower().rstrip("?")).strip())
    known = {machine.id: machine for machine in machines.machines()}
    if plain in known:
        return plain
    families = {identifier: _family(identifier) for identifier in known}
    named = [family for family in set(families.values()) if re.search(rf"(^|-){_short(family)}(?![a-z0-9])", plain)]
    if not named:
        return None
    family = max(named, key=len)
    candidates = [identifier for identifier in known if families[identifier] == family]
    forms = {form for form in _FORMS if re.search(rf"(^|-){form}\d?(?![a-z0-9])", plain)}
    if stated := [identifier for identifier in candidates if forms & set(_forms(identifier))]:
        candidates = stated
    size = re.search(r"(\d+)-?gi?b\b", plain)
    if size:
        candidates = [
            identifier for identifier in candidates if _has_memory(known[identifier].memory_bytes, float(size.group(1)))
        ]
    order = ("sxm", "", "pcie")
    return min(
        candidates,
        key=lambda identifier: (
            next((place for place, form in enumerate(order) if form in (*_forms(identifier), "")), len(order)),
            len(_forms(identifier)),
            -(known[identifier].memory_bytes or 0),
        ),
        default=None,
    )


def _family(identifier: str) -> str:
    return re.sub(rf"-({'|'.join(_FORMS)}|\d+gb)(?=-|$)", "", identifier)


def _forms(identifier: str) -> tuple[str, ...]:
    return tuple(form for form in _FORMS if re.search(rf"-{form}(-|$)", identifier))


def _short(family: str) -> str:
    """A pattern of the family, in which the name of a series may be left out: "4090" for "rtx-4090"."""
    return re.sub(r"^rtx-", "(rtx-)?", family)


def _has_memory(size: float | None, printed: float) -> bool:
    return size is None or any(abs(size / unit / printed - 1) <= MEMORY_TOLERANCE for unit in (1e9, 2.0**30))
