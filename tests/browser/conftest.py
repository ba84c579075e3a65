"""A real browser for all tests here: Debian's chromium, driven by Playwright, without a network."""

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "render" / "html"))


@pytest.fixture(scope="session")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    with playwright.sync_playwright() as running:
        found = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield found
        found.close()


class Opened:
    """Opens pages, and fails the test at its end for any error, dialog or request to elsewhere."""

    def __init__(self, browser, folder):
        self._browser, self._folder = browser, folder
        self._contexts, self.problems = [], []

    def __call__(self, content, *, width=1600, height=1000, **options):
        file = self._folder / f"{len(self._contexts)}.html"
        file.write_text(content, encoding="utf-8")
        context = self._browser.new_context(viewport={"width": width, "height": height}, offline=True, **options)
        context.set_default_timeout(10_000)
        self._contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: self._console(message))
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (self.problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: self._request(request, file))
        page.goto(file.as_uri())
        return page

    def _console(self, message):
        if message.type in ("error", "warning"):
            self.problems.append(f"console: {message.text}")

    def _request(self, request, file):
        if request.url.partition("#")[0] != file.as_uri():
            self.problems.append(f"request: {request.url[:200]}")

    def close(self):
        for context in self._contexts:
            context.close()


@pytest.fixture
def opened(browser, tmp_path):
    found = Opened(browser, tmp_path)
    yield found
    found.close()
    assert found.problems == []
