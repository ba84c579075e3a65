"""Writes the pages of the gallery, docs/gallery.md and docs/gallery/*.md, from results of `nearpeak gallery --json`.

    nearpeak gallery --json benchmarks/results/gallery_xeon.json
    python -m benchmarks.pages.gallery benchmarks/results/gallery_h200.json benchmarks/results/gallery_xeon.json

A page has a section for each machine, in the order in which the files are given.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from nearpeak._records import from_json
from nearpeak.gallery import NAMES, pages, run
from nearpeak.gallery.parts import ExampleResult
from nearpeak.render import markdown as md
from nearpeak.units import seconds

DOCS = Path(__file__).resolve().parents[2] / "docs"
BEFORE, AFTER = "<!-- examples -->\n", "<!-- end of examples -->\n"


def load(path: Path) -> dict[str, ExampleResult]:
    """The results of a file, by the names of their examples."""
    results = [from_json(ExampleResult, one) for one in json.loads(path.read_text(encoding="utf-8"))]
    return {one.name: one for one in results}


def page(name: str, results: Sequence[ExampleResult], pictures: Path) -> str:
    """The page of one example; its pictures are written to a folder beside it."""
    title, lesson = run.title_and_lesson(name)
    parts = [
        f"# {NAMES.index(name) + 1}. {md.escape_text(title)}",
        md.escape_text(lesson, 4000),
        f"The figures are those of `nearpeak gallery {name}`, which runs on your machine as well; `--source` shows the"
        " script.",
    ]
    for number, result in enumerate(results):

        def kept(picture: str, svg: str, number: int = number) -> str:
            pictures.mkdir(parents=True, exist_ok=True)
            (pictures / f"{picture}-{number}.svg").write_text(svg, encoding="utf-8")
            return f"{pictures.name}/{picture}-{number}.svg"

        parts += [f"## On {md.escape_text(result.machine)}", pages.markdown(result, kept).rstrip()]
    return "\n\n".join(parts) + "\n"


def listed(results: Sequence[dict[str, ExampleResult]]) -> str:
    """All examples: what each machine took, and how many predictions held."""
    machines = [next(iter(one.values())).machine for one in results]
    rows = []
    for number, name in enumerate(NAMES, 1):
        cells = [f"{number}", f"[{md.escape_text(run.title_and_lesson(name)[0])}](gallery/{name}.md)"]
        for one in results:
            result = one.get(name)
            cells.append("-" if result is None else f"{_held(result)} ({seconds(result.seconds)})")
        rows.append(cells)
    return md.table(["", "example", *(f"held on {machine}" for machine in machines)], rows, "rl" + "r" * len(machines))


def _held(result: ExampleResult) -> str:
    judged = [row for row in result.rows if row.holds is not None]
    return f"{len(judged) - len(result.missed)} of {len(judged)}" if judged else "-"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="+", type=Path, help="what nearpeak gallery --json wrote, by machine")
    parser.add_argument("--docs", type=Path, default=DOCS, help="the folder of the documentation")
    arguments = parser.parse_args()
    results = [load(path) for path in arguments.results]
    folder = arguments.docs / "gallery"
    folder.mkdir(exist_ok=True)
    for name in NAMES:
        of_example = [one[name] for one in results if name in one]
        (folder / f"{name}.md").write_text(page(name, of_example, folder / "images"), encoding="utf-8")
    index = arguments.docs / "gallery.md"
    head, _, rest = index.read_text(encoding="utf-8").partition(BEFORE)
    index.write_text(f"{head}{BEFORE}\n{listed(results)}\n\n{AFTER}{rest.partition(AFTER)[2]}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
