"""Text from outside inside of Markdown: read back by a real parser, it is only text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from nearpeak.render.markdown import code, code_block, details, escape_summary, escape_text, table

PARSER = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
HOSTILE = [
    "</script><img src=x onerror=alert(1)>",
    "a | b || c \\| d \\\\| e",
    "*bold* _it_ **x** ~~s~~ `code` ``x``",
    "[link](https://example.com) ![i](x) <https://example.com>",
    "# heading",
    "- item",
    "1. item",
    "1) item",
    "+ item",
    "> quote",
    "=====",
    "| a | b |",
    "```",
    "\\",
    "ends with \\",
    "&lt; &amp; &#60;",
    "a\n\n# b\n\n- c",
    "\u202eright to left",
    "<!-- comment",
    "</details></td>",
    "$x$",
]


def inline(markdown):
    """The tokens inside of the paragraphs and cells of a text."""
    return [child for token in PARSER.parse(markdown) if token.type == "inline" for child in token.children]


def content(markdown):
    """What a reader sees of one paragraph: its text, without comments."""
    assert [token.type for token in PARSER.parse(markdown)] == ["paragraph_open", "inline", "paragraph_close"]
    kinds = {(child.type, child.content) for child in inline(markdown) if child.type != "text"}
    assert kinds <= {("html_inline", "<!-- -->")}
    return "".join(child.content for child in inline(markdown) if child.type == "text")


@pytest.mark.parametrize("value", [value for value in HOSTILE if value.isprintable()])
def test_text_is_read_back_as_it_was(value):
    assert content(escape_text(value)) == value


@given(st.text(alphabet="ab1 .)<>&|\\`*_[]()#+-!~@$=:/\"'{}", min_size=1, max_size=30))
def test_any_text_is_read_back_as_it_was(value):
    if value.strip():
        assert content(escape_text(value)) == value.strip()


@pytest.mark.parametrize("value", HOSTILE)
def test_a_cell_stays_one_cell(value):
    written = table(["a", "b"], [[escape_text(value), code(value)], ["x", "y"]], "lr")
    tokens = PARSER.parse(written)
    assert [token.type for token in tokens].count("td_open") == 4
    html = [child.content for child in inline(written) if child.type == "html_inline"]
    assert set(html) <= {"<!-- -->", "<code>", "</code>"}
    assert not {"link_open", "image", "em_open", "strong_open"} & {child.type for child in inline(written)}


@pytest.mark.parametrize("value", ["a`b", "``", "`", "x`` `y`", "plain", "a|b*c*", "</b>", "back\\"])
def test_code_shows_what_it_is_given(value):
    shown = [child for child in inline(code(value)) if child.type in ("code_inline", "text")]
    assert "".join(child.content for child in shown) == value


@pytest.mark.parametrize("value", ["x", "```\n# out\n```", "````", "a\n    b", "~~~"])
def test_a_block_ends_where_it_should(value):
    tokens = PARSER.parse(code_block(value, "python") + "\n\nafter")
    assert [token.type for token in tokens] == ["fence", "paragraph_open", "inline", "paragraph_close"]
    assert tokens[0].content == value + "\n"


@pytest.mark.parametrize("value", ["@octocat", "see #12", "https://example.com", "www.example.com", "GH-12"])
def test_nobody_is_mentioned_and_nothing_linked(value):
    for written in (escape_text(value), escape_summary(value)):
        assert value not in written
        assert written.replace("<!-- -->", "") == value


def test_a_summary_is_html_and_what_it_hides_is_markdown():
    written = details(escape_summary("a_b <img> | x"), "*inside*")
    assert "<summary>a_b &lt;img&gt; &#124; x</summary>" in written
    assert [child.content for child in inline(written) if child.type == "text" and child.content] == ["inside"]
