"""A page as a browser would take it: what it links to, what it would fetch, and what would run."""

from html.parser import HTMLParser

FETCHES = {"script", "link", "img", "iframe", "object", "embed", "video", "audio", "base"}
OURS = ("/static/", "/feed.atom", "/badge/")


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
