"""Every curl line of the README, run against a real embedded service; and its examples of the library."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.service import embedded_service
from tests.readme import blocks

pytestmark = pytest.mark.slow

ADDRESS = "http://127.0.0.1:8000"
MEASURE = '"measure": {"replicates": 1, "min_seconds": 0.2, "max_seconds": 2}'
QUICK = (
    '"measure": {"replicates": 1, "min_seconds": 0.05, "max_seconds": 1, "rel_ci": 1, "meters": ["latency"]}'
)
STRICT = 'set -eu -o pipefail\ncurl() { echo "+ curl $*" >&2; command curl --fail-with-body "$@"; echo; }\n'


@pytest.fixture(scope="module")
def script() -> str:
    """The block of shell commands that talks to the service. Its job takes less time and does not wait for quiet."""
    (script,) = blocks("bash")
    assert script.count("curl -s") >= 15
    assert MEASURE in script
    return script.replace(MEASURE, f'{QUICK}, "limits": {{"wait_for_quiet_s": 0}}')


def test_every_curl_line_of_the_readme_works(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTIGPU_DATA_DIR", str(tmp_path / "data"))
    with embedded_service(tmp_path / "service.log") as url:
        assert ADDRESS in script
        ran = subprocess.run(
            ["bash", "-c", STRICT + script.replace(ADDRESS, url)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stderr.count("+ curl") == script.count("curl -s")
    assert "event: finished" in ran.stdout
    assert len(json.loads((tmp_path / "results.json").read_text())["results"]) == 2


def test_the_library_s_example_works_with_a_smaller_model(tmp_path: Path) -> None:
    """And in less time: that it works is all that is asked."""
    (source,) = [block for block in blocks("python") if "from optigpu.run import run" in block]
    for written, smaller in (
        ("preset:gpt2", "preset:tiny-llama-test"),
        ('"new_tokens": 64', '"new_tokens": 8'),
        ('"measure": {"replicates": 1, "min_seconds": 1, "max_seconds": 10}', QUICK),
    ):
        assert written in source
        source = source.replace(written, smaller)
    ran = subprocess.run(
        [sys.executable, "-c", source],
        env=os.environ | {"OPTIGPU_DATA_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    baseline, int8 = ran.stdout.splitlines()[-2:]
    assert baseline == "baseline the baseline"
    assert float(int8.removeprefix("int8_weight_only ")) > 0


def test_the_operator_s_example_writes_text() -> None:
    """Without its ten seconds of calibration, which tests/engine looks at."""
    (source,) = [block for block in blocks("python") if "new_decoder" in block]
    calibrated = 'NativeDecode(weights="w4")'
    assert calibrated in source
    source = source.replace(calibrated, 'NativeDecode(weights="w4", calibration="none")')
    ran = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.split()) > 5
