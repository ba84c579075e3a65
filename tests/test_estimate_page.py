"""The picture in docs/estimate.md is what the command beside it draws."""

from pathlib import Path

import pytest
import torch

from nearpeak.cli.main import main

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "estimate.md"
PICTURE = ROOT / "docs" / "images" / "roofline.svg"
COMMAND = "nearpeak estimate examples/cases.py:transformer_layer --on h100-sxm --roofline docs/images/roofline.svg"


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU torch chooses other operators than on the page")
def test_the_picture_is_that_of_the_command(tmp_path, monkeypatch):
    assert COMMAND in PAGE.read_text(encoding="utf-8")
    monkeypatch.chdir(ROOT)
    verb, case, *options = COMMAND.split()[1:-1]
    drawn = tmp_path / "roofline.svg"
    assert main([verb, case, *options, str(drawn)]) == 0
    assert drawn.read_text(encoding="utf-8") == PICTURE.read_text(encoding="utf-8"), f"run `{COMMAND}`"
