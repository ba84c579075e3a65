"""Fragments for notebooks in a real browser: hostile names do nothing, and they can be read on light and on dark."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "render"))
sys.path.insert(0, str(Path(__file__).parents[1] / "pytest_plugin"))

from estimates import addition, estimate, product
from figures import timing
from synthetic import profile

pytestmark = pytest.mark.slow  # a browser

HOSTILE = "</script></div><img src=x onerror=alert(1)><svg onload=alert(1)>\"'\u202e\n"


def page(background, text, *fragments):
    body = "".join(f'<div class="output">{fragment}</div>' for fragment in fragments)
    head = f"<!DOCTYPE html><meta charset=utf-8><style>body {{ background: {background}; color: {text} }}</style>"
    return f"{head}<body><p id=before>before</p>{body}<p id=after>after</p></body>"


def fragments(name):
    return [
        profile(60, name=name + "{}")._repr_html_(),
        estimate([product(name=name, family=name), addition()], {name: 1}, machine=name)._repr_html_(),
        timing(name=name, method=name, kernels=(name,), parameters={name: name})._repr_html_(),
    ]


def test_hostile_names_run_nothing_and_leave_the_page_as_it_is(opened):
    found = opened(page("white", "black", *fragments(HOSTILE)))
    assert found.locator("img, svg, script, .output .output, .output #after").count() == 0
    assert found.locator("body > .output").count() == 3
    assert "onerror=alert(1)" in found.locator(".output").first.inner_text()


@pytest.mark.parametrize(("background", "text"), [("white", "rgb(20, 20, 20)"), ("black", "rgb(230, 230, 230)")])
def test_bars_have_the_color_of_the_text(opened, background, text):
    found = opened(page(background, text, *fragments("")))
    colors = found.eval_on_selector_all(
        "div[style*=currentColor]", "bars => bars.map(bar => getComputedStyle(bar).backgroundColor)"
    )
    assert len(colors) == 7 + 3 + 1
    assert set(colors) == {text}


def test_bars_of_a_waterfall_are_as_long_as_their_shares(opened):
    found = opened(page("white", "black", profile(60)._repr_html_()))
    lengths = found.eval_on_selector_all(
        "div[style*=currentColor]",
        "bars => bars.map(bar => bar.getBoundingClientRect().width / bar.parentElement.getBoundingClientRect().width)",
    )
    made = profile(60)
    shares = [part.seconds / made.wall_s for part in made.waterfall.parts]
    assert lengths == pytest.approx(shares, abs=0.005)


def test_a_finding_opens_without_a_script(opened):
    found = opened(page("white", "black", profile(60)._repr_html_()))
    finding = found.locator("details:has(pre)").first
    remedy = finding.locator("pre").first
    assert not remedy.is_visible()
    finding.locator("summary").first.click()
    assert remedy.is_visible()


def test_it_fits_a_narrow_cell(opened):
    found = opened(page("white", "black", *fragments("")), width=560)
    assert found.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
