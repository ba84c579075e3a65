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
    (r"kimi-k2(-.*)?", "kimi-k2"),
    (r"mistral-7b(-.*)?", "mistral-7b"),
    (r"gpt-?oss-(\d+b)", r"gpt-oss-\1"),
    (r"gpt-?3-(.+)", r"gpt-3-\1"),
    (r"13b \(test-13b\.json\)", "gpt-3-13b"),
)
_GPUS = (
    (r"a100.*40gb.*|a100.*-40.*", "a100-sxm-40gb"),
    (r"a100.*pcie.*", "a100-pcie-80gb"),
    (r"a100.*", "a100-sxm-80gb"),
    (r"h100.*pcie.*", "h100-pcie"),
    (r"h100.*nvl.*", "h100-nvl"),
    (r"h100.*", "h100-sxm"),
    (r"h200.*nvl.*", "h200-nvl"),
    (r"h200.*", "h200-sxm"),
    (r"h800.*", "h800-sxm"),
    (r"h20\b.*", "h20"),
    (r"gh200.*144.*", "gh200-144gb"),
    (r"gh200.*", "gh200-96gb"),
    (r"gb300.*", "gb300"),
    (r"gb200.*", "gb200"),
    (r"b300.*", "b300"),
    (r"b200.*", "b200"),
    (r"rtx[ -]pro[ -]6000.*server.*", "rtx-pro-6000-server"),
    (r"rtx[ -]pro[ -]6000.*max-q.*", "rtx-pro-6000-max-q"),
    (r"rtx[ -]pro[ -]6000.*", "rtx-pro-6000"),
    (r"mi250x.*", "mi250x-gcd"),
    (r"(mi\d+[xa]).*", r"\1"),
    (r"(l40s|l40|l4|a10|a40|a30|t4)\b.*", r"\1"),
)


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
    """The id of the catalogue for a GPU as tables name it; None where it is not known."""
    plain = re.sub(r"^nvidia |^amd |^instinct ", "", name.lower().strip())
    known = {machine.id for machine in machines.machines()}
    if plain in known:
        return plain
    for pattern, replacement in _GPUS:
        match = re.fullmatch(pattern, plain)
        if match:
            identifier = match.expand(replacement)
            return identifier if identifier in known else None
    return None
