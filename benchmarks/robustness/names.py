"""Hostile names in every text of a profile, in every output: nothing of them is an escape, a formula or markup.

    export PYTHONPATH=src
    python -m benchmarks.robustness.names --seed 7 --count 200 --json benchmarks/results/hostile_names.json

A profile of a trace in tests/data gets the name in each of its texts, and so do a timing, a config of a model, a kept
run and a file that does not exist. What is written is parsed as its reader would, and compared with the output for a
harmless name: the same elements, blocks, cells and shapes, and every character of it can be seen.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import functools
import io
import json
import os
import random
import re
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.robustness.files import DATA, command, made_up_timing

HARMLESS = "name"
PIECES = (
    *(
        "\x1b[31m",
        "\x1b]0;title\x07",
        "\x1b[2J",
        "\x9b31m",
        "\x07",
        "\x08\x08",
        "\r",
        "\n",
        "\t",
        "\x7f",
        "\x00",
        "\x0b\x0c",
    ),
    *("\u202e", "\u2066", "\u200f", "\u200b", "\u2028", "\u2029", "\ufeff", "\u00ad", "\ud800", "\U000e0041", "\ue000"),
    *("\u2800", "\ufe0f", "\u3164", "\u0085", "\u061c"),
    *(
        "</script><script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "<!--",
        "-->",
        "]]>",
        "<svg/onload=alert(1)>",
    ),
    *(
        "\"' onmouseover=alert(1) x='",
        "&lt;b&gt;",
        "<b>",
        "</td></tr></table>",
        "</details>",
        "{{7*7}}",
        "${x}",
        "</style>",
    ),
    *("|", "`", "```", "**bold**", "_it_", "[x](javascript:alert(1))", "![](http://example.com/x.png)", "<http://a.b>"),
    *(
        "# h",
        "- item",
        "> q",
        "1. x",
        "---",
        "===",
        "\\",
        "~~x~~",
        "$x$",
        "@octocat",
        "#12",
        "https://example.com",
        "[^1]",
    ),
    *("=1+1", "+1", "-1", "@SUM(A1)", "=cmd|' /C calc'!A0", "\uff1d1+1", '"', ",", ";"),
    *("%s", "{0}", "__proto__", "\u6a21\u578b", "gr\u00f6\u00dfe", "a" * 300, " "),
)
_UNSEEN = re.compile(
    r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\u2800\u3164\ufe00-\ufe0f\ufeff"
    r"\ud800-\udfff\ue000-\uf8ff\U000e0000-\U000e0fff]"
)
_COLOR = re.compile(r"\x1b\[\d+m")
_ENUMERATED = ("cause", "origin", "collective", "how")
"""Fields of a saved profile whose texts are of a fixed set."""
_SHAPES = ("svg", "style", "rect", "path", "circle", "text", "title", "g", "line", "polygon", "polyline")
_FORMULA = re.compile(r"\s*[=+@\uff1d\uff0b\uff0d\uff20]|\s*-(?!\d|$)")


def draw_names(seed: int, count: int) -> list[str]:
    """Names of one to four pieces. One of spaces alone would be shown as none."""
    draw = random.Random(seed)
    names = ["".join(draw.choices(PIECES, k=draw.choice((1, 1, 2, 4)))) for _ in range(count)]
    return [name if name.strip() else f"{name}x" for name in names]


def named_profile(name: str) -> Any:
    """The profile of a trace with a name in front of each of its texts."""
    from nearpeak._records import build
    from nearpeak.profiles.profile import Profile

    return build(Profile, _renamed(_recorded(), name), "Profile")


@functools.cache
def _recorded() -> Any:
    from nearpeak.profiling.load import load

    return _plain(load(DATA / "kineto_eager.json.gz"))


def _plain(profile: Any) -> Any:
    from nearpeak._records import to_json

    return to_json(profile)


def _renamed(data: Any, name: str, key: str = "") -> Any:
    if isinstance(data, dict):
        fixed = key == "waterfall"
        return {each: value if fixed else _renamed(value, name, each) for each, value in data.items()}
    if isinstance(data, list):
        return [_renamed(value, name, key) for value in data]
    return name + data if isinstance(data, str) and key not in _ENUMERATED else data


class Tags(HTMLParser):
    """The elements of a page with the names of their attributes, and what is inside of scripts and styles.

    Four things may depend on names: a text between backticks is code, a term outside of code is explained when it is
    pointed at, a cell with a long text may be broken, and each line of prose above code is a paragraph.
    """

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[Any] = []
        self._spans: list[bool] = []
        """Whether each span that is open is a term that is explained."""
        self._in_prose = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element begins."""
        is_term = tag == "span" and [name for name, _ in attrs] == ["class", "tabindex", "title"]
        if tag == "span":
            self._spans.append(is_term)
        if (tag, attrs) == ("p", [("class", "said plain")]):
            self._in_prose = True
        elif (tag, attrs) != ("code", []) and not is_term:
            self.found.append((tag, *(name for name, value in attrs if (tag, name, value) != ("td", "class", "long"))))

    def handle_endtag(self, tag: str) -> None:
        """An element ends."""
        is_term = tag == "span" and bool(self._spans) and self._spans.pop()
        if tag == "p" and self._in_prose:
            self._in_prose = False
        elif tag != "code" and not is_term:
            self.found.append(f"/{tag}")

    def handle_comment(self, data: str) -> None:
        """A comment."""
        self.found.append("<!--")

    def handle_decl(self, decl: str) -> None:
        """A declaration."""
        self.found.append("<!")


def html_structure(text: str) -> Any:
    """The elements in order; rectangles and bars depend on the figures alone."""
    return Tags(text).found


def markdown_structure(text: str) -> Any:
    """Blocks and inline elements in order, text and comments left out."""
    from markdown_it import MarkdownIt

    found: list[str] = []
    for token in MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).parse(text):
        found.append(token.type if token.type != "html_block" else token.content.split(">")[0])
        for child in token.children or ():
            inner = child.content if child.type == "html_inline" else child.type
            if child.type not in ("text", "text_special", "softbreak", "hardbreak") and inner != "<!-- -->":
                found.append({"<code>": "code_inline", "</code>": ""}.get(inner, inner))
    return [each for each in found if each]


def markdown_text(text: str) -> Any:
    """Nothing but the elements that reports use: which rows there are depends on the names."""
    allowed = ("code_inline", "strong_open", "strong_close", "em_open", "em_close", "<details", "</details", "<summary")
    for kind in markdown_structure(text):
        if kind in ("link_open", "image") or ("<" in kind and not kind.strip().startswith(allowed)):
            raise ValueError(f"Markdown has {kind[:40]!r}")


def csv_structure(text: str) -> Any:
    """The number of cells of each row."""
    rows = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    for row in rows:
        for cell in row:
            if _FORMULA.match(cell) and not re.fullmatch(r"\s*[+-]?[\d.,]+(e[+-]?\d+)?( ?[%\w/]+)?", cell):
                raise ValueError(f"a formula: {cell[:40]!r}")
    return [len(row) for row in rows]


def svg_structure(text: str) -> Any:
    """Nothing but shapes and text: which labels have room depends on their names."""
    for element in ElementTree.fromstring(text).iter():
        tag = element.tag.removeprefix("{http://www.w3.org/2000/svg}")
        if tag not in _SHAPES or any(name.startswith(("on", "{")) or "href" in name for name in element.attrib):
            raise ValueError(f"an element {tag} with {', '.join(element.attrib)}")


def json_structure(text: str) -> Any:
    """The keys, and that nothing but ASCII is in it."""
    text.encode("ascii")
    return len(json.loads(text))


def text_structure(text: str) -> Any:
    """Nothing: lines break where names end."""
    return None


def outputs(name: str, folder: Path) -> Iterator[tuple[str, str, Callable[[str], Any]]]:
    """Each output for a name: what it is, its text, and how its structure is read."""
    from nearpeak.diffs.difference import difference
    from nearpeak.profiles import history
    from nearpeak.pytest_plugin import measured_test
    from nearpeak.render import notebook, report
    from nearpeak.render.markdown import markdown
    from nearpeak.render.text import Style, text
    from nearpeak.render.views.difference import document as difference_document
    from nearpeak.render.views.profile import ReportOptions, document

    made, other = named_profile(name), named_profile(HARMLESS)
    for by in ("op", "module", "line"):
        yield f"text by {by}", text(document(made, ReportOptions(by=by))), text_structure
    yield "color", _COLOR.sub("", text(document(made), Style(color=True, blocks=True))), text_structure
    for ending, structure in (
        (".html", html_structure),
        (".md", markdown_structure),
        (".csv", csv_structure),
        (".svg", svg_structure),
        (".txt", text_structure),
        (".perfetto.json", json_structure),
        (".json", json_structure),
    ):
        yield f"report {ending}", report.content(made, ending).decode(), structure
    roofs = ReportOptions(picture="roofline")
    yield "roofline", report.content(made, ".svg", roofs).decode(), svg_structure
    yield "notebook", notebook.card(made), html_structure
    yield "repr", repr(made), text_structure
    changes = document_of = difference_document(difference(other, made), 12, names=(name, "b"))
    yield "diff", text(document_of), text_structure
    yield "diff .md", markdown(changes), markdown_text
    yield from _timing_outputs(name)
    yield "pytest", _printed(lambda: _fail(measured_test, made)), text_structure
    with mock.patch.dict(os.environ, NEARPEAK_CACHE_DIR=str(folder)):
        history.add_run(made)
        yield "history", _printed(lambda: command("profile", "--list")), text_structure
        for run in history.folder().iterdir():
            run.unlink()
    file_name = name.replace("/", "_").replace("\x00", "")[:60].encode("utf-8", "replace").decode()
    for arguments in (
        ("report", f"{file_name}.json"),
        ("plan", "memory", f"./{file_name}.json"),
        ("machine", f"x{file_name}"),
    ):
        yield f"error of {arguments[0]}", _printed(functools.partial(command, *arguments)), text_structure
    broken = folder / "broken.json"
    fields = {name: 1, "kind": "nearpeak profile", "profile": {"schema": name}}
    for content in (fields, {name: [name]}, {"kind": "nearpeak profile", "profile": {**_plain(made), name: name}}):
        broken.write_text(json.dumps(content))
        yield "error of a file", _printed(lambda: command("report", str(broken))), text_structure
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"intermediate_size": 128, "vocab_size": 100}
    broken.write_text(json.dumps({**config, "layer_types": [name, name]}))
    yield "error of a config", _printed(lambda: command("plan", "memory", str(broken))), text_structure
    yield from _plan_outputs(config, name)


def _timing_outputs(name: str) -> Iterator[tuple[str, str, Callable[[str], Any]]]:
    from nearpeak.render import notebook
    from nearpeak.render.csv import csv_text
    from nearpeak.render.markdown import markdown
    from nearpeak.render.text import text
    from nearpeak.render.views.timing import document

    timing = made_up_timing(name)
    yield "timing", text(document(timing)), text_structure
    yield "timing .md", markdown(document(timing)), markdown_structure
    yield "timing .csv", csv_text(document(timing)), csv_structure
    yield "timing notebook", notebook.card(timing), html_structure


def _plan_outputs(config: dict[str, Any], name: str) -> Iterator[tuple[str, str, Callable[[str], Any]]]:
    from nearpeak.plan.models.config import from_config
    from nearpeak.render.html.document import document_page
    from nearpeak.render.markdown import markdown
    from nearpeak.render.text import text
    from nearpeak.render.views.plan.catalogue import model_document

    made = model_document(dataclasses.replace(from_config(config), name=f"{name}model", source=f"{name}source"))
    yield "plan", text(made), text_structure
    yield "plan .md", markdown(made), markdown_structure
    yield "plan .html", document_page(made), html_structure


def _fail(measured_test: Any, made: Any) -> None:
    bars = measured_test.bars_from_markers([((), {"step_time": 1e-9, "no_finding_above": 0.0})])
    print(measured_test.printable(measured_test.failure_message(made, measured_test.judge(made, bars))))


def _printed(function: Callable[[], object]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), contextlib.suppress(SystemExit):
        function()
    return out.getvalue()


def problems(name: str, harmless: dict[str, Any], folder: Path) -> Iterator[tuple[str, str]]:
    """What is wrong with the outputs for a name: which output, and why."""
    for number, (what, text, structure) in enumerate(outputs(name, folder)):
        unseen = _UNSEEN.search(text.replace("\r\n", "\n"))
        if unseen:
            yield what, f"{unseen[0]!r} in {text[max(0, unseen.start() - 40) : unseen.end() + 20]!r}"
        if "Traceback" in text or "internal error" in text:
            yield what, text[-300:]
        try:
            found = structure(text)
        except (ValueError, ElementTree.ParseError, csv.Error) as error:
            yield what, str(error)
            continue
        if found != harmless.setdefault(f"{number} {what}", found):
            expected = harmless[f"{number} {what}"]
            if isinstance(found, list):
                added = Counter(map(str, found)) - Counter(map(str, expected))
                yield what, f"structure: {added.most_common(3)} of {len(found)}, expected {len(expected)}"
            else:
                yield what, f"structure: {found}, expected {expected}"


def main() -> int:
    """Run, print what is wrong, and write the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    wrong: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        os.chdir(folder)
        harmless: dict[str, Any] = {}
        for name in (HARMLESS, *draw_names(arguments.seed, arguments.count)):
            for what, why in problems(name, harmless, folder):
                wrong[what] += 1
                print(f"{name[:60]!r}: {what}: {why[:300]}", flush=True)
    print(f"{arguments.count} names in {len(harmless)} outputs each, {wrong.total()} problems")
    if arguments.json:
        data = {"seed": arguments.seed, "count": arguments.count, "outputs": len(harmless), "problems": wrong}
        Path(arguments.json).write_text(json.dumps(data, indent=1) + "\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
