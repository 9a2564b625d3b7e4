"""The notebooks run from top to bottom on a CPU, and are kept without outputs."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.pages import ROOT
from tests.wheels import built, installed

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LIMIT_S = 300
"""Of a whole notebook on a CPU."""
FIRST = f"""
import sys
sys.path.append({str(ROOT)!r})
from tests.engine.forked import fork_children
fork_children()
"""
"""What runs before a notebook, so that its measuring processes start sooner."""
LAST = "import optigpu; print(optigpu.__file__)"


def read(path: Path) -> nbformat.NotebookNode:
    notebook: nbformat.NotebookNode = nbformat.read(path, as_version=4)
    return notebook


def code(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_both_notebooks_are_there() -> None:
    assert [path.name for path in NOTEBOOKS] == ["GPU_Optimization_Mistral7B.ipynb", "OptiGPU_Demo.ipynb"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path: Path) -> None:
    for cell in code(read(path)):
        assert (cell.outputs, cell.execution_count) == ([], None)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_first_cell_installs_where_the_package_is_missing(path: Path, tmp_path: Path) -> None:
    """An interpreter without packages runs it; what it starts as pip prints its arguments."""
    (tmp_path / "pip.py").write_text("import sys; print(*sys.argv[1:])")
    bare = [sys.executable, "-I", "-S", "-c", code(read(path))[0].source]

    def first_cell(source: str, folder: Path) -> subprocess.CompletedProcess[str]:
        variables = os.environ | {"OPTIGPU_SOURCE": source, "PYTHONPATH": str(tmp_path)}
        return subprocess.run(bare, cwd=folder, env=variables, capture_output=True, text=True)

    assert first_cell("git+https://example.invalid/optigpu", tmp_path).stdout.split()[-1] == (
        "git+https://example.invalid/optigpu"
    )
    assert first_cell("", ROOT / "notebooks").stdout.split() == ["install", "--quiet", str(ROOT)]
    nowhere = first_cell("", tmp_path)
    assert (nowhere.returncode, nowhere.stdout) == (1, "")
    assert "Write where it is to be installed from into SOURCE" in nowhere.stderr


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel installs."""
    return installed(built(tmp_path_factory.mktemp("source")), tmp_path_factory.mktemp("package"))


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(
    path: Path, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nbclient raises what a cell raises. The package is the one that the wheel installs."""
    monkeypatch.setenv("PYTHONPATH", str(package))
    notebook = read(path)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(FIRST))
    notebook.cells.append(nbformat.v4.new_code_cell(LAST))
    NotebookClient(notebook, timeout=LIMIT_S, resources={"metadata": {"path": str(tmp_path)}}).execute()
    cells = code(notebook)
    assert all(cell.execution_count for cell in cells)
    assert cells[-1].outputs[0].text.strip() == str(package / "optigpu" / "__init__.py")
    said = "".join(str(output) for cell in cells for output in cell.outputs)
    assert "image/svg+xml" in said
