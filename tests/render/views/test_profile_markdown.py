"""A profile as Markdown."""

import dataclasses

import pytest
from markdown_it import MarkdownIt
from synthetic import profile  # type: ignore[import-not-found]

from nearpeak.profiles.waterfall import build_waterfall
from nearpeak.render.markdown import LARGEST_COMMENT, markdown
from nearpeak.render.views.profile import ReportOptions, document
from nearpeak.units import percent, seconds

PARSER = MarkdownIt("commonmark", {"html": True}).enable("table")
OURS = ("details", "/details", "summary", "/summary", "b", "/b", "code", "/code", "!-- --")


def written(made, **options):
    return markdown(document(made, ReportOptions(**options)))


def cells(text, column):
    """A column of the first table."""
    rows = [line.split(" | ") for line in text.partition("| part |")[2].partition("\n\n")[0].splitlines()[2:]]
    return [row[column].strip("| *") for row in rows]


def test_the_waterfall_has_all_parts_and_the_wall_time():
    made = profile(100)
    text = written(made)
    assert cells(text, 0) == [*(part.name for part in made.waterfall.parts), "wall"]
    assert cells(text, 1) == [*(seconds(part.seconds) for part in made.waterfall.parts), seconds(made.wall_s)]
    assert cells(text, 2)[0] == percent(made.waterfall.parts[0].seconds / made.wall_s)


def test_bars_follow_each_other():
    made = profile(100)
    bars = [bar.strip("`") for bar in cells(written(made), 3) if bar]
    assert len(bars) == sum(part.seconds > 0 for part in made.waterfall.parts)
    assert {len(bar) for bar in bars} == {20}
    starts = [bar.index("█") for bar in bars]
    assert starts == sorted(starts) and starts[0] == 0 and bars[-1].endswith("█")


def test_a_part_below_zero_is_called_a_bug():
    made = profile(100)
    parts = {"wall_s": 1.0, "ideal_s": 0.5, "fused_s": 0.6, "as_written_s": 0.9, "modeled_s": 0.7, "kernel_s": 0.7}
    assert "a bound of nearpeak's is wrong" in written(dataclasses.replace(made, waterfall=build_waterfall(**parts)))


def test_findings_come_with_what_to_write_instead():
    made = profile(100)
    text = written(made)
    assert "unfused-norm at modeling.py:113, 12 places" in text
    assert "Instead:\n\n```python\nx = norm(x)\n    # indented\n```" in text
    assert "And 1 more" in written(made, most_findings=1)


def test_a_remedy_that_is_a_sentence_is_no_code():
    made = profile(100)
    finding = dataclasses.replace(made.findings[0], remedy="Give it more rows.")
    assert "\nInstead: Give it more rows.\n" in written(made, findings=[finding])


def test_the_ranking_is_by_what_was_asked_for():
    made = profile(100)
    assert "Where most is lost, by module" in written(made, by="module", top=3)
    table = written(made, by="module", top=3).partition("by module</summary>\n\n")[2].partition("\n\n")[0]
    assert len(table.splitlines()) == 2 + 3
    assert "`Model.layers." in table


def test_an_empty_profile_has_a_report():
    text = written(profile(0))
    assert "Verdict" in text and "Where most is lost" not in text


@pytest.mark.parametrize(
    "name",
    [
        "</script><img src=x onerror=alert(1)>{}",
        "</summary></details>{}",
        "a|b|{}",
        "{}`</code>`",
        "[{}](javascript:alert(1))",
        '"quoted" {}\n\n# heading\n<b>',
        "\u202e{}",
    ],
)
def test_hostile_names_are_only_text(name):
    text = written(profile(60, name=name))
    tokens = PARSER.parse(text)
    children = [child for token in tokens if token.type == "inline" for child in token.children]
    html = [each.content for each in [*tokens, *children] if each.type in ("html_block", "html_inline")]
    tags = [tag.partition(">")[0] for part in html for tag in part.split("<")[1:]]
    assert set(tags) <= set(OURS)
    assert {"link_open", "image"}.isdisjoint(child.type for child in children)
    assert [token.content for token in tokens if token.type == "heading_open"] == [""] * 2
    assert tags.count("details") == tags.count("/details") == tags.count("/summary") > 3
    assert "\u202e" not in text


@pytest.mark.parametrize("filler", ["x", "@", "<", "`"])
def test_it_fits_into_a_comment_whatever_the_names_are(filler):
    text = written(profile(400, name="{}" + filler * 10_000), top=500, most_findings=50)
    assert len(text) < LARGEST_COMMENT + 100
    assert "| **wall** |" in text
