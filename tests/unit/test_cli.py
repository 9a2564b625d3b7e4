"""The command line: flags become a job, mistakes become one clear sentence and an exit status."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import stamina
import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from optigpu import __version__
from optigpu.cli import app, main
from optigpu.cli.flags import (
    DURATION,
    SIZE,
    Unit,
    job_flags,
    read_quantity,
    section_flags,
    sections,
    workload_flags,
)
from optigpu.cli.options import parse_beside, parse_stack, spec_of
from optigpu.documents.versions import why_none_ranks
from optigpu.job.spec import JobSpec, Limits, PlanName
from optigpu.vocabulary import DeviceKind, SpecError
from optigpu.workloads import WORKLOADS
from tests.unit.made_results import ATTRIBUTION, RESULTS
from tests.unit.scripted_service import Answer, Call, scripted_service
from tests.unit.test_client import JOB_ID, job, stream

COMMANDS = (
    "probe", "techniques", "models", "run", "ladder", "submit", "watch", "jobs", "cancel", "withdraw", "leaderboard",
    "ablation", "recipe", "compare", "replay", "claims", "chart", "convert", "fit", "advise", "search", "batch-scaling",
    "runs", "show", "export", "import",
)  # fmt: skip


class Ran(NamedTuple):
    status: int
    out: str
    err: str


Command = Callable[..., Ran]


@pytest.fixture
def optigpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs the command in this process."""
    monkeypatch.delenv("OPTIGPU_URL", raising=False)

    def command(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["optigpu", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        return Ran(int(exit_.value.code or 0), *capsys.readouterr())

    return command


def on_cpu() -> DeviceKind:
    return DeviceKind.CPU


def spec(**flags: Any) -> JobSpec:
    return spec_of(flags, on_cpu)


@pytest.mark.slow
def test_help_names_every_command(optigpu: Command) -> None:
    ran = optigpu("--help")
    assert ran.status == 0
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    for command in COMMANDS:
        assert f" {command} " in ran.out
        shown = [each for each in group.commands[command].params if not getattr(each, "hidden", False)]
        assert not [each for each in shown if "--json" in each.opts], "one name for one option: --format"
    assert optigpu("run", "--help").status == 0


def test_the_version_is_shown(optigpu: Command) -> None:
    ran = optigpu("--version")
    assert (ran.status, ran.out) == (0, f"optigpu {__version__}\n")


@pytest.mark.parametrize(
    ("kind", "flags", "model", "shapes"),
    [
        ("classify", {"image_size": 192}, "preset:resnet-50", {"image_size": 192}),
        (
            "attention",
            {"lengths": "64,128", "dtype": "bfloat16"},
            None,
            {"lengths": (64, 128), "dtype": "bfloat16"},
        ),
    ],
)
def test_every_workload_has_its_flags_and_a_model_of_its_own(
    kind: str, flags: dict[str, Any], model: str | None, shapes: dict[str, Any]
) -> None:
    made = spec(workload=kind, **flags)
    assert made.model == model
    assert made.workload.model_dump().items() >= shapes.items()


def test_each_field_has_one_flag_and_a_description() -> None:
    flags = [*job_flags(), *workload_flags(), *(flag for name in sections() for flag in section_flags(name))]
    names = [flag.name for flag in flags]
    assert len(names) == len(set(names))
    assert not {"format", "spec_file", "url", "api_key", "watch"} & set(names)
    reached = {f"{name}.{flag.field}" for name in sections() for flag in section_flags(name)}
    reached |= {flag.field for flag in job_flags()} | {f"workload.{flag.field}" for flag in workload_flags()}
    fields = dict(leaves(JobSpec))
    fields |= {f"workload.{name}": field for kind in WORKLOADS.values() for name, field in leaves(kind)}
    assert set(fields) - {"workload.kind"} == reached
    assert [name for name, field in fields.items() if not field.description] == ["workload", "workload.kind"]


def leaves(model: type[BaseModel], within: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every field of a model and of the models within it: "measure.quality.text"."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from leaves(kind, f"{within}{name}.")
        else:
            yield f"{within}{name}", field


def test_flags_reach_the_limits_the_target_and_the_text_of_a_job() -> None:
    made = spec(
        model="bundled:tiny",
        device="cuda",
        gpu="H100",
        min_vram="80GB",
        timeout="1h30m",
        max_seconds="2m",
        max_kld=0.01,
        min_top1=0.9,
        max_variants=4,
        quality_text="wikitext-2",
        quality_tokens=64,
        plan="grid",
        beside=["torch/fp16 as half", "bf16"],
    )
    assert made.target.model_dump() == {"gpu": "H100", "min_vram_bytes": 80 * 10**9}
    assert made.limits == Limits(timeout_s=5400, max_variants=4, max_kld=0.01, min_top1=0.9)
    assert (made.measure.max_seconds, made.plan) == (120, PlanName.GRID)
    assert (made.measure.quality.text, made.measure.quality.tokens) == ("wikitext-2", 64)
    assert [(each.backend, each.label, [t.name for t in each.stack]) for each in made.beside] == [
        ("torch", "half", ["fp16"]),
        ("torch", None, ["bf16"]),
    ]


@pytest.mark.parametrize(
    ("text", "unit", "number"),
    [
        *((text, SIZE, 8 * 10**9) for text in ("8GB", "8 gb", "8000000000", "8000MB")),
        ("1.5GiB", SIZE, 3 * 2**29),
        *((text, DURATION, 5400) for text in ("1h30m", "90m", "5400", "5400s", "1.5h")),
        ("0.25", DURATION, 0.25),
        (2.0, DURATION, 2),
    ],
)
def test_a_quantity_may_have_a_unit(text: str | float, unit: Unit, number: float) -> None:
    assert read_quantity(text, unit, "flag") == number


@pytest.mark.parametrize("text", ["", "GB", "8GX", "8-GB", "1..5GB", "-8GB", "8GB!"])
def test_what_is_no_size_is_one_clear_sentence(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        spec(min_vram=text)
    assert str(caught.value) == f"--min-vram {text}: write bytes, or a size such as 8GB or 512MiB."


def test_a_stack_beside_may_name_its_backend_and_its_label() -> None:
    assert parse_beside(["llama_cpp/", "llama_cpp/gguf:type=Q4_0 as four bits", "bf16, fused_qkv"]) == [
        {"stack": [], "backend": "llama_cpp"},
        {"stack": [{"name": "gguf", "type": "Q4_0"}], "backend": "llama_cpp", "label": "four bits"},
        {"stack": [{"name": "bf16"}, {"name": "fused_qkv"}]},
    ]
    assert parse_beside(["speculative_decoding:draft=path:models/small"]) == [
        {"stack": [{"name": "speculative_decoding", "draft": "path:models/small"}]}
    ]
    assert parse_beside(["lama_cpp/gguf"]) == [{"stack": [{"name": "gguf"}], "backend": "lama_cpp"}]


def test_a_file_is_a_job(tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    path.write_text('{"workload": {"kind": "matmul", "sizes": [64]}, "seed": 3}')
    made = spec_of({}, on_cpu, path, plan="ladder")
    assert (made.seed, made.device, made.plan) == (3, DeviceKind.CPU, PlanName.LADDER)


def test_parameters_follow_the_technique() -> None:
    assert parse_stack("torch_compile:mode=default") == [{"name": "torch_compile", "mode": "default"}]
    assert parse_stack("speculative_decoding:draft=bundled:tiny:lookahead=3") == [
        {"name": "speculative_decoding", "draft": "bundled:tiny", "lookahead": "3"}
    ]
    assert parse_stack("") == []


def test_a_missing_file_says_so(optigpu: Command, tmp_path: Path) -> None:
    ran = optigpu("run", str(tmp_path / "none.json"))
    assert (ran.status, ran.err) == (
        2,
        f"Error: {tmp_path / 'none.json'} cannot be read: No such file or directory.\n",
    )


@pytest.mark.parametrize(
    "command",
    [
        "show", "fit", "convert --allow-random-calibration", "convert --model mobilenet_v2 --images",
        "convert --model mobilenet_v2 --npz", "recipe distillation --output",
    ],
)  # fmt: skip
def test_what_cannot_be_the_name_of_a_file_is_one_sentence(optigpu: Command, command: str) -> None:
    ran = optigpu(*command.split(), "x" * 300)
    assert (ran.status, ran.out, ran.err[:7], ran.err.count("\n")) == (2, "", "Error: ", 1)


def test_a_file_and_flags_exclude_each_other(optigpu: Command, tmp_path: Path) -> None:
    ran = optigpu("run", str(tmp_path / "spec.json"), "--new-tokens", "4")
    assert ran.status == 2
    assert "put --new-tokens into the file" in ran.err


@pytest.mark.parametrize(
    ("command", "form"),
    [
        (("probe",), "table"), (("techniques", "--device", "cpu"), "md"), (("models",), "csv"),
        (("models",), "tex"), (("runs",), "json"),
    ],
)  # fmt: skip
def test_every_list_has_every_form(
    optigpu: Command, command: tuple[str, ...], form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTIGPU_DATA_DIR", str(tmp_path))
    ran = optigpu(*command, "--format", form)
    assert ran.status == 0
    assert command != ("models",) or "gpt2" in ran.out


def finished_job(
    state: str, reason: str | None, results: list[dict[str, Any]] = RESULTS
) -> Callable[[Call], Answer]:
    """A service with one job that has ended."""
    attribution = ATTRIBUTION.model_dump(mode="json")
    ended = job(reason=reason, attribution=attribution if state == "succeeded" else None) | {"state": state}
    spec_document = {
        "workload": {"kind": "generate"} | RESULTS[0]["variant"]["workload"],
        "model": "preset:gpt2",
    }
    report = {"spec": spec_document, "results": results, "attribution": attribution}

    def answer(call: Call) -> Answer:
        if call.path.endswith("/events"):
            return Answer(200, stream(1, 2), "text/event-stream")
        if call.path == "/v1/workers":
            return Answer(200, {"workers": []})
        return Answer(200, report if call.path.endswith("/results") else ended)

    return answer


UNSERVED = {
    "want": "gpu",
    "name": "TPU",
    "sentence": "No live worker has a GPU named TPU; there are: NVIDIA H200.",
}


def test_submit_says_that_nobody_can_take_the_job_and_keeps_it_apart_from_the_id(optigpu: Command) -> None:
    def answer(call: Call) -> Answer:
        return Answer(200, {"workers": []} if call.path == "/v1/workers" else job(unserved=UNSERVED))

    with scripted_service(answer) as (url, _):
        ran = optigpu("submit", "--workload", "matmul", "--url", url)
    assert (ran.status, ran.out) == (0, f"{JOB_ID}\n")
    assert ran.err == f"{UNSERVED['sentence']}\n"


def test_url_and_key_come_from_the_environment(optigpu: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_service(lambda _: Answer(200, job())) as (url, calls):
        monkeypatch.setenv("OPTIGPU_URL", url)
        monkeypatch.setenv("OPTIGPU_API_KEY", "its-key")
        ran = optigpu("cancel", JOB_ID)
    assert ran.out == "The job is queued, and its worker was asked to stop it.\n"
    assert calls[0].headers["authorization"] == "Bearer its-key"


def test_watching_a_job_that_failed_ends_with_status_1_and_the_reason(optigpu: Command) -> None:
    with scripted_service(finished_job("failed", "The worker vanished three times.")) as (url, _):
        ran = optigpu("watch", JOB_ID, "--url", url)
    assert ran.status == 1
    assert ran.err == "The job failed: The worker vanished three times.\n"


@pytest.mark.parametrize(
    ("watching", "reason"),
    [
        (("watch", JOB_ID), None),
        (("watch", JOB_ID), "The time limit of 10 s was reached."),
        (("submit", "--device", "cpu", "--watch"), why_none_ranks([RESULTS[2]])),
    ],
)
def test_watching_a_job_in_which_nothing_can_be_ranked_ends_with_status_3(
    optigpu: Command, watching: tuple[str, ...], reason: str | None
) -> None:
    """And says why once, whether the job's own reason does or, from an older service, does not."""
    with scripted_service(finished_job("succeeded", reason, RESULTS[2:])) as (url, _):
        ran = optigpu(*watching, "--url", url)
    assert ran.status == 3
    said = [
        line for line in ran.err.splitlines() if line.startswith("Nothing that was measured can be ranked: ")
    ]
    assert len(said) == 1
    assert (reason or "") in ran.err


@pytest.mark.parametrize(
    ("form", "asked_for"), [("table", "md"), ("md", "md"), ("csv", "csv"), ("json", None)]
)
def test_the_edge_leaderboard_is_printed_as_the_service_writes_it(
    optigpu: Command, form: str, asked_for: str | None
) -> None:
    page = {"boards": [], "note": "Nothing."}
    with scripted_service(lambda _: Answer(200, page)) as (url, calls):
        flags = ("--metric", "fps", "--board", "esp32s3-n8", "--input", "fixed", "--price", "8.5")
        ran = optigpu("leaderboard", "--edge", *flags, "--include-unranked", "--format", form, "--url", url)
    assert (ran.status, ran.err) == (0, "")
    assert page.items() <= json.loads(ran.out).items()
    asked = "metric=fps&board=esp32s3-n8&input=fixed&include_unranked=true&price=8.5"
    form_asked = f"&format={asked_for}" if asked_for else ""
    assert calls[0].path == f"/v1/edge/leaderboard?{asked}{form_asked}"


def test_the_edge_leaderboard_has_no_latex(optigpu: Command) -> None:
    ran = optigpu("leaderboard", "--edge", "--format", "tex")
    assert (ran.status, ran.out) == (2, "")
    assert "choose one of these" in ran.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--board", "esp32s3-n8"), "--board is an option of the leaderboard of devices; add --edge."),
        (
            ("--edge", "--workload", "matmul", "--clean"),
            "--workload, --clean are options of the leaderboard of workers; leave --edge out.",
        ),
    ],
)
def test_an_option_of_the_other_leaderboard_is_refused(
    optigpu: Command, arguments: tuple[str, ...], sentence: str
) -> None:
    ran = optigpu("leaderboard", *arguments)
    assert (ran.status, ran.out, ran.err) == (2, "", f"Error: {sentence}\n")


def test_nobody_at_the_address_is_status_1_and_says_what_to_do(optigpu: Command) -> None:
    with scripted_service(lambda _: Answer()) as (url, _):
        pass
    with stamina.set_testing(True, attempts=3):
        ran = optigpu("jobs", "--url", url)
    assert (ran.status, ran.out) == (1, "")
    assert "make serve" in ran.err


@pytest.mark.slow
def test_submit_takes_cuda_where_a_living_worker_has_it(optigpu: Command) -> None:
    worker = {
        "id": "w", "host_id": "h", "hardware_class": "1x GPU", "memory_bytes": 1, "backends": ["torch"],
        "version": "0.1.0", "started_at": "2026-01-01T00:00:00Z", "seen_at": "2026-01-01T00:00:00Z",
    }  # fmt: skip

    def posted_device(*, alive: bool) -> str:
        workers = {"workers": [worker | {"device": "cuda", "alive": alive}]}
        answers = {"/v1/workers": Answer(200, workers), "/v1/jobs": Answer(202, job())}
        with scripted_service(lambda call: answers[call.path]) as (url, calls):
            optigpu("submit", "--url", url)
        return str(calls[-1].body["device"])

    assert posted_device(alive=True) == "cuda"
    assert posted_device(alive=False) == "cpu"
