"""Says whether two commits compile the same kernels and print the same figures.

    python tests/compare_commits.py OLD NEW [--only ptx|figures]

Both commits are checked out. In each, every launch that the compile tests know (`tests/kernels/sm90/`) is compiled for
compute capability 9.0, and every command of `COMMANDS` is run. The script compares the PTX, without the names of
functions, and the numbers in what the commands write. Names, words and the order of rows may differ. It exits with 1
where anything else does.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

DATA = Path(__file__).parent / "data"
TRACES = ("kineto_eager.json.gz", "kineto_compiled.json.gz")
SAVED = "saved.json.gz"
"""A profile that the old commit saves and both commits read."""
COMMANDS = {
    **{f"profile of {name}": ["profile", "--trace", f"{{data}}/{name}", "--on", "h200-sxm"] for name in TRACES},
    **{
        f"saved profile as {form}": ["report", f"{{scratch}}/{SAVED}", "-o", f"{{out}}/report.{form}"]
        for form in ("txt", "md", "csv", "svg")
    },
    **{
        f"difference{option}": ["diff", f"{{scratch}}/{SAVED}", "{data}/kineto_compiled.json.gz", *option.split()]
        for option in ("", " --markdown")
    },
    **{
        f"estimate of {case}": ["estimate", f"{{tree}}/examples/cases.py:{case}", "--on", machine]
        for case, machine in (("transformer_layer", "h100-sxm"), ("softmax", "a100-sxm-80gb"))
    },
    "machine": ["machine", "h100-sxm"],
    "plan train": ["plan", "train", "llama-3-70b", "--on", "h100-sxm x 64"],
    "plan serve": ["plan", "serve", "llama-3-70b", "--on", "h100-sxm x 8"],
    "plan memory": ["plan", "memory", "llama-3-8b", "--on", "h100-sxm x 8"],
    "plan collectives": ["plan", "collectives", "--on", "h100-sxm x 16"],
    "plan validate": ["plan", "validate", "{tree}/benchmarks/measurements/measured_collectives.csv"],
}
NUMBER = re.compile(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?(?![\w.-]*[A-Za-z_]\d)")


def normalized(ptx: str) -> str:
    """PTX without comments, and with functions numbered in the order in which they are defined."""
    ptx = re.sub(r"//.*", "", ptx)
    functions = re.findall(r"\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$.]+)", ptx)
    for number, name in enumerate(dict.fromkeys(functions)):
        ptx = re.sub(rf"(?<![\w$]){re.escape(name)}(?=\b|_param)", f"function_{number}", ptx)
    return "\n".join(line.strip() for line in ptx.splitlines() if line.strip())


def compile_all(tree: Path) -> list[dict[str, str]]:
    """Runs in a process of its own, which imports the commit's code."""
    import triton

    hashes: list[str] = []
    compile_kernel = triton.compile

    def compile_and_hash(*args, **kwargs):
        result = compile_kernel(*args, **kwargs)
        hashes.append(hashlib.sha256(normalized(result.asm["ptx"]).encode()).hexdigest()[:16])
        return result

    triton.compile = compile_and_hash
    script = tree / "tests" / "compile_for_sm90.py"
    spec = importlib.util.spec_from_file_location("compile_for_sm90", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def described(kernel, args, warps, stages, registers=None):
        module.compiled(kernel, args, warps, stages, registers)
        return {"kernel": kernel.__name__, "ptx": hashes[-1]}

    module.described = described
    files = sorted((tree / "tests" / "kernels" / "sm90").glob("*.py"))
    sys.argv = [str(script), *map(str, files)]
    module.main()
    return []


def in_checkout(commit: str, scratch: Path, only: str | None) -> dict[str, object]:
    """What a commit compiles and prints."""
    tree = scratch / re.sub(r"\W", "_", commit)
    subprocess.run(["git", "worktree", "add", "--detach", "--quiet", str(tree), commit], check=True)
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "COLUMNS")}
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(tree / "src"), str(tree / "tests")]),
        "TRITON_DISABLE_LINE_INFO": "1",
        "TRITON_CACHE_DIR": str(scratch / f"triton_{tree.name}"),
        "NEARPEAK_CACHE_DIR": str(scratch / f"cache_{tree.name}"),
    }
    try:
        results: dict[str, object] = {}
        if only != "figures":
            command = [sys.executable, __file__, "--compile", str(tree)]
            done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
            results["ptx"] = json.loads(done.stdout)
        if only != "ptx":
            saved = scratch / SAVED
            if not saved.exists():
                save = ["profile", "--trace", f"{{data}}/{TRACES[0]}", "--on", "h200-sxm", "--save", str(saved)]
                figures(save, tree, scratch, environment)
            results["figures"] = {
                name: figures(command, tree, scratch, environment) for name, command in COMMANDS.items()
            }
        return results
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(tree)], check=True)


def figures(command: list[str], tree: Path, scratch: Path, environment: dict[str, str]) -> list[str]:
    """The numbers that a command prints and writes, or its error."""
    with tempfile.TemporaryDirectory() as out:
        words = [word.format(data=DATA, tree=tree, scratch=scratch, out=out) for word in command]
        run = [sys.executable, "-m", "nearpeak", *words]
        done = subprocess.run(run, env=environment, cwd=tree, capture_output=True, text=True, check=False)
        if done.returncode:
            return [f"exit {done.returncode}: {done.stderr.strip()[-300:]}"]
        return NUMBER.findall("\n".join([done.stdout, *(path.read_text() for path in sorted(Path(out).iterdir()))]))


def differences(old: dict[str, object], new: dict[str, object]) -> list[str]:
    lines = []
    if "ptx" in old:
        before = collections.Counter(launch["ptx"] for launch in old["ptx"])
        after = collections.Counter(launch["ptx"] for launch in new["ptx"])
        print(f"PTX: {before.total()} launches, {len(before)} different kernels; then {after.total()} and {len(after)}")
        for launches, missing in ((old["ptx"], before - after), (new["ptx"], after - before)):
            side = "old" if launches is old["ptx"] else "new"
            lines += [
                f"only in {side}: {launch['file']}: {launch['name']} ({launch['kernel']})"
                for launch in launches
                if launch["ptx"] in missing
            ]
    for name, before in old.get("figures", {}).items():
        after = new["figures"][name]
        print(f"{name}: {len(before)} figures, then {len(after)}")
        lines += [f"{name}: {text}" for text in (*before, *after) if text.startswith("exit")]
        changed = collections.Counter(before), collections.Counter(after)
        if changed[0] != changed[1]:
            gone, come = changed[0] - changed[1], changed[1] - changed[0]
            lines.append(f"{name}: gone {sorted(gone.elements())[:20]}, new {sorted(come.elements())[:20]}")
    return lines


def main() -> int:
    if sys.argv[1:2] == ["--compile"]:
        compile_all(Path(sys.argv[2]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--only", choices=("ptx", "figures"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        old, new = (in_checkout(commit, Path(scratch), options.only) for commit in (options.old, options.new))
    lines = differences(old, new)
    print("\n".join(lines) if lines else "the same")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
