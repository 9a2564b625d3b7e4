"""What the pages send: small, kept, refused in words, and the same as the JSON API."""

import gzip
import struct
from html import unescape
from xml.etree import ElementTree

import httpx
import pytest

from optigpu.vocabulary import harmless
from tests.browser.conftest import Site
from tests.browser.stored import HOSTILE, RIGHT_TO_LEFT, paths
from tests.service.pages import Page

pytestmark = pytest.mark.slow

BROWSER = {"Accept": "text/html,application/xhtml+xml"}
MOST_BYTES = 60_000
ATOM = "{http://www.w3.org/2005/Atom}"


def get(site: Site, path: str, **headers: str) -> httpx.Response:
    return site.served.client.get(path, headers=BROWSER | headers)


def test_the_first_page_with_all_of_its_files_is_small(site: Site) -> None:
    page = get(site, "/")
    files = [link for link in page.text.split('"') if link.startswith("/static/")]
    assert len(files) >= 5
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
        page = Page(get(site, path).text)
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
