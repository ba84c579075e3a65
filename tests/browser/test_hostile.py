"""Names that are markup, that turn text around or that are very long: nothing runs, nothing breaks."""

import dataclasses

import pytest
from synthetic import profile

from nearpeak.machines.catalogue import find
from nearpeak.render.html.profile import profile_page as rendered

pytestmark = pytest.mark.slow  # a browser

NAMES = {
    "markup": "</script><img src=x onerror=alert(1)>\"'`><svg onload=alert(1)>{}",
    "comment": "<!--<script>{}",
    "lines": "a\nb\r\nc\u2028d\u202e\u2066\u200f{}",
    "long": "x" * 10_000 + "{}",
    "wide": "模" * 2_000 + "{}",
    "dots": "." * 10_000 + "{}",
    "prototype": "__proto__",
    "method": "constructor",
}


MORE = ("wide", "dots", "method")
"""Names that go the way of another one."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, id=id, marks=pytest.mark.exhaustive if id in MORE else ()) for id, name in NAMES.items()],
)
def test_hostile_names_are_only_shown(opened, name):
    made = profile(120, name=name)
    ops = tuple(dataclasses.replace(op, phase=name, limiter=name) for op in made.ops[:40]) + made.ops[40:]
    machine = find("h200-sxm")
    limits = dataclasses.replace(machine.achievable, matrix={name: 1e15}, how="measured")
    machine = dataclasses.replace(machine, name=name, id=name, memory_kind=name, achievable=limits)
    excerpts = made.excerpts if "{}" in name else ()  # what every object has is no excerpt
    page = opened(rendered(dataclasses.replace(made, ops=ops, date=name, excerpts=excerpts), machine=machine))
    page.wait_for_selector("html.ready")
    assert page.locator("img").count() == 0
    assert page.evaluate("document.querySelectorAll('script').length") == 2
    page.locator("circle").first.hover(force=True)
    page.locator(".icicle g").last.click(force=True)
    page.locator("canvas.timeline").hover(position={"x": 150, "y": 34})
    page.locator(".body .row:not([hidden])").first.click()
    assert page.locator(".detail").is_visible()
    page.get_by_label("Search").fill(name[:20])
    page.locator("[data-finding='0']").click()
    for width in (1600, 400):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(100)
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_script_that_got_in_would_not_run(opened):
    content = rendered(profile(50)).replace("<main>", "<main><script>document.title = 'broken'</script>", 1)
    page = opened(content)
    page.wait_for_selector("html.ready")
    assert page.title() != "broken"
    assert any("Content Security Policy" in problem for problem in opened.problems)
    opened.problems.clear()
