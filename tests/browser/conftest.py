"""A real browser for all tests here: Debian's chromium, driven by Playwright, without a network."""

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "render" / "html"))

BROWSERS = ("chromium", "google-chrome", "chrome")


@pytest.fixture(scope="session")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = next(filter(None, map(shutil.which, BROWSERS)), None)
    if chromium is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    with playwright.sync_playwright() as running:
        found = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield found
        found.close()


class Opened:
    """Opens pages, and fails the test at its end for any error, dialog or request to elsewhere.

    A tab takes longer to make than a page to load, so tabs are used again, one for each set of options.
    """

    def __init__(self, browser):
        self._browser = browser
        self._tabs, self._contexts = {}, []
        self.problems, self._used, self._folder = [], set(), None

    def begin(self, folder):
        self.problems, self._used, self._folder = [], set(), folder

    def __call__(self, content, *, width=1600, height=1000, **options):
        file = self._folder / f"{len(self._used)}.html"
        file.write_text(content, encoding="utf-8")
        key = tuple(sorted(options.items()))
        if key not in self._tabs or key in self._used:  # a second one in a test stands beside the first
            self._tabs[key] = self._tab(options)
        self._used |= {key, file}
        page = self._tabs[key]
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(media="null")
        page.mouse.move(0, 0)
        page.goto(file.as_uri())
        return page

    def _tab(self, options):
        context = self._browser.new_context(offline=True, **options)
        context.set_default_timeout(10_000)
        self._contexts.append(context)
        page = context.new_page()
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (self.problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", self._request)
        return page

    def _console(self, message):
        if message.type in ("error", "warning"):
            self.problems.append(f"console: {message.text}")

    def _request(self, request):
        if not request.url.startswith(self._folder.as_uri() + "/"):
            self.problems.append(f"request: {request.url[:200]}")

    def close(self):
        for context in self._contexts:
            context.close()


@pytest.fixture(scope="session")
def tabs(browser):
    found = Opened(browser)
    yield found
    found.close()


@pytest.fixture
def opened(tabs, tmp_path):
    tabs.begin(tmp_path)
    yield tabs
    assert tabs.problems == []
