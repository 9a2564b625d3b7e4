"""Each page: no violation of accessibility, nothing from elsewhere, no sideways scrolling, no script from a name."""

from dataclasses import dataclass, field

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, ViewportSize

from tests.browser.conftest import Site
from tests.browser.paths import paths
from tests.browser.stored import Stored

pytestmark = pytest.mark.slow
NAMES = tuple(paths(Stored(*[""] * len(Stored.__dataclass_fields__))))
RULES: dict[str, object] = {"resultTypes": ["violations"]}
CONTRAST = RULES | {"runOnly": {"type": "rule", "values": ["color-contrast"]}}
NARROW = ViewportSize(width=320, height=640)
SCRIPTS = "[...document.scripts].filter(each => !each.src.includes('/static/') || each.textContent).length"
HANDLERS = "[...document.querySelectorAll('*')].flatMap(e => [...e.attributes]).filter(a => /^on/.test(a.name)).length"


@dataclass
class Seen:
    """What happened while a page was open."""

    messages: list[str] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)

    def watch(self, page: Page) -> None:
        """From now on. A dialog could only come from a script that somebody put into a name."""
        page.on("console", lambda message: self.messages.append(message.text))
        page.on("pageerror", lambda error: self.messages.append(str(error)))
        page.on("dialog", lambda dialog: self.messages.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: self.addresses.append(request.url))


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_page_in_a_browser(name: str, page: Page, site: Site) -> None:
    seen = Seen()
    seen.watch(page)
    answer = page.goto(paths(site.stored)[name])
    assert answer is not None
    assert answer.status == (404 if name == "problem" else 200)
    assert violations(page, RULES) == []
    page.emulate_media(color_scheme="dark")
    assert violations(page, CONTRAST) == []
    page.emulate_media(color_scheme="light", forced_colors="active")
    page.set_viewport_size(NARROW)
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
    assert page.locator("h1").count() == 1
    assert page.evaluate(SCRIPTS) == page.evaluate(HANDLERS) == page.locator("[style], style").count() == 0
    assert [each for each in seen.messages if "404" not in each or name != "problem"] == []
    assert [address for address in seen.addresses if not address.startswith(site.url)] == []


def violations(page: Page, options: dict[str, object]) -> list[str]:
    """What axe-core finds: the rule and the elements."""
    found = Axe().run(page, options=options).response["violations"]
    return [f"{each['id']}: {[node['html'][:200] for node in each['nodes'][:3]]}" for each in found]


def test_the_call_reference_is_accessible(page: Page) -> None:
    """Its 500 kB are looked at by the rules that do not need a layout of each element."""
    page.goto("/docs")
    rules = {
        "type": "rule",
        "values": ["document-title", "duplicate-id", "heading-order", "link-name", "list", "region"],
    }
    assert violations(page, RULES | {"runOnly": rules}) == []
