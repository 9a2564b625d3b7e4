"""The same mistake has the same answer on the command line, over HTTP, in a file, and in the library."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from optigpu.cli import main
from optigpu.client import Client
from optigpu.job.spec import JobSpec
from optigpu.measure import run
from optigpu.vocabulary import ServiceError, SpecError
from tests.service.serving import Served

GENERATE: dict[str, Any] = {"workload": {"kind": "generate"}, "model": "preset:gpt2", "device": "cpu"}
MATMUL: dict[str, Any] = {"workload": {"kind": "matmul"}, "device": "cpu"}
DOCUMENTS = [
    ({"measure": {"replicas": 5}}, "measure.replicas: Unknown field 'replicas'. Did you mean replicates? Valid:"),
    ({"workload": {}}, "workload.kind: This field is required. Valid: attention,"),
    ({"stack": ["bf16"]}, "stack.0: 'bf16' is not an object."),
    ({"measure": {"replicates": [3]}}, "measure.replicates: A list is not a whole number."),
    ({"measure": {"raise_priority": "perhaps"}}, "measure.raise_priority: 'perhaps' is not true or false."),
    ({"device": None}, "device: null is not one of them. Valid: cpu, cuda, mps, rocm, xpu."),
]  # fmt: skip
"""Mistakes that only JSON allows: what is changed of a good job."""
Command = Callable[..., tuple[int, str, str]]


class Mistake(NamedTuple):
    """What is written on the command line, the same as JSON, and how the answer begins."""

    flags: str
    document: dict[str, Any]
    answer: str


def generate(flags: str, answer: str, **fields: Any) -> Mistake:
    return Mistake(flags, GENERATE | fields, answer)


def matmul(flags: str, answer: str, **fields: Any) -> Mistake:
    return Mistake(f"--workload matmul {flags}", MATMUL | fields, answer)


MISTAKES = [
    # names
    Mistake(
        "--workload matmull",
        MATMUL | {"workload": {"kind": "matmull"}},
        "workload.kind: Unknown name 'matmull'. Did you mean matmul? Valid: matmul, attention,",
    ),
    generate(
        "--beside lama_cpp/gguf",
        "beside.0.backend: Unknown value 'lama_cpp'. Did you mean llama_cpp or ik_llama_cpp? Valid:",
        beside=[{"backend": "lama_cpp", "stack": [{"name": "gguf"}]}],
    ),
    generate("--model preset:gtp2", "model: Unknown preset 'gtp2'. Did you mean gpt2", model="preset:gtp2"),
    # numbers
    generate(
        "--replicates 1.5",
        "measure.replicates: '1.5' is not a whole number.",
        measure={"replicates": "1.5"},
    ),
    generate(
        "--rel-ci 0", "measure.rel_ci: 0 is too small; it must be more than 0.", measure={"rel_ci": 0.0}
    ),
    # texts
    generate("--tags two,a-b,c+d", "tags.2: 'c+d' does not fit the pattern", tags=["two", "a-b", "c+d"]),
    # what does not fit together
    generate(
        "--stack bf16,fp16",
        "stack: bf16 and fp16 exclude each other",
        stack=[{"name": "bf16"}, {"name": "fp16"}],
    ),
    matmul("--model preset:gpt2", "model: matmul runs no model; leave the field out.", model="preset:gpt2"),
    # what a plan comes to
    generate(
        "--timeout 4 --min-seconds 5",
        "limits.timeout_s: 1 variant of at least 5 s each take more than the limit of 4 s;",
        limits={"timeout_s": 4},
        measure={"min_seconds": 5},
    ),
]


@pytest.fixture
def optigpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """Runs the command in this process: its exit status, and what it prints on stdout and stderr."""
    monkeypatch.setenv("OPTIGPU_DATA_DIR", str(tmp_path / "data"))

    def command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["optigpu", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        printed = capsys.readouterr()
        return int(exit_.value.code or 0), printed.out, printed.err

    return command


def library(document: Any) -> str:
    """What `run` raises for it; the program that would measure does not exist."""
    with pytest.raises(SpecError) as caught:
        run(document, lambda _: None, program=["no-such-program"])
    return str(caught.value)


def service(served: Served, document: dict[str, Any]) -> str:
    """What the client says of the service's answer, which is 422."""
    with Client(served.url) as client, pytest.raises(ServiceError) as caught:
        client.submit(document)
    assert caught.value.status == 422
    return str(caught.value)


def file_of(document: dict[str, Any], folder: Path) -> str:
    path = folder / "job.json"
    path.write_text(json.dumps(document))
    return str(path)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.flags)
def test_a_mistake_has_one_answer(
    mistake: Mistake, optigpu: Command, any_service: Served, tmp_path: Path
) -> None:
    answer = library(mistake.document)
    assert answer.startswith(mistake.answer)
    assert "\n" not in answer
    assert service(any_service, mistake.document) == answer
    device = () if "--device" in mistake.flags else ("--device", "cpu")
    flags = [word for word in mistake.flags.split(" ") if word]
    for arguments in ((*flags, *device), (file_of(mistake.document, tmp_path),)):
        status, out, err = optigpu("run", *arguments)
        assert (status, out) == (2, "")
        assert err.splitlines()[-1] == f"Error: {answer}"


@pytest.mark.parametrize(("change", "begin"), DOCUMENTS, ids=lambda part: str(part)[:40])
def test_a_mistake_in_json_has_one_answer(
    change: dict[str, Any], begin: str, optigpu: Command, any_service: Served, tmp_path: Path
) -> None:
    document = GENERATE | change
    answer = service(any_service, document)
    assert begin in answer
    assert optigpu("run", file_of(document, tmp_path)) == (2, "", f"Error: {answer}\n")
    assert library(document) == answer


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is not JSON: "),
        ("workload:\n  kind: matmul\n", "is not JSON: "),
        ('{"seed": 1', "is not JSON: "),
        ("[" * 100_000, "is n"),
    ],
    ids=lambda part: part[:12],
)
def test_what_is_no_json_is_refused_everywhere(
    text: str, why: str, optigpu: Command, any_service: Served, tmp_path: Path
) -> None:
    """Two parsers, each with its own words for the place."""
    path = tmp_path / "job.json"
    path.write_text(text)
    status, out, err = optigpu("run", str(path))
    assert (status, out) == (2, "")
    assert err.startswith(f"Error: {path} {why}")
    posted = any_service.client.post("/v1/jobs", content=text, headers={"Content-Type": "application/json"})
    assert posted.status_code == 400
    assert posted.json()["detail"].startswith("The body is not JSON: ")


def test_a_file_with_a_key_that_occurs_twice_is_refused(optigpu: Command, tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text('{"seed": 1, "seed": 2}')
    assert optigpu("run", str(path))[2] == f"Error: {path} is not JSON: the key 'seed' occurs twice.\n"


@pytest.mark.parametrize("given", ["generate", None, [GENERATE]])
def test_a_job_that_is_no_object_is_said_in_the_library(given: Any) -> None:
    assert library(given).endswith(" is not an object.")


def test_every_way_to_make_a_job_raises_the_same_error() -> None:
    said = "measure.replicates: 0 is too small; the least is 1."
    wrong = GENERATE | {"measure": {"replicates": 0}}
    for make in (
        lambda: JobSpec(**wrong),
        lambda: JobSpec.model_validate(wrong),
        lambda: JobSpec.model_validate_json(json.dumps(wrong)),
    ):
        with pytest.raises(SpecError) as caught:
            make()
        assert str(caught.value) == said
        assert caught.value.__cause__ is None
        assert isinstance(caught.value, ValueError), "as pydantic's own error is"
    assert JobSpec(**GENERATE) == JobSpec.model_validate(GENERATE)


def test_several_mistakes_are_as_many_lines(optigpu: Command, any_service: Served) -> None:
    document = GENERATE | {"measure": {"replicates": 0, "rel_ci": 2.0}, "seed": -1}
    answer = library(document)
    assert answer.splitlines() == [
        "seed: -1 is too small; the least is 0.",
        "measure.replicates: 0 is too small; the least is 1.",
        "measure.rel_ci: 2 is too large; the most is 1.",
    ]
    assert service(any_service, document) == answer
    flags = ("--replicates", "0", "--rel-ci", "2", "--seed", "-1", "--device", "cpu")
    assert optigpu("run", *flags) == (2, "", f"Error: {answer}\n")
