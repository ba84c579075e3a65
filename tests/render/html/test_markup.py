"""Nothing from outside becomes markup, and nothing of it is hidden."""

import pytest

from nearpeak.render.html.markup import LONGEST, LONGEST_TEXT, element, joined, visible, visible_lines


def test_content_and_attributes_are_escaped():
    found = element("p", '<b>"&', title="\"'<>&")
    assert found == '<p title="&quot;&#x27;&lt;&gt;&amp;">&lt;b&gt;"&amp;</p>'


def test_markup_is_not_escaped_twice():
    assert element("p", element("b", "<")) == "<p><b>&lt;</b></p>"
    assert joined("<", element("b", "x")) == "&lt;<b>x</b>"


def test_attributes_that_are_not_given_are_left_out():
    assert element("a", "x", class_="y", aria_label=None, open=False, hidden=True) == '<a class="y" hidden>x</a>'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\nb\tc", "a b c"),
        ("a\u202eb", r"a\u202eb"),
        ("a\u2066b\u200f", r"a\u2066b\u200f"),
        ("a\x00\x1b[31m", r"a\x00\x1b[31m"),
        ("a\u200bb\ufeff", r"a\u200bb\ufeff"),
        ("\ud800", r"\ud800"),
        ("größe 模型", "größe 模型"),
    ],
)
def test_what_cannot_be_seen_is_shown_as_an_escape(text, expected):
    assert visible(text) == expected


def test_long_names_keep_their_ends():
    found = visible("begin" + "x" * 10_000 + "the-end")
    assert len(found) == LONGEST
    assert found.startswith("begin") and found.endswith("the-end")


def test_code_keeps_its_lines_and_indentation():
    assert visible_lines("a\r\n    b\n\tc\u202e") == "a\n    b\n    c\\u202e"
    assert len(visible_lines("x" * 10_000)) == LONGEST_TEXT
