"""The report with the keyboard alone, and what a screen reader is told."""

import pytest
from synthetic import profile

from nearpeak.render.html.profile import profile_page as rendered

pytestmark = pytest.mark.slow  # a browser

CONTENT = rendered(profile(400))


def tab_to(page, selector, most=120):
    """Presses Tab until the focus is on an element."""
    for _ in range(most):
        page.keyboard.press("Tab")
        if page.evaluate("(selector) => document.activeElement.matches(selector)", selector):
            return
    raise AssertionError(f"Tab does not reach {selector}")


def test_the_first_stop_skips_to_the_ops(opened):
    page = opened(CONTENT)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the ops"
    page.keyboard.press("Enter")
    tab_to(page, "input[type=search]", most=2)


def test_every_part_is_reached_with_tab(opened):
    page = opened(CONTENT)
    order = ["#theme", ".icicle g", "summary", "[data-finding]", "canvas.timeline", ".gaps button", "circle", ".grid"]
    for selector in order:
        tab_to(page, selector)


def test_the_focus_can_be_seen(opened):
    page = opened(CONTENT)
    tab_to(page, "#theme")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_arrows_go_through_the_circles_and_enter_goes_to_the_row(opened):
    page = opened(CONTENT)
    tab_to(page, "circle")
    first = page.evaluate("document.activeElement.getAttribute('aria-label')")
    page.keyboard.press("ArrowRight")
    second = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert second != first
    assert page.locator("#tip").inner_text().splitlines()[0] == second.split(", ")[0]
    assert page.locator("circle[tabindex='0']").count() == 1
    page.keyboard.press("Enter")
    assert page.locator(".body .row.active .c-op").inner_text() == second.partition(" (")[0]
    assert page.evaluate("document.activeElement.className") == "grid"


def test_arrows_go_through_the_rows(opened):
    page = opened(CONTENT)
    tab_to(page, ".grid")
    active = page.locator(".body .row.active")
    page.keyboard.press("ArrowDown")
    assert active.get_attribute("aria-rowindex") == "2"
    page.keyboard.press("ArrowDown")
    assert active.get_attribute("aria-rowindex") == "3"
    page.keyboard.press("End")
    assert active.get_attribute("aria-rowindex") == page.locator(".grid").get_attribute("aria-rowcount")
    assert active.is_visible()
    page.keyboard.press("Home")
    page.keyboard.press("PageDown")
    assert int(active.get_attribute("aria-rowindex")) > 10
    page.keyboard.press("Enter")
    assert page.get_by_role("region", name="Selected op").is_visible()
    page.keyboard.press("Escape")
    assert page.locator(".detail").is_hidden()


def test_a_column_is_sorted_by_enter_and_said(opened):
    page = opened(CONTENT)
    tab_to(page, "[data-column=measured]")
    page.keyboard.press("Enter")
    assert page.locator("#live").inner_text() == "Sorted by measured, largest first."


def test_arrows_go_through_the_modules(opened):
    page = opened(CONTENT)
    tab_to(page, ".icicle g")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    name = page.evaluate("document.activeElement.getAttribute('aria-label')").split(",")[0]
    page.keyboard.press("Enter")
    assert page.locator("#module-plot .path b").inner_text() == name.rpartition(".")[2]
    page.keyboard.press("Escape")
    assert page.locator("#module-plot .path b").inner_text() == "the step"


def test_n_goes_from_gap_to_gap_and_says_its_cause(opened):
    page = opened(CONTENT)
    tab_to(page, "canvas.timeline")
    page.keyboard.press("n")
    said = page.locator("#live").inner_text()
    assert said.startswith("idle: python") and "train.py:9" in said


def test_all_that_can_be_used_has_a_name(opened):
    page = opened(CONTENT)
    nameless = page.evaluate(
        """() => [...document.querySelectorAll('button, input, select, summary, a, canvas, [role], [tabindex]')]
            .filter((each) => !['presentation', 'row', 'gridcell'].includes(each.getAttribute('role')))
            .filter((each) => !each.matches('pre, #tip, [role=status]'))
            .filter((each) => !(each.getAttribute('aria-label') || each.getAttribute('aria-labelledby')
                || each.textContent.trim() || (each.labels && each.labels.length)))
            .map((each) => each.outerHTML.slice(0, 100))"""
    )
    assert nameless == []


def test_the_grid_says_how_large_it_is(opened):
    page = opened(CONTENT)
    grid = page.get_by_role("grid", name="Ops")
    assert int(grid.get_attribute("aria-rowcount")) > 30
    assert int(grid.get_attribute("aria-colcount")) == page.locator("[role=columnheader]").count()
    first = page.locator(".body .row:not([hidden])").first
    assert first.locator("[role=gridcell]").count() == page.locator("[role=columnheader]").count()
