"""`GLOSSARY`: the words of a report, which a page explains under the pointer and in a list at its end."""

from __future__ import annotations

import re
from collections.abc import Mapping

from nearpeak.profiles.idle import CAUSE_MEANINGS
from nearpeak.profiles.waterfall import PART_MEANINGS
from nearpeak.render.html.document import code_parts
from nearpeak.render.html.markup import Markup, element, joined

GLOSSARY: Mapping[str, str] = {
    "step": "One round of the loop: an iteration of training, a batch, a request, or one call of the function.",
    "clean step": "A step that ran without the profiler. Its time is the time of a step in this report.",
    "wall": "The time of a step as a clock on the wall shows it.",
    "waterfall": "The time of a step in parts that sum to it, from what is unavoidable to what is lost.",
    "kernel": "A function that runs on the device; on a CPU, the code of one op.",
    "op": "One operation of torch: a matrix product, an addition, a copy.",
    "bound": "The least time that the hardware allows for the work of an op: no run of it on this machine is faster.",
    "as written": "As a time: the bounds of all ops in the order written, summed.",
    "fused": "Joined into one kernel, so that what lies between ops need not go through memory. As a time: the bound "
    "of the step with all ops joined that can be.",
    "expected": "The time of a good kernel for an op, as it was measured or modeled. It is longer than the bound.",
    "lost": "The measured time less the bound.",
    "limit": "What makes the bound what it is: memory traffic, cache traffic, arithmetic, or the launch of a kernel.",
    "launch wait": "Idle time of the device before a kernel, because the host launched it late.",
    "roofline": "The most that a machine can compute, by how many operations it does on each byte that it reads.",
    "phase": "Forward pass, backward pass, or optimizer.",
    "module": "The path of the torch.nn.Module that an op belongs to; a star stands for parts that differ.",
    "MFU": "Model FLOP utilization: the FLOPs that the model needs, over what the datasheet allows in that time.",
    "HFU": "Hardware FLOP utilization: as MFU, with FLOPs that are computed again in the backward pass.",
    "grade": "How far the measurement can be trusted, from A to F. Below B, the report tells no ratios and no savings.",
    "measured ceilings": "Rates of memory and arithmetic as they were measured on this machine.",
    "derated": "Ceilings that are the datasheet's figures times a factor.",
    **{name: f"{meaning[0].upper()}{meaning[1:]}." for name, meaning in PART_MEANINGS.items()},
    **{name: f"{meaning[0].upper()}{meaning[1:]}." for name, meaning in CAUSE_MEANINGS.items() if name != "unknown"},
}
LABELS = {
    "step",
    "kernel",
    "op",
    "module",
    "phase",
    "limit",
    "wall",
    "lost",
    "traffic",
    "communication",
    *CAUSE_MEANINGS,
}
"""Words that readers know, or that have a wider meaning in a sentence: they are explained where they are a label."""


def term(word: str, text: str = "") -> str | Markup:
    """A word with its explanation, for the pointer and the keyboard; the word alone if it has none."""
    about = GLOSSARY.get(word)
    return text or word if about is None else element("span", text or word, class_="term", tabindex="0", title=about)


class Explainer:
    """Writes the texts of one section: the first occurrence of each word of the glossary is explained."""

    def __init__(self) -> None:
        self._left = sorted(GLOSSARY.keys() - LABELS, key=lambda word: (-len(word), word))

    def __call__(self, text: str) -> str | Markup:
        if text in GLOSSARY:  # a label
            return term(text)
        parts = code_parts(text)
        for word in list(self._left):
            pattern = re.compile(rf"(?<![\w.-]){re.escape(word)}s?(?![\w-])")
            for index, part in enumerate(parts):
                match = None if isinstance(part, Markup) else pattern.search(part)
                if match is not None:
                    parts[index : index + 1] = [part[: match.start()], term(word, match[0]), part[match.end() :]]
                    self._left.remove(word)
                    break
        return joined(*parts)


def glossary_list() -> Markup:
    """All words, in the order of the alphabet."""
    words = sorted(GLOSSARY, key=str.lower)
    rows = [joined(element("dt", word), element("dd", GLOSSARY[word])) for word in words]
    return element("dl", *rows, class_="glossary")
