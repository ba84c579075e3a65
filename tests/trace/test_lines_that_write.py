"""Where files of the user's own set options, by their syntax."""

import sys
import types

import pytest

from nearpeak.trace import source
from nearpeak.trace.source import COLLATE, lines_that_write

SCRIPT = """\
import torch
from torch.utils.data import DataLoader

torch.backends.cudnn.benchmark = True
torch.backends.cudnn.benchmark = False
# DataLoader(dataset)
loader = DataLoader(
    dataset, 8
)
tables = [torch.nn.EmbeddingBag(rows, 64) for rows in sizes]
optimizer = torch.optim.AdamW(model.parameters())
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A module that is imported under a name that no other file has."""
    path = tmp_path / "lines_of_a_script.py"
    path.write_text(SCRIPT)
    module = types.ModuleType("lines_of_a_script")
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "lines_of_a_script", module)
    monkeypatch.setattr(source, "_MAX_PARSED_FILES", sys.maxsize)  # there are hundreds of tests before it
    return path


def of_script(names):
    written = lines_that_write(names)
    return {
        name: [line for line in lines if line.startswith("lines_of_a_script.py")] for name, lines in written.items()
    }


def test_calls_and_settings_have_their_first_lines(script):
    found = of_script({"DataLoader", "EmbeddingBag", "AdamW"})
    assert found["cudnn.benchmark"] == ["lines_of_a_script.py:4"]
    assert found["DataLoader"] == ["lines_of_a_script.py:7"]
    assert found["EmbeddingBag"] == ["lines_of_a_script.py:10"]
    assert found["AdamW"] == ["lines_of_a_script.py:11"]


def test_the_padding_of_a_data_loader_is_where_its_function_makes_the_batch(script):
    script.write_text(
        "def collate(items, longest):\n"
        "    lengths = torch.tensor([len(item) for item in items])\n"
        "    batch = torch.zeros(len(items), longest)\n"
        "    return F.pad(batch, (0, 1)), lengths\n"
        "\n"
        "def other(items):\n"
        "    return torch.zeros(3)\n"
        "\n"
        "loader = DataLoader(dataset, collate_fn=functools.partial(collate, longest=512))\n"
    )
    assert of_script({COLLATE})[COLLATE] == ["lines_of_a_script.py:3"]


def test_classes_that_nobody_asks_for_are_not_searched(script):
    assert set(of_script({"AdamW"})) <= {"cudnn.benchmark", "AdamW"}


def test_modules_that_import_on_demand_are_left_alone(script, monkeypatch):
    class Lazy(types.ModuleType):
        def __getattr__(self, name):
            raise ImportError(name)

    monkeypatch.setitem(sys.modules, "lazy_of_a_script", Lazy("lazy_of_a_script"))
    assert of_script({"AdamW"})["AdamW"] == ["lines_of_a_script.py:11"]


def test_a_file_that_is_no_python_is_left_out(script):
    script.write_text("%time AdamW(model)\n")
    assert not of_script({"AdamW"}).get("AdamW")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("torch.autograd.set_detect_anomaly(True)", {"set_detect_anomaly"}),
        ("torch.autograd.set_detect_anomaly(looks)", {"set_detect_anomaly"}),
        ("torch.autograd.set_detect_anomaly(False)", set()),
        ("Trainer(model, detect_anomaly=True)", {"detect_anomaly"}),
        ("Trainer(model, detect_anomaly=False)", set()),
        ('os.environ["CUDA_LAUNCH_BLOCKING"] = "1"', {"CUDA_LAUNCH_BLOCKING"}),
        ('os.environ["CUDA_LAUNCH_BLOCKING"] = "0"', set()),
        ('os.environ.setdefault("CUDA_LAUNCH_BLOCKING", "1")', {"CUDA_LAUNCH_BLOCKING"}),
        ('print("CUDA_LAUNCH_BLOCKING")', set()),
    ],
)
def test_settings_are_where_they_are_turned_on(script, text, names):
    script.write_text(f"{text}\n")
    found = of_script({"set_detect_anomaly", "detect_anomaly", "CUDA_LAUNCH_BLOCKING"})
    assert {name for name, lines in found.items() if lines} == names
