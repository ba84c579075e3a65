"""Words that a page explains."""

from nearpeak.profiles.idle import CAUSE_MEANINGS
from nearpeak.profiles.waterfall import PART_MEANINGS
from nearpeak.render.html.profile import GLOSSARY, Explainer, term


def spans(markup: str) -> int:
    return markup.count('<span class="term"')


def test_parts_and_causes_have_their_meaning():
    for name in (*PART_MEANINGS, *(cause for cause in CAUSE_MEANINGS if cause != "unknown")):
        assert GLOSSARY[name].endswith(".")


def test_a_word_is_explained_once_in_a_section():
    write = Explainer()
    first = write("Slow: 3 x the bound, and the bounds as written.")
    assert spans(first) == 2 and ">bound</span>, and the bounds <span" in first
    assert spans(write("At the bound again.")) == 0
    assert spans(Explainer()("At the bound again.")) == 1


def test_words_in_code_and_inside_of_others_are_left_alone():
    text = Explainer()("Call `fused(x)`, then rebound, train.idle and slow-bound.")
    assert spans(text) == 0 and "<code>fused(x)</code>" in text


def test_text_is_escaped_around_a_word():
    text = Explainer()("<b> the bound & more")
    assert text.startswith("&lt;b&gt; the <span") and text.endswith("</span> &amp; more")


def test_a_label_is_explained_wherever_it_stands():
    write = Explainer()
    assert spans(write("idle")) == spans(write("idle")) == 1
    assert term("no such word") == "no such word"
