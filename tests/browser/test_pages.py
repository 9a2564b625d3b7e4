"""Each page in a browser: accessible, narrow, from nowhere else; used by the keyboard, without scripts, as a file."""

import gzip
import re
import struct
from dataclasses import dataclass, field
from html import unescape
from pathlib import Path
from xml.etree import ElementTree

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, ViewportSize, expect

from api.pages.jobs import TABLE_WIDTH
from optigpu.documents.result import Attribution
from optigpu.report.ladder import brief_grid
from optigpu.vocabulary import harmless
from tests.browser.conftest import Site
from tests.browser.stored import EPYC, H100, HOSTILE, RIGHT_TO_LEFT, Stored, paths
from tests.service.pages import Page as HtmlPage

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


@pytest.mark.long
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


BROWSER = {"Accept": "text/html,application/xhtml+xml"}
MOST_BYTES = 60_000
ATOM = "{http://www.w3.org/2005/Atom}"


def get(site: Site, path: str, **headers: str) -> httpx.Response:
    return site.served.client.get(path, headers=BROWSER | headers)


def test_the_first_page_with_all_of_its_files_is_small(site: Site) -> None:
    page = get(site, "/")
    files = [link for link in page.text.split('"') if link.startswith("/static/")]
    assert len(files) >= 4
    sent = [page.content, *(get(site, link).content for link in files)]
    assert sum(len(gzip.compress(each, 5)) for each in sent) < MOST_BYTES
    assert page.headers["content-encoding"] == "gzip"


def test_a_page_that_has_not_changed_is_not_sent_again(site: Site) -> None:
    first = get(site, "/")
    again = get(site, "/", **{"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_files_are_kept_for_ever_by_their_content(site: Site) -> None:
    link = next(link for link in get(site, "/").text.split('"') if link.endswith(".css"))
    assert "immutable" in get(site, link).headers["cache-control"]
    other = f"/static/{'0' * 16}/optigpu.css"
    assert get(site, other).headers["cache-control"] == "no-cache"
    assert get(site, "/static/x/..%2f..%2fapp.py").status_code == 404


def test_every_link_of_every_page_leads_somewhere(site: Site) -> None:
    seen: set[str] = set()
    for path in paths(site.stored).values():
        page = HtmlPage(get(site, path).text)
        assert page.from_elsewhere == []
        seen |= {link.partition("#")[0] for link in page.links if not link.startswith("#")}
    broken = {link: get(site, link).status_code for link in sorted(seen)}
    assert {link: status for link, status in broken.items() if status != 200} == {}


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/?hardware=none such", 422, "Unknown hardware 'none such'"),
        ("/?limit=10000", 422, "the most is 200"),
        (f"/?model={'x' * 10_000}", 422, "model"),
        ("/?model=\u0645\u0642\u064a\u0627\u0633", 422, "Unknown model '\u0645\u0642\u064a\u0627\u0633'"),
        ("/results/not-an-id", 422, "This is not a UUID"),
        ("/results/0198c9a2-7b3e-7cc1-8f5d-2f0c1d1f6a11", 404, "0198c9a2"),
        ("/ladder/0198c9a2-7b3e-7cc1-8f5d-2f0c1d1f6a11", 404, "0198c9a2"),
        ("/pareto?kwh=inf", 422, "kwh"),
    ],
)
def test_bad_input_gets_a_page_that_says_so(site: Site, path: str, status: int, words: str) -> None:
    answer = get(site, path)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "text/html; charset=utf-8")
    text = unescape(answer.text)
    assert words in text
    assert "Traceback" not in text
    assert len(text) < 20_000


def test_a_withdrawn_result_says_when_and_why(site: Site) -> None:
    answer = get(site, f"/results/{site.stored.withdrawn}")
    assert answer.status_code == 410
    assert "was withdrawn on" in answer.text
    assert HOSTILE not in answer.text
    assert HOSTILE in unescape(answer.text)


def test_what_names_say_stands_on_the_pages_as_text(site: Site) -> None:
    for path in ("/", f"/results/{site.stored.hostile}", "/workers", "/hardware", "/jobs", "/feed.atom"):
        text = get(site, path).text
        assert HOSTILE not in text
        assert HOSTILE in unescape(text), path
    page = unescape(get(site, f"/results/{site.stored.hostile}").text)
    assert harmless(RIGHT_TO_LEFT)[:12] in page
    assert RIGHT_TO_LEFT[0] not in page, "a change of direction is left out"


def test_the_page_shows_what_the_json_has(site: Site) -> None:
    (board,) = site.served.client.get("/v1/leaderboard?best=true&model=preset:gpt2").json()["boards"]
    assert {row["hardware"] for row in board["rows"]} == {row["hardware"] for row in board["baselines"]}
    text = get(site, "/?model=preset:gpt2").text
    places = [text.index(f"/results/{row['result_id']}") for row in board["rows"]]
    assert places == sorted(places)
    assert text.count('class="tie"') == 2  # the two GPUs, whose intervals overlap
    assert "9.2" in text


def test_the_page_of_a_job_has_the_headline_and_the_columns_of_the_terminal_s_table(site: Site) -> None:
    job = site.stored.ladder
    attribution = Attribution.model_validate(site.served.client.get(f"/v1/jobs/{job}").json()["attribution"])
    results = site.served.client.get(f"/v1/jobs/{job}/results").json()["results"]
    grid = brief_grid("", attribution, results, TABLE_WIDTH)
    page = unescape(get(site, f"/jobs/{job}").text)
    assert grid.title in page
    assert {"weights (MB)", "top-1 (%)", "KLD (nat)"} <= {column.heading for column in grid.columns}
    cells = re.findall(r'<td data-label="(.*?)".*?>(.*?)</td>', page)
    for number, column in enumerate(grid.columns[1:], 1):
        shown = [cell for heading, cell in cells if heading == (column.heading or "Mark")]
        assert shown == [row[number] for row in grid.rows], column.heading


def test_the_feed_has_the_bests(site: Site) -> None:
    feed = ElementTree.fromstring(get(site, "/feed.atom").content)
    entries = feed.findall(f"{ATOM}entry")
    assert len(entries) == 9
    titles = [entry.findtext(f"{ATOM}title") or "" for entry in entries]
    assert any("by native_decode on 1x NVIDIA H100" in title for title in titles)
    assert all((entry.findtext(f"{ATOM}id") or "").startswith("urn:uuid:") for entry in entries)


def test_a_badge_may_stand_on_any_page(site: Site) -> None:
    answer = get(site, f"/badge/{site.stored.best}.svg")
    assert answer.headers["cross-origin-resource-policy"] == "cross-origin"
    words = ElementTree.fromstring(answer.content).findtext("{http://www.w3.org/2000/svg}title") or ""
    assert words.startswith("OptiGPU: 4.8")
    assert words.endswith("x on EPYC 9654")
    hostile = ElementTree.fromstring(get(site, f"/badge/{site.stored.hostile}.svg").content)
    assert hostile.find("{http://www.w3.org/2000/svg}script") is None
    assert "not valid" in get(site, f"/badge/{site.stored.invalid}.svg").text


def test_a_shared_result_has_a_picture(site: Site) -> None:
    page = get(site, f"/results/{site.stored.best}").text
    assert f'property="og:image" content="{site.url}/results/{site.stored.best}/image.png"' in page
    for result in (site.stored.best, site.stored.hostile):
        png = get(site, f"/results/{result}/image.png").content
        assert png.startswith(b"\x89PNG")
        assert struct.unpack(">II", png[16:24]) == (1200, 630)


def test_the_reader_s_prices_give_the_price_of_tokens(site: Site) -> None:
    """30,000 over three years at 1,120 tokens/s is 0.28 for a million; 300 W at 0.25 for a kilowatt-hour beside it."""
    board = site.stored.board
    found = site.served.client.get(f"/v1/leaderboard?workload={board}&limit=200").json()["boards"][0]["rows"]
    row = next(each for each in found if each["j_per_token"] is None and each["rank"])
    price = 1e6 * (30_000 / (3 * 365.25 * 86_400) + 300 * 0.25 / 3.6e6) / row["value"]["value"]
    text = get(site, f"/pareto?workload={board}&over=price&hardware_price=30000&kwh=0.25&watts=300").text
    start = text.index(f'/results/{row["result_id"]}"', text.index("Price and energy"))
    line = text[start:].partition("</tr>")[0]
    assert f">{price:.3g}<" in line
    assert "from your watts" in line
