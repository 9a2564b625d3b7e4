"""The documentation's code is run: its commands, its curl lines against a real service, its Python."""

import io
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import httpx
import pytest

from examples.service import embedded_service
from optigpu.job import bench
from optigpu.models.held import MODELS_DIR
from tests.engine.processes import optigpu
from tests.engine.sessions import BRIEF
from tests.journeys.machine import DONE, MEASURED
from tests.pages import LIBRARY, README, SERVICE, START, blocks, commands
from tests.service.processes import eventually

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_children")]

ADDRESS = "http://127.0.0.1:8000"
MEASURE = '"measure": {"replicates": 1, "min_seconds": 0.2, "max_seconds": 2}'
QUICK = (
    '"measure": {"replicates": 1, "min_seconds": 0.05, "max_seconds": 1, "rel_ci": 1, "meters": ["latency"]}'
)
QUICK_ARGUMENT = QUICK.replace('"measure": ', "measure=")
WITH_QUALITY = QUICK_ARGUMENT.replace('["latency"]', '["latency", "quality"], "quality": {"tokens": 64}')
STRICT = 'set -eu -o pipefail\ncurl() { echo "+ curl $*" >&2; command curl --fail-with-body "$@"; echo; }\n'
MEASURING = ("run", "ladder", "submit")
MEASURES = tuple(f"optigpu {name}" for name in (*MEASURING, "bench", "replay"))
LASTING = (*MEASURES, "optigpu models get gemma3-270m")
OFTEN = ("--workload matmul", "> ladder.json")
"""Of the commands that measure, those that run each time: what they keep is read by others."""
NEEDS = {"llama_cpp": pytest.mark.llama, "smollm2-135m": pytest.mark.real_model}
QUICK_FLAGS = (
    "--replicates 1 --min-seconds 0.05 --max-seconds 1 --rel-ci 1 --meters latency --wait-for-quiet 0"
)
FEW_TOKENS = "--prompt-tokens 8 --new-tokens 8"
SMALLER = {
    "preset:gpt2": "preset:tiny-llama-test",
    "preset:resnet-50": "preset:tiny-vit-test",
    "bundled:tiny --stack native_decode": "bundled:tiny --stack native_decode:calibration=none",
    "--sizes 1024,2048": "--sizes 64,128",
    "--sizes 512": "--sizes 64",
    "--prompt-tokens 32 --new-tokens 64": "",
    "optigpu bench": "optigpu bench --model preset:tiny-llama-test --precision fp32",
}
"""What the documented commands measure, in less time: that they work is all that is asked."""

SMALL = bench.Sizes((64,), ("float32",), (64,))
"""What a bench measures instead."""


def smaller(command: str) -> str:
    """The command for a machine that has no minutes to spare."""
    for written, less in SMALLER.items():
        command = command.replace(written, less)
    _, name, *_ = command.split()
    if name not in MEASURING:
        return command
    measured, redirect, file = command.partition(" > ")
    tokens = "" if "--workload" in command or "--prompt" in command else FEW_TOKENS
    return f"{measured} {QUICK_FLAGS} {tokens}{redirect}{file}"


def run_shell(script: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"} | variables,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[str]:
    """Its worker has started: what a process uses while it starts would disturb what is measured beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPTIGPU_DATA_DIR", str(folder / "service"))
        with embedded_service(folder / "service.log") as url:
            assert eventually(lambda: httpx.get(f"{url}/v1/workers").json()["workers"])
            yield url


def own_commands() -> Iterator[object]:
    """Those of two pages; those that need something have its mark, and those that last are marked as long."""
    for command in (*commands(START), *commands(LIBRARY)):
        if command.startswith("optigpu "):
            lasts = command.startswith(LASTING) and not any(each in command for each in OFTEN)
            needs = [mark for words, mark in NEEDS.items() if words in command]
            yield pytest.param(command, marks=[*needs, pytest.mark.long] if lasts else needs)


@pytest.mark.parametrize("command", [*own_commands()])
def test_a_documented_command_works(
    command: str, folder: Path, service: str, smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In their order: later ones read what earlier ones have kept. A bench has no flags for how long it measures. A
    real model is there already: tests/engine/test_trained_models.py brings one."""
    monkeypatch.setattr(bench, "brief", lambda _: BRIEF)
    monkeypatch.setattr(bench, "SIZES", dict.fromkeys(bench.SIZES, SMALL))
    data = {"OPTIGPU_DATA_DIR": str(folder / "data"), "OPTIGPU_URL": service}
    if "smollm2" in command:
        data |= {MODELS_DIR: str(smollm2)}
    words, _, file = smaller(command).partition(" > ")
    ran = optigpu(data, *shlex.split(words)[1:], folder=folder)
    assert ran.returncode in (MEASURED if command.startswith(MEASURES) else DONE), ran.stdout + ran.stderr
    assert ran.stdout
    if file:
        (folder / file).write_text(ran.stdout)


def test_every_curl_line_of_the_service_works(service: str, folder: Path) -> None:
    """Its job takes less time and does not wait for quiet."""
    script = "\n".join(blocks(SERVICE, "bash"))
    assert script.count("curl -s") >= 15
    assert MEASURE in script
    assert ADDRESS in script
    script = script.replace(MEASURE, f'{QUICK}, "limits": {{"wait_for_quiet_s": 0}}').replace(
        ADDRESS, service
    )
    ran = run_shell(STRICT + script, folder)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stderr.count("+ curl") == script.count("curl -s")
    assert "event: finished" in ran.stdout
    assert len(json.loads((folder / "results.json").read_text())["results"]) == 2


def run_python(source: str, folder: Path) -> str:
    """What it prints. Its locks are its own: those of an example before were once held for minutes after its end."""
    printed = io.StringIO()
    with (
        tempfile.TemporaryDirectory(dir=folder) as locks,
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(printed),
    ):
        patch.setenv("OPTIGPU_DATA_DIR", str(folder))
        patch.setenv("OPTIGPU_LOCK_DIR", locks)
        exec(compile(source, "the page", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


def test_the_readme_s_example_works(folder: Path) -> None:
    """With a smaller model; its output is a line for each variant, as the page shows."""
    (source,) = blocks(README, "python")
    (shown,) = blocks(README, "")
    for written, less in (
        ("path:smollm2-135m", "bundled:tiny"),
        (
            'measure={"min_seconds": 2, "max_seconds": 10}',
            f'{WITH_QUALITY}, limits={{"wait_for_quiet_s": 0}}',
        ),
    ):
        assert written in source
        source = source.replace(written, less)
    lines = run_python(source, folder).splitlines()
    assert [line.split()[0] for line in lines] == [line.split()[0] for line in shown.splitlines()]
    assert all(float(line.split()[1].removesuffix("x")) > 0 for line in lines)


@pytest.mark.long
def test_the_library_s_example_works_with_a_smaller_model(folder: Path) -> None:
    """And in less time: that it works is all that is asked."""
    (source,) = [block for block in blocks(LIBRARY, "python") if "optigpu.ladder(" in block]
    for written, less in (
        ("preset:gpt2", "preset:tiny-llama-test"),
        ('"new_tokens": 64', '"new_tokens": 8'),
        (
            'measure={"replicates": 1, "min_seconds": 1, "max_seconds": 10}',
            f'{QUICK_ARGUMENT}, limits={{"wait_for_quiet_s": 0}}',
        ),
    ):
        assert written in source
        source = source.replace(written, less)
    baseline, int8 = run_python(source, folder).splitlines()[-2:]
    assert baseline == "baseline the baseline"
    assert float(int8.removeprefix("int8_weight_only ")) > 0


@pytest.mark.long
def test_the_operator_s_example_writes_text(folder: Path) -> None:
    """Without its ten seconds of calibration, which tests/engine looks at."""
    (source,) = [block for block in blocks(LIBRARY, "python") if "new_decoder" in block]
    calibrated = 'NativeDecode(weights="w4")'
    assert calibrated in source
    source = source.replace(calibrated, 'NativeDecode(weights="w4", calibration="none")')
    assert len(run_python(source, folder).split()) > 5
