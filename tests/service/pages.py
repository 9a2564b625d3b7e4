"""Pages as a browser without scripts has them: what they link to, fetch and run, and their forms with their seals."""

import re
from collections.abc import Mapping
from html import unescape
from html.parser import HTMLParser

import httpx

from tests.service.serving import Served

FETCHES = {"script", "link", "img", "iframe", "object", "embed", "video", "audio", "base"}
OURS = ("/static/", "/feed.atom", "/badge/")
HTML = {"Accept": "text/html"}


class Page(HTMLParser):
    """What a page links to, and what it would fetch or run that is no file of the service."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.from_elsewhere: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes links, ids, and whatever loads or runs something else."""
        given = dict(attrs)
        source = given.get("src") or given.get("href") or ""
        # A link to a part of the page itself says what is waited for, and fetches nothing.
        fetched = tag in FETCHES and not source.startswith((*OURS, "#"))
        if fetched or tag == "style" or any(name.startswith("on") or name == "style" for name in given):
            self.from_elsewhere.append(f"{tag} {attrs}")
        if tag == "a":
            self.links.append(given["href"] or "")
        self.ids.add(given.get("id") or "")


class Browser:
    """Reads pages and sends their forms, as a person would."""

    def __init__(self, service: Served, **headers: str) -> None:
        self.client = httpx.Client(base_url=service.url, headers=HTML | headers, timeout=30)

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def read(self, path: str, status: int = 200) -> str:
        """The text of a page."""
        answer = self.client.get(path)
        assert answer.status_code == status, answer.text
        return answer.text

    def send(
        self, page: str, path: str, fields: Mapping[str, str | list[str]] | None = None, **headers: str
    ) -> httpx.Response:
        """Sends the form of a page, with the seal that stands on it."""
        seal = seal_on(self.read(page))
        return self.client.post(path, data={"csrf": seal, **(fields or {})}, headers=headers)

    def sign_in(self, key: str, page: str = "/login") -> httpx.Response:
        """Signs in with a key."""
        return self.send(page, "/login", {"key": key, "next": "/jobs"})


def seal_on(text: str) -> str:
    """The seal of the forms of a page."""
    found = re.search(r'name="csrf" value="([0-9a-f]{64})"', text)
    assert found is not None, "the page has no form"
    return found[1]


def text_of(page: str, element_id: str) -> str:
    """What an element without others in it says."""
    found = re.search(rf'id="{re.escape(element_id)}"[^>]*>([^<]*)<', page)
    assert found is not None, f"there is no {element_id}"
    return unescape(found[1])
