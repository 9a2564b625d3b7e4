"""A page as a browser would take it: what it links to, what it would fetch, and what would run."""

from html.parser import HTMLParser

FETCHES = {"script", "link", "img", "iframe", "object", "embed", "video", "audio", "base"}


class Page(HTMLParser):
    """What a page links to, what of it a browser would fetch, and what would run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes links, ids, and whatever loads or runs something."""
        given = dict(attrs)
        if tag in FETCHES or any(name.startswith("on") for name in given):
            self.loads.append(f"{tag} {attrs}")
        if tag == "a":
            self.links.append(given["href"] or "")
        self.ids.add(given.get("id") or "")
