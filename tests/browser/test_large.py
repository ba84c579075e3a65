"""A report of 100,000 ops touches only what is visible when it scrolls, sorts and filters."""

import pytest
from synthetic import profile

from nearpeak.render.html.profile import profile_page as rendered

pytestmark = pytest.mark.slow  # a browser

MOST_NODES = 10_000
"""Elements that an action may add and remove: some rows of the table, or all circles of the roofline."""


@pytest.fixture(scope="module")
def content():
    return rendered(profile(100_000))


def changed_nodes(page, action):
    """How many elements an action adds and removes; its time would depend on the load of the machine."""
    program = f"""() => {{
        const observer = new MutationObserver(() => {{}});
        observer.observe(document.body, {{ subtree: true, childList: true }});
        {action}
        document.querySelector('.grid').getBoundingClientRect();
        const records = observer.takeRecords();
        observer.disconnect();
        return records.reduce((sum, each) => sum + each.addedNodes.length + each.removedNodes.length, 0);
    }}"""
    return page.evaluate(program)


def test_scrolling_sorting_and_filtering_touch_visible_rows_alone(opened, content):
    page = opened(content)
    page.wait_for_selector("html.ready")
    page.get_by_label("One by one").check()
    assert int(page.locator(".grid").get_attribute("aria-rowcount")) == 90_001
    for column in ("measured", "op", "module", "lost", "times"):
        assert changed_nodes(page, f"document.querySelector('[data-column={column}]').click();") < MOST_NODES
    scroll = (
        "const grid = document.querySelector('.grid'); grid.scrollTop += {}; grid.dispatchEvent(new Event('scroll'));"
    )
    for distance in (96, 30_000):
        assert changed_nodes(page, scroll.format(distance)) < MOST_NODES
    assert page.locator(".body .row").count() < 60
    search = """const search = document.querySelector('input[type=search]');
        search.value = search.value ? '' : 'layers.12 mm'; search.dispatchEvent(new Event('input'));"""
    assert changed_nodes(page, search) < MOST_NODES


def test_zooming_touches_no_more_than_what_is_drawn(opened, content):
    page = opened(content)
    page.wait_for_selector("html.ready")
    page.wait_for_timeout(200)
    assert page.locator("circle").count() <= 2000
    for tools in ("timeline", "roofline"):
        assert changed_nodes(page, f"document.querySelector('#{tools}-tools button').click();") < MOST_NODES
