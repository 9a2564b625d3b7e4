"""`python -m tests.browser.screenshots FOLDER`: each page at three widths, for a person to look at."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import Browser, ViewportSize

from tests.browser.chromium import chromium
from tests.browser.stored import fill, paths
from tests.service.serving import serving

WIDTHS = (320, 768, 1280)


def main() -> None:
    """Fills a service of its own with made-up results."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    with (
        TemporaryDirectory() as data,
        serving(f"sqlite:///{data}/optigpu.db") as served,
        chromium() as browser,
    ):
        for name, path in paths(fill(served.database)).items():
            for width in WIDTHS:
                take(browser, served.url + path, folder / f"{name}-{width}.png", width)
            take(browser, served.url + path, folder / f"{name}-dark.png", WIDTHS[-1], dark=True)


def take(browser: Browser, address: str, file: Path, width: int, *, dark: bool = False) -> None:
    """The whole page."""
    size = ViewportSize(width=width, height=900)
    with browser.new_page(viewport=size, color_scheme="dark" if dark else "light") as page:
        page.goto(address)
        page.screenshot(path=file, full_page=True)


if __name__ == "__main__":
    main()
