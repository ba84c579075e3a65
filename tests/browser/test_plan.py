"""Pages of the planner in a real browser: no error, no request, no scrolling sideways, and sliders that compute."""

import pytest

from nearpeak.plan.cluster.cluster import Cluster
from nearpeak.plan.models.catalogue import get_model
from nearpeak.plan.serving.plan import Load, serving_plan
from nearpeak.plan.training.job import Job, precision_named
from nearpeak.plan.training.layout import Layout
from nearpeak.plan.training.plan import memory_plan
from nearpeak.plan.training.search import search_plan
from nearpeak.render.html.document import document_page
from nearpeak.render.views.plan import serving as plan_serving
from nearpeak.render.views.plan import training as plan_memory
from nearpeak.render.views.plan import training as plan_search
from nearpeak.render.views.plan.sliders import decode_sliders, training_sliders

pytestmark = pytest.mark.slow  # a browser


@pytest.fixture(scope="module")
def seven():
    job = Job(
        model=get_model("llama-2-7b"),
        layout=Layout(gpus=1, global_batch=1, sharding="none"),
        sequence=4096,
        precision=precision_named("bf16"),
    )
    return memory_plan(job, Cluster.of("h100-sxm x 1"))


@pytest.fixture(scope="module")
def served():
    return serving_plan(
        get_model("llama-3-8b"), Cluster.of("h100-sxm x 2"), Load(prompt=1024, output=256, concurrency=32)
    )


@pytest.fixture(scope="module")
def pages(seven, served):
    found = search_plan(get_model("llama-3-8b"), Cluster.of("h100-sxm x 8"), sequence=8192)
    return {
        "memory": document_page(plan_memory.memory_document(seven), training_sliders(seven)),
        "search": document_page(plan_search.search_document(found, 5), training_sliders(found.plan)),
        "serve": document_page(plan_serving.document(served), decode_sliders(served)),
    }


def slide(tab, name, value):
    tab.locator(f"#slider-{name}").fill(str(value))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1200])
@pytest.mark.parametrize("name", ["memory", "search", "serve"])
def test_pages_load_and_do_not_scroll_sideways(opened, pages, name, width, scheme):
    tab = opened(pages[name], width=width, color_scheme=scheme)
    tab.wait_for_selector("html.ready")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.locator("#verdict").is_visible()
    assert "NaN" not in tab.locator("main").inner_text()


def test_sliders_start_at_the_plan_and_compute_again(opened, pages, seven):
    tab = opened(pages["memory"])
    planned = f"{seven.fullest.total / 1e9:.1f} GB on the fullest GPU: does not fit"
    assert tab.locator("#verdict").inner_text().startswith(planned)
    slide(tab, "gpus", 3)
    tab.locator("#slider-sharding").select_option("zero3")
    assert "fits 85.5 GB" in tab.locator("#verdict").inner_text()
    slide(tab, "tp", 2)
    slide(tab, "pp", 2)
    assert tab.locator("#answer").inner_text().startswith("Not legal: tp x cp x pp = 16 is larger than gpus=8.")


def test_decoding_goes_over_to_compute_as_the_batch_grows(opened, pages):
    tab = opened(pages["serve"])
    slide(tab, "context", 0)
    slide(tab, "batch", 0)
    assert "limited by memory" in tab.locator("#verdict").inner_text()
    tab.locator("#slider-batch").press("End")
    assert "limited by compute" in tab.locator("#verdict").inner_text()


def test_the_theme_is_a_button_and_pictures_follow_it(opened, pages):
    tab = opened(pages["memory"], color_scheme="light")
    color = "getComputedStyle(document.querySelector('.picture .np-f-page')).fill"
    light = tab.evaluate(color)
    tab.locator("#theme").click()
    tab.locator("#theme").click()
    assert tab.locator("#theme").inner_text() == "Theme: dark"
    assert tab.evaluate(color) != light


def test_without_javascript_the_tables_are_there(opened, pages):
    tab = opened(pages["memory"], java_script_enabled=False)
    assert tab.locator("table").first.is_visible()
    assert not tab.locator("#what-if").is_visible()
