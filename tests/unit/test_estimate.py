"""The first guess of a job's time is by the size of its model, and a ladder that nobody named is cut by it."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from optigpu.hardware import probe
from optigpu.job.estimate import AUDIT, MAKE, SAMPLE, START, FirstGuess, Plan, guess_of, plan_time
from optigpu.job.plan import SHORT_S, left_out_of_ladder, shortened, variants_of, with_default_stack
from optigpu.job.spec import JobSpec, Variant
from optigpu.models.described import Size, size_of
from optigpu.models.reference import parse_reference
from optigpu.quality.reference import Manifest, Setting, keeps_reference


def job(model: str, *stack: str, **changes: Any) -> JobSpec:
    named = [{"name": name} for name in stack]
    document = {"workload": {"kind": "generate"}, "model": model, "stack": named}
    return JobSpec.model_validate(document | changes)


def variant(model: str, *stack: str, **changes: Any) -> Variant:
    (found,) = variants_of(job(model, *stack, **changes))
    return found


def test_a_plain_model_of_135_million_weights_is_guessed_as_it_was_measured() -> None:
    """On two cores: about 25 tokens a second, 73 s for the whole job of one process with 22 s of preparing."""
    near = "preset:opt-125m"  # 125 million weights
    first = FirstGuess(variant(near))
    assert 2.5 < first.request_s < 10
    seconds = guess_of(job(near), variant(near)).seconds
    assert 30 < sum(seconds.values()) < 150


def test_each_part_grows_with_the_model() -> None:
    parts = [
        guess_of(job(model), variant(model, "torch_compile")).seconds
        for model in ("bundled:tiny", "preset:gpt2", "preset:llama-3.2-1b")
    ]
    for name in (START, MAKE, AUDIT, "memory", "quality"):
        seconds = [each[name] for each in parts]
        assert seconds == sorted(seconds)
        assert seconds[0] < seconds[-1], name
    assert all(5 <= each[SAMPLE] <= 120 for each in parts)


def test_fewer_bytes_and_an_own_loop_are_faster_and_packing_takes_its_time() -> None:
    model = "preset:llama-3.2-1b"
    plain, bf16, packed = (FirstGuess(variant(model, *stack)) for stack in ([], ["bf16"], ["native_decode"]))
    assert plain.request_s > bf16.request_s > packed.request_s
    assert packed.make_s > plain.make_s + 10


def test_other_workloads_are_guessed_too() -> None:
    matmul = JobSpec.model_validate({"workload": {"kind": "matmul", "sizes": [64], "dtypes": ["float32"]}})
    made = plan_time(matmul, variants_of(matmul))
    assert 0 < made.seconds < 200
    image = JobSpec.model_validate({"workload": {"kind": "classify"}, "model": "preset:resnet-50"})
    assert 0 < guess_of(image, variants_of(image)[0]).seconds[START] < 60


def test_the_size_of_a_model_on_disk_is_read_from_its_files_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    monkeypatch.setenv("OPTIGPU_MODELS_DIR", str(tmp_path))
    assert size_of(parse_reference("path:mine")) is None
    (folder / "config.json").write_text('{"model_type": "llama"}')
    tensors = {"a": [10, 20], "b": [10]}
    header = json.dumps({"__metadata__": {}} | {name: {"shape": shape} for name, shape in tensors.items()})
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode())
    assert size_of(parse_reference("path:mine")) == Size(210, 1)


def test_a_kept_reference_is_known_by_what_it_is_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("OPTIGPU_REFERENCES_GB", "1")
    assert not keeps_reference("bundled:tiny", 0, "self", 512)
    about = Setting(
        model="bundled:tiny",
        seed=0,
        text="self",
        tokens=512,
        items=200,
        window=128,
        stride=None,
        vocabulary=10,
        dataset_sha256=None,
    )
    manifest = Manifest(setting=about, origin=None, passages_sha256="", positions=1, compared=1)
    folder = tmp_path / "optigpu" / "references" / "key.reference"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(manifest.model_dump_json())
    assert keeps_reference("bundled:tiny", 0, "self", 512)
    assert not keeps_reference("bundled:tiny", 0, "self", 1024)


def ladder(model: str) -> JobSpec:
    spec = JobSpec.model_validate({"workload": {"kind": "generate"}, "model": model, "plan": "ladder"})
    return with_default_stack(spec, probe())


def plan_of(spec: JobSpec) -> Plan:
    return plan_time(spec, variants_of(spec))


@pytest.mark.parametrize("model", ["bundled:tiny", "preset:gpt2", "preset:gpt2-large"])
def test_a_ladder_that_nobody_named_is_cut_to_about_two_minutes(model: str) -> None:
    whole = ladder(model)
    short = shortened(whole, plan_of)
    assert plan_of(whole).seconds > SHORT_S
    assert plan_of(short).seconds <= SHORT_S or len(short.stack) + len(short.beside) == 1
    assert short.stack or short.beside
    names = [each.name for each in short.stack]
    assert "torch_compile" not in names or "static_kv_cache" in names, "nothing without what it requires"
    said = left_out_of_ladder(whole, short)
    assert said.startswith("To end in about two minutes, this ladder leaves out ")
    assert said.endswith(
        "1 process of each variant instead of 3, for 10 s at most, by requests of 32 new tokens; --stack all "
        "measures all."
    )
    assert all(each.name in said for each in whole.stack if each not in short.stack)


def test_what_fits_stays_whole() -> None:
    whole = ladder("bundled:tiny")
    assert shortened(whole, lambda _: Plan(whole, {}, replicates=1, prepare_s=SHORT_S)) == whole
    assert left_out_of_ladder(whole, whole) == ""
