"""Chromium for the tests: the machine's own, else the one that apt-get installs."""

from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

from tests.servers.process import Machine, this_machine
from tests.servers.rule import apt_installs

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
ADVICE = (
    "These tests need Chromium: install it (Debian: apt-get install --no-install-recommends chromium; "
    "macOS: brew install --cask chromium)."
)
QUIET = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)
"""A browser of root that asks nobody for anything."""


class NoChromiumError(Exception):
    """There is no Chromium, and no way to one."""


def program(machine: Machine) -> str:
    """Where Chromium is; it is installed if needed. Raises NoChromiumError."""
    found = _found(machine) or (_found(machine) if apt_installs("chromium", machine) else None)
    if found is None:
        raise NoChromiumError(ADVICE)
    return found


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser without a window. Raises NoChromiumError."""
    path = program(this_machine())
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(QUIET))
        yield browser
        browser.close()


def _found(machine: Machine) -> str | None:
    return next((path for name in PROGRAMS if (path := machine.program(name))), None)
