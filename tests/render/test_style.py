import pytest

from nearpeak.render.text import Style


@pytest.mark.parametrize(
    ("columns", "bar"), [(0.0, ""), (-3.0, ""), (0.01, "▏"), (1.0, "█"), (1.5, "█▌"), (2.99, "███"), (1.9, "█▉")]
)
def test_blocks_show_eighths(columns, bar):
    assert Style(blocks=True).bar(columns) == bar


def test_plain_bars_are_ascii():
    assert Style().bar(2.6) == "###"
    assert Style().bar(0.2) == ""


def test_nothing_is_painted_without_color():
    assert Style().paint("x", "red") == "x"
    assert Style(color=True).paint("", "red") == ""
    assert Style(color=True).paint("x", "bold") == "\x1b[1mx\x1b[0m"
