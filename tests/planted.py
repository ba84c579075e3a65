"""The corpus: files with a planted waste, each as a module, and the line that is to be found."""

import importlib.util
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
CASES = sorted(path.stem for path in CORPUS.glob("*.py"))


def load(name):
    """A file of the corpus as a module."""
    spec = importlib.util.spec_from_file_location(f"corpus_{name}", CORPUS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def planted(name):
    """The line with the comment "# waste", as findings name it; None where a step as a whole is to blame."""
    lines = (CORPUS / f"{name}.py").read_text(encoding="utf-8").splitlines()
    return next((f"{name}.py:{number}" for number, line in enumerate(lines, 1) if line.endswith("# waste")), None)
