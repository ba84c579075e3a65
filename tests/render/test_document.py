import csv
import io

from nearpeak.render.csv import csv_text
from nearpeak.render.document import CodeBlock, Document, Paragraph, Picture, Table
from nearpeak.render.markdown import markdown
from nearpeak.render.text import Style, text

MADE = Document(
    title="A plan",
    facts=("one fact",),
    parts=(
        Table(
            title="Parts",
            headers=("part", "GB"),
            rows=(("weights", "13.5"), ("=cmd|' /C calc'!A0", "-"), ("all", "-1.5 %")),
            bars=(1.0, 0.25),
            totals=1,
        ),
        Paragraph(text="Does not fit.", kind="bad"),
        Picture(title="A picture", svg="<svg></svg>"),
    ),
)


def test_text_has_bars_and_no_pictures():
    shown = text(MADE)
    assert "weights               13.5  ####################" in shown
    assert "#####\n" in shown and "<svg" not in shown
    assert shown.splitlines()[0] == "A plan"


def test_colors_only_where_they_are_asked_for():
    assert "\x1b" not in text(MADE)
    assert "\x1b[31mDoes not fit.\x1b[0m" in text(MADE, Style(color=True))


def test_long_texts_are_cut_and_numbers_are_not():
    made = Document(
        title="t",
        parts=(Table(headers=("name", "other", "value"), rows=(("a" * 70, "b" * 70, "1234567890"),), align="llr"),),
    )
    last = text(made).splitlines()[-1]
    assert len(last) <= 80 and "1234567890" in last and "..." in last


def test_a_column_of_texts_stands_below_its_row():
    made = Document(
        title="t", parts=(Table(headers=("row", "why"), rows=(("one", "because " * 20),), align="ll", below=1),)
    )
    lines = text(made).splitlines()
    assert lines[-3].strip().startswith("because") and max(map(len, lines)) <= 80


def test_csv_is_safe_for_spreadsheets():
    rows = list(csv.reader(io.StringIO(csv_text(MADE))))
    assert rows[0] == ["part", "GB"]
    assert rows[2][0].startswith("'=") and rows[2][1] == ""
    assert rows[3] == ["all", "-1.5 %"]


def test_several_tables_have_their_titles_in_csv():
    two = Document(title="t", parts=(MADE.tables[0], MADE.tables[0]))
    rows = list(csv.reader(io.StringIO(csv_text(two))))
    assert rows[0] == ["table", "part", "GB"] and rows[1] == ["Parts", "weights", "13.5"]


def test_markdown_is_escaped():
    hostile = Document(title="<b>|@someone", parts=(Table(headers=("a",), rows=(("x|y",),), align="l"),))
    shown = markdown(hostile)
    assert "<b>" not in shown and "x|y" not in shown and "@someone" not in shown


def test_listings_keep_their_lines():
    listing = CodeBlock(text="def add(x, y):\n    return x + y\x1b[31m\n", language="python")
    document = Document(title="A script", parts=(listing,), is_story=True)
    assert text(document).endswith("\n\n    def add(x, y):\n        return x + y\\x1b[31m")
    assert "```python\ndef add(x, y):\n    return x + y" in markdown(document)
