"""Which environment variables a measuring process gets, and which of them its result records."""

import os
import shlex
import tempfile
from pathlib import Path

import pytest

import optigpu
from optigpu.conductor.processes.confinement import (
    child_variables,
    recorded_variables,
    secrets_of,
    temporary_folder,
)
from optigpu.documents.fields import closest
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec, Variant
from optigpu.variables import KNOWN, unknown_variables

SECRETS = {"HF_TOKEN": "hf_secret", "HF_TOKEN_PATH": "/token", "HUGGING_FACE_HUB_TOKEN": "hf_older"}


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name not in ("PATH", "HOME"):
            monkeypatch.delenv(name)


def test_what_is_not_listed_is_neither_passed_on_nor_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"OPTIGPU_DATABASE_URL", "OPTIGPU_API_KEY", "LD_PRELOAD", "MKL_NUM_THREADS", "TORCH_LOGS"}
    for name in names:
        monkeypatch.setenv(name, "1")
    assert not names & set(child_variables(1))
    assert recorded_variables() == {}


@pytest.mark.parametrize(
    ("given", "recorded"),
    [
        (
            {
                "CC": "clang",
                "CUDA_LAUNCH_BLOCKING": "1",
                "LD_LIBRARY_PATH": "/opt/blas",
                "NVIDIA_TF32_OVERRIDE": "0",
                "OPTIGPU_DECODE_CACHE_GB": "1",
            },
            True,
        ),
        (
            {
                "CUDA_VISIBLE_DEVICES": "1",
                "HF_HOME": "/models",
                "NVIDIA_REQUIRE_CUDA": "cuda>=13.0",
                "LANG": "C",
                "HTTPS_PROXY": "http://me:secret@proxy",
            },
            False,
        ),
    ],
    ids=["may change a figure", "selects a GPU or a folder"],
)
def test_what_is_passed_on_is_recorded_where_it_may_change_a_figure(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], recorded: bool
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert given.items() <= child_variables(1).items()
    assert recorded_variables() == (given if recorded else {})


def test_secrets_reach_only_a_process_that_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (SECRETS | {"CUDA_API_KEY": "x", "HF_SECRET": "x"}).items():
        monkeypatch.setenv(name, value)
    assert not {*SECRETS, "CUDA_API_KEY", "HF_SECRET"} & set(child_variables(1))
    given = child_variables(1, secrets=SECRETS)
    assert SECRETS.items() <= given.items()
    assert not {"CUDA_API_KEY", "HF_SECRET"} & set(given), "nobody said what needs these"
    assert recorded_variables() == {}


@pytest.mark.parametrize(
    ("model", "stack", "needs"),
    [
        ("preset:tiny-llama-test", [], False),
        ("bundled:tiny", [{"name": "bf16"}], False),
        ("meta-llama/Llama-3.2-1B", [], True),
        ("bundled:tiny", [{"name": "speculative_decoding", "draft": "some/draft"}], True),
    ],
)
def test_a_model_of_the_hub_needs_them(model: str, stack: list[dict[str, str]], needs: bool) -> None:
    assert secrets_of(variant(model, stack)) == (set(SECRETS) if needs else set())


def test_a_server_s_key_reaches_the_process_that_asks_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTIGPU_ENDPOINT_KEYS", "127.0.0.1:8000=secret")
    asking = {"backend": "endpoint", "endpoint": "http://127.0.0.1:8000#tiny"}
    document = {"workload": {"kind": "generate"}, "model": "bundled:tiny"} | asking
    (made,) = variants_of(JobSpec.model_validate(document))
    assert secrets_of(made) == {"OPTIGPU_ENDPOINT_KEYS"}
    assert "OPTIGPU_ENDPOINT_KEYS" not in child_variables(1)
    assert child_variables(1, secrets=secrets_of(made))["OPTIGPU_ENDPOINT_KEYS"]
    assert recorded_variables() == {}


def variant(model: str, stack: list[dict[str, str]]) -> Variant:
    document = {"workload": {"kind": "generate"}, "model": model, "stack": stack}
    (made,) = variants_of(JobSpec.model_validate(document))
    return made


def test_the_import_path_is_recorded_without_this_package_and_without_the_user_s_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = str(Path(optigpu.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", source)
    assert recorded_variables() == {}
    assert child_variables(1)["PYTHONPATH"] == source
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setenv("PYTHONPATH", f"/home/alice/patched{os.pathsep}{source}")
    assert recorded_variables() == {"PYTHONPATH": "~/patched"}
    assert child_variables(1)["PYTHONPATH"] == f"{source}{os.pathsep}/home/alice/patched"


def test_without_a_home_folder_a_process_has_one_in_the_data_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", "/dev/null")
    monkeypatch.setenv("OPTIGPU_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/local/lib")
    given = child_variables(1)
    assert (given["HOME"], given["OPTIGPU_DATA_DIR"]) == (str(tmp_path / "home"), str(tmp_path))
    assert given["TRITON_CACHE_DIR"] == str(tmp_path / "home" / ".cache" / "optigpu" / "triton")
    assert recorded_variables() == {"LD_LIBRARY_PATH": "/usr/local/lib"}


def test_compilers_get_paths_that_their_command_lines_can_hold(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torch.compile quotes none."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("OPTIGPU_DATA_DIR", str(tmp_path / "my 'data'"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / 'my "cache"'))
    given = child_variables(1)
    temporary = temporary_folder()
    for path in (given["TORCHINDUCTOR_CACHE_DIR"], given["TRITON_CACHE_DIR"], str(temporary)):
        assert shlex.split(path) == [path]
    assert temporary.resolve().parent == tmp_path / "my 'data'" / "scratch"
    assert Path(given["TRITON_CACHE_DIR"]).parent.samefile(tmp_path / 'my "cache"' / "optigpu")
    temporary.rmdir()


NAMES = ("int8_weight_only", "int8_dynamic", "llm_int8", "torch_compile", "bf16", "GPT-2")


@pytest.mark.parametrize(
    ("given", "close"),
    [
        ("int8", ["int8_dynamic", "int8_weight_only", "llm_int8"]),
        ("torch_compil", ["torch_compile"]),
        ("TORCH_COMPILE", ["torch_compile"]),
        ("gpt2", ["GPT-2"]),
        ("weight", ["int8_weight_only"]),
        ("zzz", []),
        ("bf8", []),
        ("bf", ["bf16"]),
        ("mp", []),
        ("", []),
    ],
)
def test_what_begins_so_comes_before_what_contains_it_and_what_is_alike(given: str, close: list[str]) -> None:
    assert closest(given, NAMES) == close


def test_a_misspelled_setting_is_named_with_the_one_that_was_meant() -> None:
    assert unknown_variables(["OPTIGPU_LAESE_S", "PATH"]) == [
        "OPTIGPU_LAESE_S is not a setting and changes nothing; did you mean OPTIGPU_LEASE_S?"
    ]


def test_what_is_known_is_not_named_in_whatever_case() -> None:
    assert unknown_variables([*KNOWN, "optigpu_port", "OTHER_SETTING"]) == []
