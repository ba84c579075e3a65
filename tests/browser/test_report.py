"""The HTML report in a real browser: what a user sees, does with the pointer, and does with the keyboard alone."""

import dataclasses
import re

import pytest
from synthetic import profile

from nearpeak.render.html.profile import profile_page as rendered

pytestmark = pytest.mark.slow  # a browser

MADE = profile(400)
CONTENT = rendered(MADE)


def cells(page, column):
    """The texts of a column, in the order of the rows that are in the page."""
    return page.evaluate(
        """(column) => [...document.querySelectorAll('.body .row:not([hidden])')]
            .sort((a, b) => a.getAttribute('aria-rowindex') - b.getAttribute('aria-rowindex'))
            .map((row) => row.querySelector(`.c-${column}`).textContent)""",
        column,
    )


def numbers(page, column):
    return [float(text.replace(",", "")) for text in cells(page, column) if text != "-"]


def choose(page, label, value):
    page.get_by_label(label, exact=True).select_option(value)


def status(page):
    return page.locator(".status").inner_text()


def tip(page):
    return page.locator("#tip").inner_text()


@pytest.mark.parametrize("width", [1600, 400])
@pytest.mark.parametrize("ops", [0, 400])
def test_it_loads_without_a_network_and_does_not_scroll_sideways(opened, width, ops):
    page = opened(rendered(profile(ops)), width=width)
    page.wait_for_selector("html.ready")
    page.wait_for_timeout(100)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator(".verdict dd").first.is_visible()
    assert page.locator("#ops-title").is_visible()


def test_only_rows_that_can_be_seen_are_in_the_page(opened):
    page = opened(CONTENT)
    page.get_by_label("One by one").check()
    costly = sum(1 for op in MADE.ops if op.kernels)
    assert page.locator(".grid").get_attribute("aria-rowcount") == str(costly + 1)
    assert page.locator(".body .row").count() < 60


def test_rows_are_sorted_by_what_they_lose_at_first(opened):
    found = numbers(opened(CONTENT), "lost")
    assert len(found) > 10
    assert found == sorted(found, reverse=True)


def test_a_click_sorts_and_another_one_turns_the_order_around(opened):
    page = opened(CONTENT)
    for column in ("measured", "ops", "expected"):
        page.locator(f"[data-column={column}]").click()
        header = page.locator(f"[role=columnheader]:has([data-column={column}])")
        assert header.get_attribute("aria-sort") == "descending"
        found = numbers(page, column)
        assert found == sorted(found, reverse=True) and len(set(found)) > 1
        page.locator(f"[data-column={column}]").click()
        assert header.get_attribute("aria-sort") == "ascending"
        found = numbers(page, column)
        assert found == sorted(found)


def test_texts_are_sorted_by_the_alphabet(opened):
    page = opened(CONTENT)
    page.locator("[data-column=op]").click()
    found = cells(page, "op")
    assert found == sorted(found)


def test_a_search_leaves_what_matches(opened):
    page = opened(CONTENT)
    page.get_by_label("Search").fill("gelu")
    wanted = sum(1 for op in MADE.ops if "gelu" in op.name)
    assert status(page).startswith(f"{wanted} ops in ")
    assert set(cells(page, "op")) == {"gelu"}
    page.get_by_role("button", name="Clear filters").click()
    assert not status(page).startswith(f"{wanted} ops")


def test_filters_leave_what_they_say(opened):
    page = opened(CONTENT)
    choose(page, "Phase", "optimizer")
    assert set(cells(page, "phase")) == {"optimizer"}
    choose(page, "Phase", "")
    choose(page, "Limit", "compute")
    assert set(cells(page, "limiter")) == {"compute"}
    choose(page, "Limit", "")
    line = MADE.ops[3].source
    choose(page, "Line", line)
    assert set(cells(page, "line")) == {line}
    choose(page, "Line", "")
    page.get_by_label("Module", exact=True).fill("Model.layers.3")
    assert cells(page, "module") and all(text.startswith("Model.layers.3") for text in cells(page, "module"))
    page.get_by_label("Module", exact=True).fill("no-such-module")
    assert cells(page, "op") == []
    assert status(page).startswith("0 ops")


def test_a_row_opens_with_its_figures_and_shows_its_ops_one_by_one(opened):
    page = opened(CONTENT)
    page.get_by_label("Search").fill("gelu")
    page.locator("[data-column=ops]").click()
    row = page.locator(".body .row:not([hidden])").first
    count = int(row.locator(".c-ops").inner_text())
    assert count > 1
    row.click()
    detail = page.get_by_role("region", name="Selected op")
    assert "aten.gelu.default" in detail.inner_text()
    detail.get_by_role("button", name="one by one").click()
    assert status(page).startswith(f"{count} ops,")
    assert page.get_by_label("One by one").is_checked()


def test_hovering_a_circle_tells_its_op(opened):
    page = opened(CONTENT)
    circle = page.locator("circle").last  # the smallest, over all others
    circle.scroll_into_view_if_needed()
    circle.hover()
    assert "FLOP per byte" in tip(page)
    assert tip(page).splitlines()[0] in circle.get_attribute("aria-label")
    page.mouse.move(5, 5)
    assert page.locator("#tip").is_hidden()


def test_a_click_on_a_circle_goes_to_its_row(opened):
    page = opened(CONTENT)
    page.get_by_label("Search").fill("nothing is called so")  # its filter has to go
    circle = page.locator("circle").last
    name = circle.get_attribute("aria-label").partition(" (")[0]
    circle.click()
    active = page.locator(".body .row.active")
    assert active.locator(".c-op").inner_text() == name
    assert active.get_attribute("aria-selected") == "true"
    assert page.locator(".grid").get_attribute("aria-activedescendant") == active.get_attribute("id")
    assert page.evaluate("document.activeElement.className") == "grid"


def test_circles_with_a_bound_lie_below_the_roof_of_the_memory(opened):
    page = opened(CONTENT)
    page.wait_for_selector("line.roof.memory", state="attached")
    above = page.evaluate(
        """() => {
            const roof = document.querySelector('line.roof.memory');
            const [x1, y1, x2, y2] = ['x1', 'y1', 'x2', 'y2'].map((name) => Number(roof.getAttribute(name)));
            return [...document.querySelectorAll('circle:not(.l-other)')].filter((circle) => {
                const x = Number(circle.getAttribute('cx'));
                return x < x2 && Number(circle.getAttribute('cy')) < y1 + ((x - x1) * (y2 - y1)) / (x2 - x1) - 1;
            }).length;
        }"""
    )
    assert above == 0


def test_the_roofline_zooms_by_buttons_keys_and_wheel(opened):
    page = opened(CONTENT)
    circle = page.locator("circle").last
    place = lambda: circle.get_attribute("cx")  # noqa: E731
    first = place()
    page.locator("#roofline-tools").get_by_role("button", name="Zoom in").click()
    zoomed = place()
    assert zoomed != first
    page.locator("#roofline-tools").get_by_role("button", name="Reset").click()
    assert place() == first
    page.locator("circle[tabindex='0']").focus()
    page.keyboard.press("+")
    assert place() == zoomed
    page.keyboard.press("0")
    assert place() == first
    page.locator("svg.plot").hover(position={"x": 300, "y": 100})
    page.mouse.wheel(0, -300)
    page.wait_for_function(
        "(before) => [...document.querySelectorAll('circle')].pop().getAttribute('cx') !== before", arg=first
    )


def test_the_wheel_scrolls_the_page_over_a_roofline_without_focus(opened):
    page = opened(CONTENT)
    page.locator("svg.plot").hover(position={"x": 300, "y": 100})
    before = page.evaluate("scrollY")
    page.mouse.wheel(0, 200)
    page.wait_for_function("(before) => scrollY !== before", arg=before)


def test_a_click_goes_into_a_module_and_shows_its_ops(opened):
    page = opened(CONTENT)
    label = page.locator(".icicle g[aria-label^='Model.layers.2,']")
    label.click()
    assert page.locator("#module-plot .path b").inner_text() == "2"
    page.locator("#module-plot").get_by_role("button", name="Show its ops").click()
    assert page.get_by_label("Module", exact=True).input_value() == "Model.layers.2"
    assert all(text.startswith("Model.layers.2") for text in cells(page, "module"))
    page.locator("#module-plot .path").get_by_role("button", name="the step").click()
    assert page.locator("#module-plot .path b").inner_text() == "the step"


def test_a_finding_shows_its_ops(opened):
    page = opened(CONTENT)
    page.locator("[data-finding='0']").click()
    ops = [at for at in MADE.findings[0].ops if MADE.ops[at].kernels]
    assert status(page).startswith(f"{len(ops)} ops in ")
    chip = page.get_by_role("button", name="Only finding 1: unfused-norm")
    chip.click()
    assert not status(page).startswith(f"{len(ops)} ops in ")


def test_the_timeline_tells_what_ran_and_why_nothing_did(opened):
    page = opened(CONTENT)
    canvas = page.locator("canvas.timeline")
    canvas.scroll_into_view_if_needed()
    canvas.hover(position={"x": 300, "y": 34})
    assert "kernel_" in tip(page)
    page.locator(".gaps button").first.click()
    box = canvas.bounding_box()
    canvas.hover(position={"x": box["width"] / 2, "y": 34})
    assert "idle: python" in tip(page) and "train.py:9" in tip(page)


def test_a_click_on_the_timeline_goes_to_the_row_of_its_op(opened):
    page = opened(CONTENT)
    canvas = page.locator("canvas.timeline")
    canvas.scroll_into_view_if_needed()
    canvas.hover(position={"x": 300, "y": 34})
    name = tip(page).partition(" (")[0]
    canvas.click(position={"x": 300, "y": 34})
    assert page.locator(".body .row.active .c-op").inner_text() == name


def test_without_a_timeline_its_part_is_not_shown(opened):
    page = opened(rendered(dataclasses.replace(MADE, timeline=(), gaps=())))
    assert page.locator("#timeline-part").is_hidden()


def brightness(page):
    color = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(map(int, re.findall(r"\d+", color)[:3])) / 3


def test_light_and_dark_follow_the_system_and_the_button(opened):
    assert brightness(opened(CONTENT, color_scheme="light")) > 200
    page = opened(CONTENT, color_scheme="dark")
    assert brightness(page) < 60
    theme = page.get_by_role("button", name="Theme")
    theme.click()
    assert theme.inner_text() == "Theme: light"
    assert brightness(page) > 200
    theme.click()
    theme.click()
    assert theme.inner_text() == "Theme: auto"
    assert brightness(page) < 60


def test_paper_is_white_and_findings_are_open_on_it(opened):
    page = opened(CONTENT, color_scheme="dark")
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = false; })")
    page.emulate_media(media="print", color_scheme="dark")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert brightness(page) == 255
    assert page.locator("nav").is_hidden()
    assert page.locator("details:not([open])").count() == 0
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert page.locator("details[open]").count() == 0


def test_text_can_be_read_without_javascript(opened):
    page = opened(CONTENT, java_script_enabled=False)
    assert page.locator(".waterfall").is_visible()
    assert page.get_by_text("A norm is written as 5 ops").first.is_visible()
    assert page.get_by_text("need JavaScript").is_visible()
    assert page.locator("#ops").is_hidden()


def test_words_are_explained_under_the_pointer_and_for_the_keyboard(opened):
    page = opened(CONTENT)
    word = page.locator(".waterfall .term", has_text="slow kernels").first
    word.hover()
    assert tip(page).split("\n") == ["slow kernels", "Kernels slower than their bounds."]
    page.mouse.move(0, 0)
    assert page.locator("#tip").is_hidden()
    word.focus()
    assert "Kernels slower" in tip(page)
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()
    assert word.get_attribute("title") is None and word.get_attribute("aria-description")


def test_code_is_copied(opened):
    page = opened(CONTENT, permissions=("clipboard-read", "clipboard-write"))
    page.locator(".code .copy").first.click()
    page.wait_for_function("document.querySelector('.copy').textContent === 'Copied'")
    assert page.evaluate("navigator.clipboard.readText()") == "x = norm(x)\n    # indented"


def test_code_is_copied_without_a_clipboard(opened):
    page = opened(CONTENT)
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.evaluate("document.addEventListener('copy', () => { window.taken = String(window.getSelection()); })")
    page.locator(".code .copy").first.click()
    page.wait_for_function("window.taken !== undefined")
    assert page.evaluate("window.taken").splitlines() == ["x = norm(x)", "    # indented"]


def test_the_module_column_is_whole_at_1440_pixels(opened):
    page = opened(CONTENT, width=1440)
    page.wait_for_selector("html.ready")
    right = page.evaluate(
        """() => {
            const grid = document.querySelector('.grid').getBoundingClientRect();
            const cells = [...document.querySelectorAll('.body .row:not([hidden]) .c-module')];
            return [grid.right - cells[0].getBoundingClientRect().right,
                    cells.filter((cell) => cell.scrollWidth > cell.clientWidth).length];
        }"""
    )
    assert right[0] >= 0 and right[1] == 0


def test_an_op_shows_its_source_line(opened):
    page = opened(CONTENT)
    choose(page, "Line", "modeling.py:113")
    page.locator(".body .row:not([hidden])").first.click()
    assert page.locator(".detail .excerpt mark").inner_text() == "113        x = x.float()"


def test_idle_time_unfolds_to_its_places(opened):
    page = opened(CONTENT)
    cause = page.locator(".cause", has_text="python")
    assert not cause.locator("table").is_visible()
    cause.locator(".saving").click()
    assert "train.py:9" in cause.locator("table").inner_text()


@pytest.mark.parametrize("width", [420, 1024, 1440])
def test_sentences_wrap_at_every_width(opened, width):
    long = "Keep the shapes the same from step to step, and read results once in many steps. " * 5
    finding = dataclasses.replace(MADE.findings[0], remedy=f"{long}\nx = y")
    page = opened(rendered(MADE, findings=[finding]), width=width)
    page.wait_for_selector("html.ready")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    wide = "(all) => all.filter((each) => each.scrollWidth > each.clientWidth + 1).map((each) => each.textContent)"
    assert page.locator("main p, main dd, main li").evaluate_all(wide) == []
