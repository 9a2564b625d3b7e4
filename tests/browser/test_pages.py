"""Each page in a browser: accessible, narrow, from nowhere else; used by the keyboard, without scripts, as a file."""

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, ViewportSize, expect

from tests.browser.conftest import Site
from tests.browser.stored import EPYC, H100, Stored, paths

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


def rows(page: Page) -> int:
    return page.locator("section.board tbody tr").count()


def test_filters_work_without_a_reload_and_the_back_button_undoes_them(page: Page, site: Site) -> None:
    page.goto("/?model=preset:gpt2")
    page.evaluate("window.stays = true")
    before = rows(page)
    page.select_option("select[name=hardware]", H100)
    expect(page).to_have_url(re.compile(r"hardware=1x\+NVIDIA"))
    expect(page.locator("section.board tbody tr")).to_have_count(1)
    assert page.evaluate("window.stays")
    assert page.locator("select[name=model]").input_value() == "preset:gpt2"
    page.go_back()
    expect(page.locator("section.board tbody tr")).to_have_count(before)
    page.go_forward()
    page.reload()
    assert rows(page) == 1
    assert page.locator("select[name=hardware]").input_value() == H100


def test_everything_can_be_reached_by_the_keyboard(page: Page, site: Site) -> None:
    page.goto(f"/?workload={site.stored.board}")
    page.keyboard.press("Tab")
    assert page.locator(".skip").evaluate("e => e === document.activeElement")
    page.keyboard.press("Enter")
    assert page.locator("main").evaluate("e => e === document.activeElement")
    page.keyboard.press("/")
    assert page.locator("select[name=hardware]").evaluate("e => e === document.activeElement")
    page.locator(".brand").focus()
    page.keyboard.press("j")
    page.keyboard.press("j")
    second = page.locator("a.row").nth(1)
    assert second.evaluate("e => e === document.activeElement")
    target = second.get_attribute("href")
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"{site.url}{target}")
    page.keyboard.press("g")
    page.keyboard.press("w")
    expect(page).to_have_url(f"{site.url}/workers")
    page.locator("[data-tip]").first.focus()
    expect(page.get_by_role("tooltip")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("tooltip")).to_be_hidden()


def test_two_rows_are_compared_by_ticking_them(page: Page, site: Site) -> None:
    page.goto(f"/?workload={site.stored.board}")
    for place in (0, 2):
        page.locator("input[name=result]").nth(place).check()
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Comparison")
    assert page.locator("table.compare").first.locator("thead th").count() == 3


def test_the_pages_work_without_scripts(plain: Page, site: Site) -> None:
    plain.goto("/?model=preset:gpt2")
    plain.select_option("select[name=hardware]", EPYC)
    plain.get_by_role("button", name="Apply").click()
    assert rows(plain) == 1
    assert plain.locator("select[name=hardware]").input_value() == EPYC
    assert plain.locator("svg.bar .whisker").count() == 1
    plain.locator("a.row").first.click()
    assert "native_decode" in plain.locator("h1").inner_text()
    assert "optigpu.run(" in plain.locator("pre").first.inner_text()
    plain.goto(f"/ladder/{site.stored.ladder}")
    plain.locator("figure.chart summary").click()
    assert plain.locator("figure.chart td").first.is_visible()


def test_a_page_as_one_file_opens_without_the_service(page: Page, browser: Browser, tmp_path: Path) -> None:
    page.goto("/?model=preset:gpt2")
    with page.expect_download() as download:
        page.get_by_text("This page as one file").click()
    file = tmp_path / download.value.suggested_filename
    download.value.save_as(file)
    asked: list[str] = []
    with browser.new_context(offline=True) as context, context.new_page() as kept:
        kept.on("request", lambda request: asked.append(request.url))
        kept.goto(file.as_uri())
        assert rows(kept) == 4
        assert kept.locator("svg.bar .fill").first.evaluate("e => getComputedStyle(e).fill") != "rgb(0, 0, 0)"
        assert kept.locator("script").count() == 0
        assert (kept.locator("a.row").first.get_attribute("href") or "").startswith("http://127.0.0.1")
    assert asked == [file.as_uri()]


@pytest.mark.parametrize("path", ["/", "/claims"])
def test_nothing_moves_while_a_page_appears(page: Page, path: str) -> None:
    page.add_init_script(
        "window.moved = 0; new PerformanceObserver(list => list.getEntries().forEach(e => window.moved += e.value))"
        ".observe({type: 'layout-shift', buffered: true})"
    )
    slow_down(page)
    page.goto(path, wait_until="networkidle")
    assert page.evaluate("window.moved") == 0


def slow_down(page: Page) -> None:
    """A slow network: a page arrives in many parts."""
    devtools = page.context.new_cdp_session(page)
    devtools.send("Network.setCacheDisabled", {"cacheDisabled": True})
    rates = {"downloadThroughput": 20_000, "uploadThroughput": 20_000}
    devtools.send("Network.emulateNetworkConditions", {"offline": False, "latency": 5, **rates})
