"""The site of the documentation builds without a network or a warning; its guides state figures that were measured."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from optigpu.claims import baselines
from optigpu.exports import EXPORTS
from optigpu.vocabulary import Document
from tests.pages import ROOT

GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
RESULTS = ROOT / "docs" / "results"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, module_monkeypatch: pytest.MonkeyPatch) -> Path:
    """The built site; a warning stops the build."""
    module_monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    module_monkeypatch.chdir(ROOT)
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder)))
    return folder


@pytest.fixture(scope="module")
def module_monkeypatch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.mark.long
def test_the_site_has_every_page_and_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = {page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")}
    built = {page.relative_to(site) for page in site.rglob("*.html")}
    assert {page for page in pages if page.name != "README.html"} <= built
    loads = re.compile(
        r"""<(?:script|img|iframe)[^>]+src="https?://|<link[^>]+rel="(?:stylesheet|preconnect)"[^>]+http"""
    )
    assert [page for page in built if loads.search((site / page).read_text())] == []


@pytest.mark.long
def test_the_reference_has_every_public_name(site: Path) -> None:
    said = (site / "reference" / "library.html").read_text()
    assert [name for name, module in EXPORTS.items() if f'id="{module}.{name}"' not in said] == []


def rounded_ratios() -> set[str]:
    """The median ratios of the benchmarks of layers, as they are printed, and their shares of bytes."""
    found: set[str] = set()
    for name in ("layers.json", "layers_hybrid.json"):
        document: Document = json.loads((RESULTS / name).read_text())
        for rows in document["tables"].values():
            whole = rows[0]["weight_bytes"]
            for row in rows:
                found |= {f"{row['ratio']:.2f}x", f"{100 * row['weight_bytes'] / whole:.1f}%"}
    return found


MEASURED = "\n".join(
    page.read_text() for page in [*RESULTS.glob("*.md"), *(ROOT / "docs" / "decisions").glob("*.md")]
)


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_a_figure_of_a_guide_was_measured(page: Path) -> None:
    """Those of claims are written as words or have no decimals."""
    figures = set(re.findall(r"\b\d+\.\d+x|\b\d+\.\d%|\b0\.00\d{3}\b", page.read_text()))
    bare = {
        figure
        for figure in figures
        if figure not in rounded_ratios() and figure.removesuffix("x") not in MEASURED
    }
    claimed = {f"{claim.value:g}%" for claim in baselines().claims}
    assert bare - claimed == set()
