"""Real files with drawn mutations, given to the commands that read them: each must give a result or one clear error.

    export PYTHONPATH=src
    python -m benchmarks.robustness.files --seed 7 --count 2000 --json benchmarks/results/mutated_files.json
    python -m benchmarks.robustness.files --seed 7 --only 123    # one file again, with what it printed

The files are those of tests/data and of the package, and what nearpeak saves of them: traces, profiles, results,
baselines of tests, calibrations, the catalogues of machines and systems, configs of models and tables of measurements.
A process reads many files, one after the other. It is ended where a file takes more than 10 s of its processor's time,
or a minute, and its memory is read after each of them.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import gzip
import io
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
PACKAGE = ROOT / "src" / "nearpeak"
LONGEST_S = 10.0
LONGEST_WAIT_S = 60.0
LARGEST_BYTES = 2 * 2**30
FAILURES = ("internal error", "traceback", "hang", "memory", "escape", "several messages", "unnamed file")
"""Outcomes that must not be."""
CASE = "def case(): return (lambda: None)\n"

NESTED: Any = 0
for _ in range(300):
    NESTED = [NESTED]
RAW = {"@1e999@": "1e999", "@-1e999@": "-1e999", "@digits@": "9" * 5000, "@deep@": "[" * 3000 + "]" * 3000}
"""Values that Python does not write as JSON, by the text that stands for them."""
HOSTILE: tuple[Any, ...] = (
    *(0, -1, 1, 0.0, -0.5, 1e-320, 1e30, 1e308, -1e308, 2**31, 2**63, 2**64, -(2**63), 10**40, 10**400),
    *(float("nan"), float("inf"), float("-inf"), None, True, False, "", " ", "0", "nan", "1e999", "x" * 5000, "-1"),
    *("\x1b[31mred", "\u202eright", "</script><b>", "\ud800", "\x00", "=1+1", "../../etc/passwd", "a\nb", "%s%n{}{0}"),
    *(
        [],
        {},
        [[]],
        [{}],
        [None],
        {"": ""},
        [1, "a", None],
        [-1, -1],
        [10**30, 3],
        {"values": [], "index": [0]},
        NESTED,
    ),
    *RAW,
)


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to all values inside of some data."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def mutate_data(data: Any, draw: random.Random) -> Any:
    """The data with one to four values replaced, removed, renamed, repeated, moved or scaled."""
    data = copy.deepcopy(data)
    for _ in range(draw.choice((1, 1, 1, 1, 2, 4))):
        every = list(places(data))
        if not every:
            return draw.choice(HOSTILE)
        shallow = [path for path in every if len(path) <= 3]
        path = draw.choice(shallow if shallow and draw.random() < 0.5 else every)
        owner = functools.reduce(lambda inner, key: inner[key], path[:-1], data)
        key = path[-1]
        value = owner[key]
        kind = draw.choice(
            (
                "replace",
                "replace",
                "like",
                "like",
                "like",
                "remove",
                "rename",
                "repeat",
                "move",
                "scale",
                "jitter",
                "add",
            )
        )
        if kind == "remove":
            del owner[key]
        elif kind == "rename" and isinstance(owner, dict):
            owner[draw.choice((f"{key}x", "\x1b[2J", "", str(key).upper()))] = owner.pop(key)
        elif kind == "repeat" and isinstance(owner, list):
            owner[key:key] = [value] * draw.choice((1, 2, 1000))
        elif kind == "move":
            other = draw.choice(every)
            with contextlib.suppress(LookupError, TypeError):
                owner[key] = copy.deepcopy(functools.reduce(lambda inner, each: inner[each], other, data))
        elif kind == "like":
            owner[key] = copy.deepcopy(draw.choice([each for each in HOSTILE if type(each) is type(value)] or [value]))
        elif kind == "jitter" and isinstance(value, (int, float)) and not isinstance(value, bool):
            owner[key] = type(value)(value * draw.choice((0, 0.5, 2, 100)))
        elif kind == "scale" and isinstance(value, (int, float)) and not isinstance(value, bool):
            owner[key] = value * draw.choice((-1, 0, 1e3, 1e-9, 1e12, 10**20))
        elif kind == "add" and isinstance(owner, dict):
            owner[draw.choice(("extra", "kind", "schema", "\u202e"))] = copy.deepcopy(draw.choice(HOSTILE))
        else:
            owner[key] = copy.deepcopy(draw.choice(HOSTILE))
    return data


def to_text(data: Any) -> str:
    """As JSON, with what JSON does not have."""
    text = json.dumps(data)
    for name, raw in RAW.items():
        text = text.replace(json.dumps(name), raw)
    return text


def mutate_bytes(content: bytes, other: bytes, draw: random.Random) -> bytes:
    """The content of a file damaged, cut off, joined with another, in another encoding, or in a damaged gzip file."""
    middle = draw.randrange(len(content) + 1)
    end = min(len(content), middle + draw.choice((1, 2, 40, 4000)))
    flipped = bytearray(content)
    for _ in range(draw.choice((1, 8, 200))):
        if flipped:
            flipped[draw.randrange(len(flipped))] = draw.randrange(256)
    packed = gzip.compress(content)
    damaged = bytearray(packed)
    damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
    ways: tuple[Callable[[], bytes], ...] = (
        lambda: content[:middle],
        lambda: content[:middle] + content[end:],
        lambda: content[:end] + content[middle:],
        lambda: content[:middle] + other[draw.randrange(len(other) + 1) :],
        lambda: bytes(flipped),
        lambda: (
            content[:middle]
            + draw.choice((b"\x00", b"\xff\xfe", b"{", b"]", b'"', b",", b"\\u", b"\x1b[31m"))
            + content[middle:]
        ),
        lambda: content[:middle] + b"[" * 100_000 + content[middle:],
        lambda: content.decode("utf-8", "replace").encode("utf-16"),
        lambda: b"\xef\xbb\xbf" + content,
        lambda: content.decode("utf-8", "replace").encode("latin-1", "replace") + b"\xe9",
        lambda: content * 2,
        lambda: b"",
        lambda: packed[: draw.randrange(len(packed))],
        lambda: bytes(damaged),
        lambda: packed + b"rest",
        lambda: gzip.compress(packed),
        lambda: gzip.compress(content + b" " * 50_000_000, 1),
        lambda: b"\x1f\x8b" + content,
    )
    return draw.choice(ways)()


def mutate_text(text: str, draw: random.Random) -> str:
    """A table or a TOML file with values, cells and lines replaced, removed, repeated or joined."""
    lines = text.split("\n")
    for _ in range(draw.choice((1, 1, 2, 6))):
        number = draw.randrange(len(lines))
        line = lines[number]
        tokens = list(re.finditer(r"[^,=\s\[\]]+", line))
        kind = draw.choice(("value", "value", "value", "value", "remove", "repeat", "swap"))
        if kind == "value" and tokens:
            token = draw.choice(tokens)
            value = draw.choice(HOSTILE)
            written = draw.choice((str(value)[:6000], json.dumps(value)[:6000]))
            lines[number] = line[: token.start()] + written + line[token.end() :]
        elif kind == "remove":
            del lines[number]
            lines = lines or [""]
        elif kind == "repeat":
            lines.insert(number, line)
        else:
            other = draw.randrange(len(lines))
            lines[number], lines[other] = lines[other], line
    return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Kind:
    """Files of one kind: their contents, and what reads one."""

    contents: tuple[bytes, ...]
    is_json: bool
    read: Callable[[Path, random.Random, Path], int]
    """Given the file, a draw and a folder of its own; the exit code."""


def command(*arguments: str) -> int:
    """A command line in this process."""
    from nearpeak.cli.main import main

    try:
        return main(arguments)
    except SystemExit as end:  # argparse
        return int(end.code or 0)


def kinds(folder: Path) -> dict[str, Kind]:
    """All kinds; `folder` is for files that are made from those of the repository."""
    from nearpeak._records import to_json
    from nearpeak.machines import catalogue
    from nearpeak.machines.calibrations import CalibrationKey, path_of, save
    from nearpeak.measure.results import save as save_result
    from nearpeak.measure.timing import Sweep
    from nearpeak.profiles import file
    from nearpeak.profiling.load import load
    from nearpeak.pytest_plugin.measured_test import Baseline, BaselineFile

    traces = [gzip.decompress((DATA / f"kineto_{name}.json.gz").read_bytes()) for name in ("eager", "compiled")]
    saved = [file.to_bytes(load(DATA / f"kineto_{name}.json.gz"), compressed=False) for name in ("eager", "compiled")]
    saved.append((DATA / "profile_schema_2.json").read_bytes())
    good_profile = folder / "good.json"
    good_profile.write_bytes(saved[0])
    case = folder / "cases.py"
    case.write_text(CASE)
    timing = made_up_timing("")
    save_result(timing, folder / "timing.json")
    save_result(Sweep(name="case", parameters={"n": ("1",)}, timings=(timing,)), folder / "sweep.json")
    key = CalibrationKey(device="Made-up 1", driver="1.0", torch="2.0")
    known = catalogue.find("h200-sxm")
    measured = dataclasses.replace(known.achievable, how="measured")
    stored = save(dataclasses.replace(known, achievable=measured), key)
    baselines = BaselineFile(
        baselines=(
            Baseline(key=key, seconds=2.0, low=1.9, high=2.1, kind="step", date="2026-01-02", nearpeak="1"),
            Baseline(key=key, seconds=3e-3, low=1e-3, high=4e-3, kind="cpu", date="2026-01-02", nearpeak="1"),
        )
    )
    models = json.loads((PACKAGE / "plan/models/model_catalogue.json").read_text())["models"].values()
    tables = [path.read_text().split("\n") for path in sorted((ROOT / "benchmarks/measurements").glob("*.csv"))]

    def read_profile(path: Path, draw: random.Random, own: Path) -> int:
        ways = (
            lambda: command("report", str(path)),
            lambda: command("profile", "--trace", str(path), "--by", draw.choice(("op", "line", "module", "family"))),
            lambda: command("diff", str(good_profile), str(path), *draw.choice(((), ("--markdown",), ("--json", "-")))),
            lambda: command("diff", str(path), str(good_profile), "--fail-over", "3%"),
            lambda: command("report", str(path), *_outputs(own, (".html", ".md", ".csv", ".svg", ".perfetto.json"))),
            lambda: command("report", str(path), "-o", str(own / "out.svg"), "--picture", "roofline"),
            lambda: command("report", str(path), "--json", "-"),
        )
        return draw.choice(ways)()

    def read_trace(path: Path, draw: random.Random, own: Path) -> int:
        if draw.random() < 0.4:
            more = draw.choice(((), ("--intensities",), ("--groups",), ("--roofline", str(own / "out.svg"))))
            return command("estimate", "--trace", str(path), *more, *draw.choice(((), ("--on", "h100-sxm"))))
        return read_profile(path, draw, own)

    def read_run(path: Path, draw: random.Random, own: Path) -> int:
        with mock.patch.dict(os.environ, NEARPEAK_CACHE_DIR=str(own)):
            (own / "runs").mkdir()
            shutil.copyfile(path, own / "runs" / "2026-01-02T03-04-05.000000Z.json.gz")
            return command(*draw.choice((("profile", "--list"), ("report", "@last"))))

    def read_result(path: Path, draw: random.Random, own: Path) -> int:
        return command("bench", f"{case}:case", "--baseline", str(path), "--max-seconds", "0.01")

    def read_baseline(path: Path, draw: random.Random, own: Path) -> int:
        from nearpeak.pytest_plugin.measured_test import read_baselines

        return _called(lambda: [print(each) for each in read_baselines(path).baselines])

    def read_calibration(path: Path, draw: random.Random, own: Path) -> int:
        from nearpeak.machines import calibrations

        with mock.patch.dict(os.environ, NEARPEAK_CACHE_DIR=str(own)):
            path_of(key).parent.mkdir()
            shutil.copyfile(path, path_of(key))
            found = calibrations.load(key)
            calibrations.load_all()
        if isinstance(found, calibrations.UnusableFile):
            print(f"nearpeak: {path}: {found.reason}", file=sys.stderr)
            return 2
        return 0

    def read_catalogue(path: Path, draw: random.Random, own: Path) -> int:
        shutil.copyfile(path, own / "catalogue.toml")
        return _with_data(own, "nearpeak.machines.catalogue", ("machine", "--list"))

    def read_systems(path: Path, draw: random.Random, own: Path) -> int:
        shutil.copyfile(path, own / "clusters.toml")
        return _with_data(own, "nearpeak.plan.cluster.cluster", ("plan", "clusters"))

    def read_config(path: Path, draw: random.Random, own: Path) -> int:
        ways = (
            ("plan", "memory", str(path)),
            ("plan", "memory", str(path), "--on", "h100-sxm x 8", "-o", str(own / "out.html")),
            ("plan", "train", str(path), "--on", "h100-sxm x 8", "--tp", "2", "--json", "-"),
            ("plan", "serve", str(path), "--on", "h100-sxm x 8", "--tp", "8"),
        )
        return command(*draw.choice(ways))

    def read_table(path: Path, draw: random.Random, own: Path) -> int:
        return command(
            "plan", "validate", str(path), *draw.choice(((), ("--runs", str(ROOT / "benchmarks/measurements"))))
        )

    return {
        "trace": Kind(tuple(traces), True, read_trace),
        "profile": Kind(tuple(saved), True, read_profile),
        "kept run": Kind(tuple(saved), True, read_run),
        "result": Kind(
            tuple((folder / f"{name}.json").read_bytes() for name in ("timing", "sweep")), True, read_result
        ),
        "baseline": Kind((json.dumps(to_json(baselines)).encode(),), True, read_baseline),
        "calibration": Kind((stored.path.read_bytes(),), True, read_calibration),
        "catalogue": Kind(((PACKAGE / "machines/catalogue.toml").read_bytes(),), False, read_catalogue),
        "systems": Kind(((PACKAGE / "plan/cluster/clusters.toml").read_bytes(),), False, read_systems),
        "config": Kind(tuple(json.dumps(model["config"]).encode() for model in models), True, read_config),
        "table": Kind(tuple("\n".join(lines[:25]).encode() for lines in tables), False, read_table),
    }


def made_up_timing(name: str) -> Any:
    """A timing with a name in front of each of its texts."""
    from nearpeak.measure.timing import Block, Environment, Flag, Timing

    where = Environment(device=name, driver=name, torch=name, python=name, nearpeak=name, date=name, threads=1)
    return Timing(
        name=f"{name}case",
        seconds=1.0,
        low=0.9,
        high=1.1,
        confidence=0.95,
        kind="cpu",
        method=name,
        cache="cold",
        regime="sustained",
        blocks=(Block(seconds=1.0, readings=(0.9, 1.1)),),
        flags=(Flag(name=f"{name}FLAG", severity="doubt", evidence=name, remedy=name),),
        environment=where,
        parameters={f"{name}n": name},
        kernels=(name,),
    )


WEIGHTS = {"trace": 6, "profile": 6, "config": 3, "result": 2, "kept run": 2}
"""How many files of a kind are drawn for one of the others."""


NAMED = ("trace", "profile", "result", "baseline", "config", "table")
"""Kinds whose files are named on the command line; the others have a place of their own."""


def _outputs(own: Path, endings: Sequence[str]) -> list[str]:
    return [each for ending in endings for each in ("-o", str(own / f"out{ending}"))]


def _called(function: Callable[[], object]) -> int:
    from nearpeak.errors import NearpeakError

    try:
        function()
    except NearpeakError as error:
        from nearpeak.cli.output import narrate

        narrate(f"nearpeak: {error}")
        return error.exit_code
    return 0


def _with_data(own: Path, module: str, arguments: Sequence[str]) -> int:
    """A command with the data files of a module in another folder."""
    from nearpeak.machines import catalogue
    from nearpeak.plan.cluster import cluster

    caches = (catalogue.load, cluster.load_systems)
    for cache in caches:
        cache.cache_clear()
    try:
        with mock.patch(f"{module}.resources", SimpleNamespace(files=lambda package: own)):
            return command(*arguments)
    finally:
        for cache in caches:
            cache.cache_clear()


def draw_file(number: int, seed: int, known: dict[str, Kind], folder: Path) -> tuple[str, Path, random.Random]:
    """The file of a number: its kind, where it is, and the draw that goes on."""
    draw = random.Random(f"{seed} {number}")
    name = draw.choice([name for name in known for _ in range(WEIGHTS.get(name, 1))])
    kind = known[name]
    content = draw.choice(kind.contents)
    if draw.random() < 0.7:
        if kind.is_json:
            content = to_text(mutate_data(json.loads(content), draw)).encode("utf-8", "surrogatepass")
        else:
            content = mutate_text(content.decode(), draw).encode("utf-8", "surrogatepass")
    else:
        other = draw.choice(known[draw.choice(list(known))].contents)
        content = mutate_bytes(content, other, draw)
    path = folder / f"mutated{number}{'.json' if kind.is_json else '.txt'}"
    special = draw.random() if name in NAMED else 1.0
    if special < 0.01:
        path.mkdir()
    elif special < 0.02:
        os.mkfifo(path)
    elif special < 0.03:
        path.symlink_to(path)
    else:
        path.write_bytes(gzip.compress(content, 1) if draw.random() < 0.1 else content)
    return name, path, draw


def judge(name: str, path: Path, code: int, out: str, err: str, written: Sequence[Path]) -> str:
    """The outcome of one file."""
    if "Traceback (most recent call last)" in out + err:
        return "traceback"
    if code == 5:
        return "internal error"
    texts = [out, err, *(each.read_text(encoding="utf-8", errors="replace") for each in written)]
    if any(
        re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", text.replace("\r\n", "\n"))
        for text in texts
    ):
        return "escape"
    if code in (0, 1, 3):
        return "result"
    messages = [line for line in err.split("\n") if line.startswith("nearpeak: ")]
    if len(messages) != 1:
        return "several messages"
    package = {"catalogue": "catalogue.toml", "systems": "clusters.toml", "kept run": "Z.json.gz"}
    named = (path.name, package.get(name, path.name), path.parent.name if name == "config" else path.name)
    could_not_be_written = re.search(r"own\d+/out\.", messages[0])
    if not any(each in err for each in named) and not could_not_be_written:
        return "unnamed file"
    return "error"


def run_one(number: int, seed: int, known: dict[str, Kind], folder: Path) -> tuple[str, str, str]:
    """The kind of a file, its outcome, and what was printed to stderr."""
    own = folder / f"own{number}"
    own.mkdir()
    out, err = io.StringIO(), io.StringIO()
    name, path, draw = draw_file(number, seed, known, folder)
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = known[name].read(path, draw, own)
        except Exception:
            import traceback

            traceback.print_exc()
    outcome = judge(
        name, path, code, out.getvalue(), err.getvalue(), [each for each in own.glob("out*") if each.is_file()]
    )
    shutil.rmtree(own)
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink()
    return name, outcome, err.getvalue()


def work(seed: int, numbers: Sequence[int], channel: Connection) -> None:
    """A worker: reads one file after the other, and tells of each."""
    sys.set_int_max_str_digits(4300)
    with tempfile.TemporaryDirectory(prefix="nearpeak-mutated-") as name:
        folder = Path(name)
        os.environ["NEARPEAK_CACHE_DIR"] = str(folder / "cache")
        known = kinds(folder)
        with contextlib.redirect_stdout(io.StringIO()):
            command("bench", f"{folder / 'cases.py'}:case", "--max-seconds", "0.01")  # the first one measures the clock
        channel.send(("ready", None))
        for number in numbers:
            channel.send(("begin", number))
            started = time.process_time()
            kind, outcome, message = run_one(number, seed, known, folder)
            seconds = time.process_time() - started
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            if peak > LARGEST_BYTES:
                outcome = "memory"
            channel.send(("end", (number, kind, outcome, message, seconds, peak)))
        channel.send(("done", None))


def run(seed: int, numbers: Sequence[int]) -> Iterator[tuple[int, str, str, str, float, float]]:
    """Number, kind, outcome, message, seconds and peak memory of each file."""
    left = list(numbers)
    context = multiprocessing.get_context("spawn")
    while left:
        ours, theirs = context.Pipe(duplex=False)
        worker = context.Process(target=work, args=(seed, left[:250], theirs))
        worker.start()
        theirs.close()
        current: int | None = None
        used_before, begun = 0.0, time.monotonic()
        try:
            while True:
                if not ours.poll(1.0):
                    used, waited = _processor_seconds(worker.pid) - used_before, time.monotonic() - begun
                    if current is not None and (used > LONGEST_S or waited > LONGEST_WAIT_S):
                        yield current, "?", "hang", "", used, 0.0
                        break
                    continue
                what, value = ours.recv()
                if what == "begin":
                    current = value
                    used_before, begun = _processor_seconds(worker.pid), time.monotonic()
                elif what == "end":
                    left.remove(current)
                    current = None
                    yield value
                elif what == "done":
                    break
        except EOFError:
            yield current if current is not None else -1, "?", "traceback", "the process ended", 0.0, 0.0
        finally:
            if current is not None:
                left.remove(current)
            else:
                worker.join(30.0)  # it removes its folder
            worker.kill()
            worker.join()
            ours.close()


def _processor_seconds(process: int | None) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    """Run, print the table, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--only", type=int, help="the number of one file, which is run in this process")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    if arguments.only is not None:
        with tempfile.TemporaryDirectory() as name:
            os.environ |= {"NEARPEAK_CACHE_DIR": str(Path(name) / "cache"), "NEARPEAK_DEBUG": "1"}
            print(*run_one(arguments.only, arguments.seed, kinds(Path(name)), Path(name)), sep="\n")
        return 0
    table: dict[str, Counter[str]] = {}
    longest = peak = 0.0
    for number, kind, outcome, message, seconds, memory in run(arguments.seed, range(arguments.count)):
        table.setdefault(kind, Counter())[outcome] += 1
        longest, peak = max(longest, seconds), max(peak, memory)
        if outcome in FAILURES:
            print(f"{number} {kind}: {outcome}: {message.strip()[-300:]}", flush=True)
    for kind, counts in sorted(table.items()):
        print(f"{kind:12}", ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))
    print(f"longest {longest:.1f} s, peak {peak / 2**30:.2f} GiB")
    if arguments.json:
        data = {
            "seed": arguments.seed,
            "count": arguments.count,
            "longest_s": longest,
            "peak_bytes": peak,
            "table": table,
        }
        Path(arguments.json).write_text(json.dumps(data, indent=1) + "\n")
    return int(any(counts[outcome] for counts in table.values() for outcome in FAILURES))


if __name__ == "__main__":
    sys.exit(main())
