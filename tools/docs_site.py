"""Hooks of MkDocs: pages that the site has and the repository needs as files alone.

A link from docs/ to a source file leads to a page with that source. The tables of techniques and of metrics and the
reference of the library, with an entry for each public name, are made from the code.
"""

import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from optigpu.exports import EXPORTS
from tools.reference_pages import metrics_page, techniques_page

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SOURCES = "source"
REFERENCE = "reference/library.md"
FURTHER = (
    "optigpu.job.spec.JobSpec",
    "optigpu.measure.run",
    "optigpu.client.Client",
    "optigpu.documents.result",
    "optigpu.vocabulary",
)
"""What the library's pages name beside the public names."""
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
LISTED = ("decisions/", "results/")
"""Folders whose README.md lists their pages."""
LANGUAGES = {".py": "python", ".toml": "toml", ".cpp": "cpp", ".h": "cpp"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Keeps griffe from a warning about `optigpu.__all__`: it is computed, and the reference names each public name."""
    logging.getLogger("mkdocs.plugins.griffe").addFilter(
        lambda record: "optigpu.__all__" not in record.getMessage()
    )
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages."""
    made = {REFERENCE: reference(), "techniques.md": techniques_page(), "metrics.md": metrics_page()}
    for place, content in made.items():
        files.append(File.generated(config, place, content=content))
    for source in sorted(_linked_sources()):
        files.append(File.generated(config, _page_of(source), content=_shown(ROOT / source)))
    config.nav = with_the_others(
        config.nav or [], [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    )
    return files


def with_the_others(nav: list[object], pages: Sequence[str]) -> list[object]:
    """The navigation with a section "More" of the pages that it does not name, but for those of LISTED."""
    named = set(_named(nav))
    others = sorted(page for page in pages if page not in named and not page.startswith(LISTED))
    return [*nav, {"More": others}] if others else nav


def _named(nav: object) -> Iterator[str]:
    """The pages in a navigation, at any depth."""
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        yield from _named(list(nav.values()))
    elif isinstance(nav, list):
        for each in nav:
            yield from _named(each)


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Leads links that leave docs/ to the pages with sources."""
    here = Path(page.file.src_uri).parent

    def led(found: re.Match[str]) -> str:
        path, heading = found[1], found[2] or ""
        place = os.path.normpath(here / path)
        if "://" in path:
            return found[0]
        if place.startswith("../"):
            target = _page_of(place.removeprefix("../"))
            return f"]({os.path.relpath(target, here)}{heading})"
        return found[0]

    return markdown if page.file.src_uri.startswith(SOURCES) else LINK.sub(led, markdown)


def reference() -> str:
    """The page of the public names, for mkdocstrings to fill."""
    public = [f"{module}.{name}" for name, module in sorted(EXPORTS.items())]
    lines = [
        "# The library's reference",
        "",
        "`import optigpu` loads no torch; a name is imported where it is first used. `optigpu.NAME` is each of these:",
        "",
        *(f"::: {name}\n" for name in public),
        "## Below the public names",
        "",
        *(f"::: {name}\n    options:\n      heading_level: 3\n" for name in FURTHER),
        "## Over HTTP",
        "",
        "A running service describes its own API at `/docs`, as OpenAPI at `/openapi.json`, and a job's fields at",
        "`/v1/schema/job`. [The service](../service.md) goes through it with `curl`.",
    ]
    return "\n".join(lines)


def _links() -> Iterator[str]:
    """Where the pages' links lead, relative to the root."""
    for page in DOCS.rglob("*.md"):
        for path, _ in LINK.findall(page.read_text(encoding="utf-8")):
            if "://" not in path:
                yield os.path.relpath(os.path.normpath(page.parent / path), ROOT)


def _linked_sources() -> set[str]:
    return {path for path in _links() if not path.startswith("docs/") and (ROOT / path).is_file()}


def _page_of(source: str) -> str:
    return f"{SOURCES}/{source}.md"


def _shown(path: Path) -> str:
    language = LANGUAGES.get(path.suffix, "text")
    text = path.read_text(encoding="utf-8")
    return f"# {path.relative_to(ROOT)}\n\n`````{language}\n{text}`````\n"
