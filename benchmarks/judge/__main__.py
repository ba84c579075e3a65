"""What the judge catches, and whom it accuses: exploits, planted bugs and honest candidates.

    python -m benchmarks.judge exploits            # every file of exploits/: caught, and by which name
    python -m benchmarks.judge bugs                # every function of bugs/
    python -m benchmarks.judge honest --limit 40   # functions x sizes x dtypes, none of which may be accused
    python -m benchmarks.judge tasks               # softmax, a product with an epilogue, attention; pages with --pages

Each prints a line per judgement and a summary; --json FILE has the lines. --jobs N judges N at once, for which a GPU
needs no turns as long as no times are asked for.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import datetime
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One candidate of the corpus."""

    name: str
    candidate: str
    reference: str
    charges: tuple[str, ...] = ()
    """One of which it must get; none for an honest one."""
    known_wrong: tuple[str, ...] = ()
    """Charges of an honest one that is known to be wrong on this kind of device."""
    needs_gpu: bool = False
    needs_cpu: bool = False
    needs: str | None = None
    """A package that may not be installed."""
    needs_python: tuple[int, ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()
    inputs: str | None = None


def constants_of(path: Path) -> dict[str, Any]:
    """The constants at the top of a file, from its text."""
    constants = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.isupper():
            constants[node.targets[0].id] = ast.literal_eval(node.value)
    return constants


def exploits() -> list[Entry]:
    """Every file of `exploits`."""
    entries = []
    for path in sorted((ROOT / "exploits").glob("*.py")):
        constants = constants_of(path)
        reference = constants["REFERENCE"]
        entries.append(
            Entry(
                name=path.stem,
                candidate=f"{path}:{reference}",
                reference=f"{ROOT / 'references' / reference}.py:{reference}",
                charges=constants["CHARGES"],
                needs_gpu=constants.get("NEEDS_GPU", False),
                needs_cpu=constants.get("NEEDS_CPU", False),
                needs_python=constants.get("NEEDS_PYTHON", ()),
            )
        )
    return entries


def bugs() -> list[Entry]:
    """Every public function of the files of `bugs`; a file has one reference, or each name has it and the inputs."""
    entries = []
    for path in sorted((ROOT / "bugs").glob("*.py")):
        only = constants_of(path).get("REFERENCE")
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                reference, draw = (only, None) if only else node.name.split("__")[:2]
                file = ROOT / "references" / f"{reference}.py"
                entries.append(
                    Entry(
                        name=f"{path.stem}.{node.name}",
                        candidate=f"{path}:{node.name}",
                        reference=f"{file}:{reference}",
                        charges=("wrong",),
                        inputs=draw and f"{file}:{draw}",
                    )
                )
    return entries


def honest() -> list[Entry]:
    """Candidates of `honest`, at all sizes and dtypes of their references."""
    entries = []
    for path in sorted((ROOT / "honest").glob("*.py")):
        supported, wrong_on_gpu = (constants_of(path).get(name) for name in ("INPUTS", "WRONG_ON_GPU"))
        for name in _candidates_in(path):
            reference, _, _ = name.partition("__")
            file = ROOT / "references" / f"{reference}.py"
            constants = constants_of(file)
            for sizes in constants["SIZES"]:
                for draw in supported or constants["INPUTS"]:
                    entries.append(
                        Entry(
                            name=f"{path.stem}.{name} {draw} {sizes}",
                            candidate=f"{path}:{name}",
                            reference=f"{file}:{reference}",
                            known_wrong=(wrong_on_gpu or {}).get(name, ()),
                            needs_gpu=path.stem in ("nearpeak_kernels", "liger_kernels"),
                            needs="liger_kernel" if path.stem == "liger_kernels" else None,
                            sizes=tuple(sizes.items()),
                            inputs=f"{file}:{draw}",
                        )
                    )
    # Neighbors in the list differ in everything, so that a part of it is a sample.
    return [entry for start in range(17) for entry in entries[start::17]]


def _candidates_in(path: Path) -> Iterator[str]:
    """Functions of a file, and what it assigns, whose names begin with that of a reference."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            names = [node.name]
        else:
            targets = node.targets if isinstance(node, ast.Assign) else []
            names = [target.id for target in targets if isinstance(target, ast.Name)]
        yield from (name for name in names if not name.startswith("_") and not name.isupper())


def tasks() -> list[Entry]:
    """Three tasks as contests pose them."""
    names = ("softmax", "matmul", "attention")
    return [
        Entry(
            name=name,
            candidate=f"{ROOT / 'tasks' / name}.py:{name}",
            reference=f"{ROOT / 'references' / name}.py:{name}",
        )
        for name in names
    ]


CORPORA = {"exploits": exploits, "bugs": bugs, "honest": honest, "tasks": tasks}


def judged(entries: list[Entry], arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each entry."""
    import torch

    from nearpeak.judging.judge import judge
    from nearpeak.render.html.document import document_page
    from nearpeak.render.results import document_of

    has_gpu = torch.cuda.is_available()
    start = time.monotonic()
    for entry in entries:
        if (
            (entry.needs_gpu and not has_gpu)
            or (entry.needs_cpu and has_gpu)
            or entry.needs_python > sys.version_info[:2]
        ):
            continue
        if entry.needs and importlib.util.find_spec(entry.needs) is None:
            continue
        if time.monotonic() - start > arguments.seconds:
            return
        if arguments.claims and not _claim(Path(arguments.claims) / entry.name.replace("/", "_")):
            continue
        options = {"sizes": [dict(entry.sizes)]} if entry.sizes else {}
        row: dict[str, Any] = {"name": entry.name, "expected": entry.charges}
        row["must_be_timed"] = arguments.corpus == "tasks"
        row["known_wrong"] = entry.known_wrong if has_gpu else ()
        try:
            judgement = judge(
                entry.candidate,
                against=entry.reference,
                inputs=entry.inputs,
                timeout=30,
                max_seconds=arguments.max_seconds,
                compile_reference=arguments.corpus == "tasks",
                timed=arguments.corpus != "bugs" and not arguments.no_times,
                **options,
            )
        except Exception as error:
            yield {**row, "error": f"{type(error).__name__}: {error}", "charges": [], "seconds": 0.0}
            continue
        if arguments.pages:
            page = Path(arguments.pages) / f"{arguments.corpus}_{entry.name.replace(' ', '_')[:60]}.html"
            page.write_text(document_page(document_of(judgement)), encoding="utf-8")
            print(judgement.report())
        yield {
            **row,
            "charges": [charge.name for charge in judgement.charges],
            "evidence": [charge.evidence for charge in judgement.charges],
            "right": judgement.is_right,
            "honest": judgement.is_honest,
            "undecided": judgement.is_undecided,
            "refused": len(judgement.refusals),
            "checks": len(judgement.checks),
            "speedups": judgement.speedups,
            "notes": judgement.notes,
            "seconds": judgement.seconds,
        }


def _claim(path: Path) -> bool:
    """Whether nobody else judges this entry."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def judged_at_once(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows from several processes, each of which takes the next entry that nobody has taken."""
    options = ["--only", arguments.only, "--limit", str(arguments.limit), "--start", str(arguments.start)]
    options += ["--seconds", str(arguments.seconds), "--max-seconds", str(arguments.max_seconds)]
    options += ["--part", arguments.part, *(["--no-times"] if arguments.no_times else [])]
    # Compilers that each start a process per processor would wait for one another.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="claims-") as folder:
        command = [sys.executable, "-m", "benchmarks.judge", arguments.corpus, "--claims", folder, *options]
        files = [Path(folder) / f"part-{i}.json" for i in range(arguments.jobs)]
        processes = [
            subprocess.Popen([*command, "--json", str(file)], stdout=subprocess.DEVNULL, env=environment)
            for file in files
        ]
        taken = [0] * len(files)
        while True:
            is_over = all([process.poll() is not None for process in processes])
            for i, file in enumerate(files):
                with contextlib.suppress(OSError, ValueError):  # it is not there yet, or is being written
                    rows = json.loads(file.read_text(encoding="utf-8"))
                    yield from rows[taken[i] :]
                    taken[i] = len(rows)
            if is_over:
                return
            time.sleep(0.5)


def _write(path: Path, arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """The rows with the machine and the date; the rows alone for the process that collects those of several."""
    if arguments.claims:
        content: Any = rows
    else:
        import torch

        from nearpeak.machines.detect import detect_cpu

        where = {
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else detect_cpu().name,
            "date": datetime.date.today().isoformat(),
            "torch": torch.__version__,
            "command": " ".join(["python -m benchmarks.judge", *_without_file(sys.argv[1:])]),
        }
        content = {**where, "rows": rows}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _without_file(options: list[str]) -> list[str]:
    """Options without the file that the results go to."""
    place = options.index("--json") if "--json" in options else len(options)
    return options[:place] + options[place + 2 :]


def is_met(row: dict[str, Any]) -> bool:
    """Whether a judgement is what was expected of it."""
    if "error" in row:
        return False
    if "wrong" in row["expected"]:
        return not row["right"] or bool(row["charges"])
    if row["expected"]:
        return bool(set(row["expected"]) & set(row["charges"]))
    if row.get("must_be_timed") and row["undecided"]:
        return False
    return set(row["charges"]) <= set(row.get("known_wrong", ()))


def state_of(row: dict[str, Any]) -> str:
    """A word for the outcome; an honest candidate may be wrong, where that is known of it."""
    if not is_met(row):
        return "MISS"
    return "undecided" if row.get("undecided") else "ok" if row["expected"] or not row["charges"] else "known wrong"


def main() -> int:
    """Judges a corpus."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", choices=CORPORA)
    parser.add_argument("--only", default="", help="entries whose name contains this")
    parser.add_argument("--limit", type=int, default=10_000)
    parser.add_argument("--part", default="0/1", metavar="I/N", help="every N-th entry from the I-th on: N at once")
    parser.add_argument("--start", type=int, default=0, metavar="N", help="leave out the first N entries")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="judge N at once")
    parser.add_argument("--claims", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no judgement after this time")
    parser.add_argument("--max-seconds", type=float, default=3.0)
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--pages", metavar="DIR")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    entries = [entry for entry in CORPORA[arguments.corpus]() if arguments.only in entry.name]
    rows = []
    part, parts = (int(number) for number in arguments.part.split("/"))
    entries = entries[arguments.start :][part::parts][: arguments.limit]
    for row in judged_at_once(arguments) if arguments.jobs > 1 else judged(entries, arguments):
        rows.append(row)
        print(
            f"{state_of(row):4}", row["name"], row.get("error") or row["charges"], f"{row['seconds']:.1f} s", flush=True
        )
        if not is_met(row):
            print("     ", row.get("evidence"), row.get("notes"), flush=True)
        if arguments.json:
            _write(Path(arguments.json), arguments, rows)
    if arguments.corpus == "honest":
        honest_rows, right_rows = (sum(bool(row.get(name)) for row in rows) for name in ("honest", "right"))
        known, undecided = (sum(state_of(row) == word for row in rows) for word in ("known wrong", "undecided"))
        print(f"honest {honest_rows}, right {right_rows}, known to be wrong {known}, undecided {undecided}")
    met = sum(map(is_met, rows))
    durations = sorted(row["seconds"] for row in rows) or [0.0]
    word = {"exploits": "caught and named", "bugs": "found", "honest": "not accused", "tasks": "accepted"}
    print(
        f"{arguments.corpus}: {met} of {len(rows)} {word[arguments.corpus]}; "
        f"{durations[len(durations) // 2]:.1f} s per judgement in the median, {durations[-1]:.1f} s at most"
    )
    return 0 if met == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
