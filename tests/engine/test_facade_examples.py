"""The examples of docstrings, docs/library.md, benchmarks/run_all.py and notebooks, run as they stand."""

import doctest
import os
import pkgutil
import runpy
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import nbformat
import pytest
import torch
from cuda_optimizer import CUDAKernelOptimizer
from gpu_poor import make_it_work_hybrid, quantize
from gpu_profiler import GPUProfiler
from nbclient import NotebookClient
from quantized_linear import QuantizedLinear

import optigpu
from optigpu import facade
from optigpu.exports import EXPORTS
from tests.breadth import spread
from tests.engine.sessions import BRIEF
from tests.pages import LIBRARY, ROOT, blocks
from tests.wheels import built, installed

FACADE = [each.name for each in pkgutil.walk_packages(facade.__path__, f"{facade.__name__}.")]
MODULES = ["gpu_poor.examples.demo", *FACADE]


@pytest.mark.usefixtures("forked_children")
@pytest.mark.slow
@pytest.mark.parametrize("name", spread(MODULES))
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of their own, where they may write."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPTIGPU_DATA_DIR", str(tmp_path / "data"))
    ran = doctest.testmod(import_module(name), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert ran.attempted or name not in EXPORTS.values(), f"{name} has no example"
    assert not ran.failed


def block_with(text: str) -> str:
    (source,) = [block for block in blocks(LIBRARY, "python") if text in block]
    return source


@pytest.mark.slow
@pytest.mark.usefixtures("own_lock", "forked_children")
def test_the_example_of_any_module_works(capsys: pytest.CaptureFixture[str]) -> None:
    exec(block_with("DeepLearningBenchmark"), {})
    shown = capsys.readouterr().out
    assert shown.index("=== eager ===") < shown.index("=== training ===") < shown.index("after: host")


@pytest.mark.slow
@pytest.mark.usefixtures("own_lock", "forked_children")
def test_the_example_of_loaded_models_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In less time, and without the products, which the founding code measures in another test, and one precision."""
    source = block_with("BenchmarkEngine")
    for written, less in (
        ("engine.run_matmul_suite()\n", ""),
        ('("fp32", "int8", "native")', '("int8", "native")'),
        ("label=precision)", "label=precision, new_tokens=8, seconds=0.05)"),
    ):
        assert written in source
        source = source.replace(written, less)
    monkeypatch.chdir(tmp_path)
    exec(source, {})
    assert "native" in capsys.readouterr().out
    assert (tmp_path / "results" / "inference.svg").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    "marks",
    [
        ("import quantize", "import accelerate"),
        ("linear_q =",),
        ("get_fused_int4_gemm_config",),
        ("compare_checkpointing(",),
    ],
)
def test_another_example_of_the_page_works(marks: tuple[str, ...]) -> None:
    """The second goes on with the names of the first."""
    exec("\n".join(map(block_with, marks)), {})


@pytest.mark.slow
@pytest.mark.usefixtures("own_lock", "forked_children")
@pytest.mark.long
def test_run_all_measures_prints_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("optigpu.facade.engine.brief", lambda _: BRIEF)
    monkeypatch.setattr(sys, "argv", ["run_all.py", "--output", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "benchmarks" / "run_all.py"), run_name="__main__")
    assert ended.value.code == 0
    assert "RTX 5090" in capsys.readouterr().out
    assert {"results.json", "matmul.png"} <= {path.name for path in tmp_path.iterdir()}


def test_they_are_the_library_s_own() -> None:
    assert (quantize, make_it_work_hybrid) == (optigpu.quantize, optigpu.make_it_work_hybrid)
    assert (GPUProfiler, CUDAKernelOptimizer) == (optigpu.GPUProfiler, optigpu.CUDAKernelOptimizer)
    assert QuantizedLinear is optigpu.QuantizedLinear


@pytest.mark.slow
def test_profiling_planning_and_a_quantized_layer_as_they_are_shown() -> None:
    model, input_tensor, weights = torch.nn.Linear(64, 32), torch.randn(4, 64), torch.randn(32, 64)
    profiler = GPUProfiler(gpu_model="A100")
    result = profiler.profile_model_forward(model, input_tensor, "FP16")
    cuda_opt = CUDAKernelOptimizer(gpu_model="A100")
    cuda_opt.print_optimization_summary()
    linear_q = QuantizedLinear(64, 32)
    linear_q.quantize_weights(weights)
    output = linear_q(input_tensor)
    assert result.precision == "FP16"
    assert output.shape == (4, 32)


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
