"""Packed weights are kept as they were, found again by what they were made of, and within a bound."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedConfig

import optigpu
from optigpu.models.loading.footprint import weight_bytes
from optigpu.models.loading.load import load_model
from optigpu.models.reference import parse_reference
from optigpu.ops.decode.cpu.arena import Arena, aligned
from optigpu.surgery.bit_allocation import BitDecision, decide, least_bytes
from optigpu.surgery.places import linear_places
from optigpu.techniques.decoding.native_decode import NativeDecode
from optigpu.techniques.decoding.native_decode import packed_store as decode_store
from optigpu.techniques.decoding.native_decode.calibration import KeptMoments
from optigpu.techniques.decoding.native_decode.packed_store import (
    BOUND,
    key_of,
    load,
    pack_or_restore,
    save,
)
from optigpu.techniques.decoding.native_decode.packing import (
    Calibration,
    Kept,
    Packer,
    packed_tensors,
)
from optigpu.techniques.decoding.native_decode.prediction import PackingOptions
from tests.breadth import spread
from tests.engine.caches import largest_file
from tests.engine.decoder_models import decoder_of, packed
from tests.engine.tiny_models import prompt, tiny_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")
FACTS = {"decode_layers": [{"layer": "lm_head", "bits": 4}], "decode_bits_per_weight": 4.1, "none": None}
OPTIONS = {"weights": "w4", "group": 32, "device": "cpu"}
TRIES = 15
"""How often each of two processes writes."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where weights are kept; it does not exist yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(BOUND.variable, raising=False)
    return tmp_path / "optigpu" / "decode"


def model(dtype: str = "float32", seed: int = 0) -> Any:
    return load_model(parse_reference("preset:tiny-llama-test"), device="cpu", dtype=dtype, seed=seed)


def some(rows: int = 40) -> dict[str, torch.Tensor]:
    """What packing gives: neighbours in an arena, among them, and every type of number."""
    arena = Arena(aligned(rows * 64) + aligned(rows * 8))
    numbers, scale = arena.take((rows, 64), torch.uint8), arena.take((rows, 4), torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    return {
        "h.0.numbers": numbers.random_(0, 256, generator=generator),
        "h.0.scale": scale.normal_(generator=generator),
        "h.0.bias": torch.randn(rows, generator=generator),
        "h.1.numbers": torch.randint(-(2**31), 2**31, (rows, 4), generator=generator).to(torch.int32),
        "turned": torch.randn(8, rows, generator=generator).T,
        "one": torch.tensor(3.0),
        "none": torch.empty(0, 4),
    }


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert found[name].equal(tensor)


def tensors_of(key: str) -> dict[str, torch.Tensor]:
    kept = load(key)
    assert kept is not None
    return kept.tensors


def names_in(folder: Path) -> set[str]:
    """All but the lock, which filelock may leave or take away."""
    return {path.name for path in folder.iterdir()} - {"decode.lock"}


def bound(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setenv(BOUND.variable, repr(size / 2**30))
    assert BOUND.most_bytes() == size


def test_what_was_saved_comes_back_with_its_facts() -> None:
    assert load("key") is None
    assert save("key", some(), FACTS)
    kept = load("key")
    assert kept is not None
    assert kept.facts == FACTS
    assert_same(kept.tensors, some())
    assert load("other") is None


def test_what_is_mapped_outlives_its_file_and_whoever_writes_anew(folder: Path) -> None:
    assert save("key", some(), FACTS)
    tensors = tensors_of("key")
    assert save("key", {name: torch.zeros_like(tensor) for name, tensor in some().items()}, FACTS)
    assert_same(tensors, some())
    (folder / "key.safetensors").unlink()
    assert_same(tensors, some())


def test_whatever_the_packing_depends_on_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [key_of(model(), OPTIONS), key_of(model("bfloat16"), OPTIONS), key_of(model(seed=1), OPTIONS)]
    keys += [key_of(model(), OPTIONS | {"group": 64}), key_of(model(), OPTIONS | {"head": "w8"})]
    keys += [key_of(changed, OPTIONS) for changed in changed_models()]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.99.0")
        keys.append(key_of(model(), OPTIONS))
    assert len(set(keys)) == len(keys) == 17


def changed_models() -> Iterator[Any]:
    """Each with as little changed as can be: the lowest bit of the last weight, of one dtype and the other."""
    changes: list[Callable[[Any], Any]] = [
        lambda of: last_bit(of.model.norm.weight, torch.int32),
        lambda of: last_bit(of.model.embed_tokens.weight, torch.int32),
        lambda of: last_bit(of.model.rotary_emb.inv_freq, torch.int32),
        lambda of: setattr(of.config, "rms_norm_eps", 2e-6),
        lambda of: of.register_buffer("more", torch.zeros(4)),
        lambda of: of.register_buffer("other", torch.zeros(4)),
        lambda of: of.register_buffer("more", torch.zeros(2, 2)),
        lambda of: of.register_buffer("more", torch.zeros(4, dtype=torch.int32)),
        lambda of: of.register_buffer("more", torch.tensor(2**62)),
        lambda of: of.register_buffer("more", torch.tensor(2**62 + 1)),
    ]
    for change in changes:
        found = model()
        change(found)
        yield found
    found = model("bfloat16")
    last_bit(found.model.embed_tokens.weight, torch.int16)
    yield found


def last_bit(tensor: torch.Tensor, as_: torch.dtype) -> None:
    tensor.detach().view(as_).flatten()[-1].bitwise_xor_(1)


@pytest.mark.parametrize(
    ("changed", "matters"),
    [("ops/decode/cpu/packing.py", True), ("surgery/places.py", True), ("report/tables.py", False)],
)
def test_a_change_of_a_source_changes_the_key_where_it_decides_what_is_packed(
    changed: str, matters: bool, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_store, "PACKAGE", package)
    before = key_of(nothing(), OPTIONS)
    path = package / changed
    content = path.read_bytes()
    path.write_bytes(content + b"\n")
    try:
        assert (key_of(nothing(), OPTIONS) != before) is matters
    finally:
        path.write_bytes(content)
    assert key_of(nothing(), OPTIONS) == before


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the engine's sources."""
    copy = tmp_path_factory.mktemp("sources") / "optigpu"
    shutil.copytree(
        Path(optigpu.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors")
    )
    return copy


def nothing() -> Any:
    """A model without weights: its key is that of the options and the sources."""
    empty: Any = torch.nn.Module()
    empty.config = PreTrainedConfig()
    return empty


def test_no_bit_of_a_file_may_change(folder: Path) -> None:
    assert save("key", {"q": torch.arange(8, dtype=torch.uint8), "s": torch.ones(2)}, {"bits": 4})
    path = folder / "key.safetensors"
    content = path.read_bytes()
    for index in range(len(content)):
        damaged = bytearray(content)
        damaged[index] ^= 1
        path.write_bytes(damaged)
        assert load("key") is None, f"byte {index}"
        assert not path.exists()
    path.write_bytes(content)
    assert load("key") is not None


@pytest.mark.parametrize("length", [0, 4, 8, 100, -1, None])
def test_a_file_that_is_cut_short_or_somebody_else_s_is_removed_and_made_again(
    folder: Path, length: int | None
) -> None:
    assert save("key", some(), FACTS)
    path = folder / "key.safetensors"
    if length is None:
        save_file({"numbers": torch.ones(3)}, path)
    else:
        path.write_bytes(path.read_bytes()[:length])
    assert load("key") is None
    assert not path.exists()
    assert save("key", some(), FACTS)
    assert_same(tensors_of("key"), some())


def test_what_is_larger_than_the_bound_is_not_kept_and_costs_the_others_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert save("a", some(), FACTS)
    bound(monkeypatch, (folder / "a.safetensors").stat().st_size)
    assert not save("b", some(400), FACTS)
    fits = {"numbers": torch.zeros(BOUND.most_bytes(), dtype=torch.uint8)}  # and with its header it does not
    assert not save("b", fits, {})
    assert names_in(folder) == {"a.safetensors"}


def test_a_disk_that_is_full_keeps_nothing_and_loses_nothing(folder: Path) -> None:
    assert save("a", some(), FACTS)
    with largest_file(1000):
        assert not save("a", some(400), FACTS)
        assert not save("b", some(), FACTS)
    assert names_in(folder) == {"a.safetensors"}
    assert_same(tensors_of("a"), some())


@pytest.mark.long
def test_another_process_has_the_same_keys_and_may_write_the_same_at_the_same_time(folder: Path) -> None:
    dtypes = ("float32", "bfloat16")
    keys = [key_of(model(dtype), OPTIONS) for dtype in dtypes]
    assert keys == [key_of(model(dtype), dict(reversed(OPTIONS.items()))) for dtype in dtypes]
    code = f"""
import torch
from tests.engine.test_techniques_packed_store import OPTIONS, key_of, model, write_many
torch.set_num_threads(1)
print(*(key_of(model(dtype), OPTIONS) for dtype in {dtypes!r}), flush=True)
input()
write_many()
print("done")
"""
    other = child(code)
    assert other.stdin is not None
    assert other.stdout is not None
    assert other.stdout.readline().split() == keys
    other.stdin.write("\n")
    other.stdin.flush()
    write_many()
    output, errors = other.communicate(timeout=200)
    assert output == "done\n", errors
    assert names_in(folder) == {"key.safetensors"}
    assert tensors_of("key")["numbers"].equal(numbers())


def write_many() -> None:
    """What each of two processes does at the same time."""
    for _ in range(TRIES):
        assert save("key", {"numbers": numbers()}, {})
        assert tensors_of("key")["numbers"].equal(numbers())


def numbers() -> torch.Tensor:
    return torch.arange(2**20, dtype=torch.int32)


def child(code: str) -> "subprocess.Popen[str]":
    """A separate process with the same cache folder."""
    pipe = subprocess.PIPE
    root = str(Path(__file__).resolve().parents[2])
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": root},
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
    )


def test_a_decoder_never_reads_the_files_own_pages(folder: Path) -> None:
    def packed_numbers() -> list[torch.Tensor]:
        fresh = model()
        places = linear_places(fresh)
        pack_or_restore(fresh, places, PackingOptions("w4", 32, "same", 0.0, "none"))
        return [fresh.get_submodule(place.path).numbers for place in places]

    first = packed_numbers()
    assert len(names_in(folder)) == 1
    restored = packed_numbers()
    named = [
        range(*(int(bound, 16) for bound in line.split()[0].split("-")))
        for line in Path("/proc/self/maps").read_text().splitlines()
        if len(line.split()) > 5 and line.split()[5].startswith("/")
    ]
    assert len(restored) > 10
    assert all(map(torch.equal, restored, first))
    assert not [each for each in restored if any(each.data_ptr() in file for file in named)]


def test_packing_tells_at_which_layer_it_is() -> None:
    told: list[str] = []
    fresh = model()
    places = linear_places(fresh)
    Packer(fresh, places, PackingOptions("w4", 32, "same", 0.0, "self", 0.02), told.append).pack()
    layers = [f"packing layer {number} of {len(places)}" for number in range(1, len(places) + 1)]
    assert told == ["writing a text to calibrate on", "reading the text to calibrate on", *layers]


@pytest.mark.parametrize("calibration", ["none", "self"])
def test_layers_of_an_earlier_packing_are_as_if_they_were_packed_again(calibration: Any) -> None:
    fresh = model()
    places = linear_places(fresh)
    packer = Packer(fresh, places, PackingOptions("w4", 32, "same", 0.2, calibration, 0.02))
    whole = [(place, place.layer) for place in places]
    known = None
    if calibration == "self":
        text = packer.calibration_text()
        known = Calibration(KeptMoments(fresh, places, text, packer.tied).of, text.numel())
    candidates = packer.candidates(packer.costs(None))
    few, many = (decide(candidates, int(share * least_bytes(candidates))) for share in (1.05, 1.3))

    def exchanged(decisions: Sequence[BitDecision], *earlier: Kept) -> Kept:
        for place, layer in whole:
            place.put(layer)
        made = packer.exchange(decisions, known, *earlier)
        return Kept(made.kinds, packed_tensors(fresh, list(made.kinds)))

    first, again = exchanged(few), exchanged(many)
    copied = exchanged(many, first)
    assert 0 < sum(first.kinds[path] == kind for path, kind in again.kinds.items()) < len(places)
    assert copied.kinds == again.kinds
    assert all(copied.tensors[name].equal(tensor) for name, tensor in again.tensors.items())


# ---- native_decode with the store.


def never(*_: Any) -> Any:
    raise AssertionError("the weights were packed again")


@pytest.mark.slow
@pytest.mark.parametrize(("family", "head"), spread(["gpt2", "llama", "qwen2"], ["same", "w8"]))
def test_weights_are_packed_once_and_then_read(
    family: str, head: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    technique = NativeDecode(weights="w4", head=head, extra_bytes=0.1)
    first, notes = packed(tiny_model(family), technique)
    assert len(list(folder.glob("*.safetensors"))) == 1
    monkeypatch.setattr("optigpu.techniques.decoding.native_decode.packing.exchange_linears", never)
    again, other_notes = packed(tiny_model(family), technique)
    assert other_notes.facts == notes.facts
    expected, found = dict(first.named_buffers()), dict(again.named_buffers())
    assert found.keys() == expected.keys()
    assert all(found[name].equal(tensor) for name, tensor in expected.items())
    assert weight_bytes(again) == weight_bytes(first)
    logits = []
    for model in (first, again):
        decoder = decoder_of(model)
        decoder.begin(*prompt().shape)
        logits.append(decoder.extend(prompt()))
    assert logits[0].equal(logits[1])
