"""One browser, and one service with results, for all tests of this folder."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from playwright.sync_api import Browser, BrowserContext, Page

from tests.browser.chromium import NoChromiumError, chromium
from tests.browser.stored import Stored, fill
from tests.servers.databases import fresh_database
from tests.service.serving import Served, serving


@dataclass(frozen=True)
class Site:
    """The service and what it shows."""

    served: Served
    stored: Stored

    @property
    def url(self) -> str:
        return self.served.url


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Closed with the package: while it runs, no other event loop can in this thread."""
    try:
        with chromium() as started:
            yield started
        return
    except NoChromiumError as error:
        sentence = str(error)
    pytest.fail(sentence, pytrace=False)


@pytest.fixture(scope="package")
def site(postgres_server_url: str) -> Iterator[Site]:
    """The real service on PostgreSQL, filled once; tests only read it."""
    with fresh_database(postgres_server_url) as url, serving(url) as served:
        yield Site(served, fill(served.database))


@pytest.fixture(scope="package")
def window(browser: Browser, site: Site) -> Iterator[BrowserContext]:
    """A window with scripts, in which addresses begin with the service's."""
    with browser.new_context(base_url=site.url, viewport={"width": 1280, "height": 900}) as context:
        context.set_default_timeout(10_000)
        yield context


@pytest.fixture
def page(window: BrowserContext) -> Iterator[Page]:
    """A tab of its own."""
    with window.new_page() as opened:
        yield opened


@pytest.fixture
def plain(browser: Browser, site: Site) -> Iterator[Page]:
    """A tab of a browser without scripts."""
    with browser.new_context(base_url=site.url, java_script_enabled=False) as context:
        yield context.new_page()
