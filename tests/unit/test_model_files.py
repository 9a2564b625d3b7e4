"""Damaged files of a model: one sentence names the file, before any library reads it."""

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from optigpu.backends.llama_cpp.gguf_facts import facts_of
from optigpu.models.described import decoder_shape
from optigpu.models.gguf_header import ALIGNMENT, ARCHITECTURE, Header, read_header
from optigpu.models.held import CONFIGURATION, INDEX, MODELS_DIR, SINGLE, read_configuration, sound_directory
from optigpu.models.reference import PRESETS, parse_reference
from optigpu.vocabulary import UnsupportedError

REFERENCE = parse_reference("path:model")
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
PRESET = PRESETS["tiny-llama-test"]
CONFIG = {**PRESET.config, "model_type": PRESET.model_type}
Change = Callable[[bytes], bytes]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sound folder of one file of weights, which `path:model` names."""
    monkeypatch.setenv(MODELS_DIR, str(tmp_path))
    made = tmp_path / "model"
    made.mkdir()
    (made / CONFIGURATION).write_text(json.dumps(CONFIG))
    save_file({"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.float32)}, made / SINGLE)
    return made


def in_shards(folder: Path, index: object) -> None:
    (folder / SINGLE).unlink()
    for name in SHARDS:
        save_file({name: np.zeros(2, np.float32)}, folder / name)
    (folder / INDEX).write_text(json.dumps(index))


def configured(**fields: object) -> bytes:
    return json.dumps(CONFIG | fields).encode()


def with_header(change: Callable[[dict[str, Any]], None]) -> Change:
    def changed(content: bytes) -> bytes:
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + length :]

    return changed


def test_a_sound_folder_is_read_with_one_file_or_several(folder: Path) -> None:
    assert sound_directory(REFERENCE) == folder
    assert read_configuration(folder / CONFIGURATION, REFERENCE) == CONFIG
    in_shards(folder, {"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}})
    assert sound_directory(REFERENCE) == folder


def test_a_configuration_may_hold_what_strict_json_does_not(folder: Path) -> None:
    text = configured(time_step_limit=[0.0, float("inf")]).replace(b"{", b'{"vocab_size": 5, ', 1)
    (folder / CONFIGURATION).write_bytes(text)
    assert read_configuration(folder / CONFIGURATION, REFERENCE)["vocab_size"] == CONFIG["vocab_size"]
    assert sound_directory(REFERENCE) == folder


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not JSON: Expecting value at line 1, column 1"),
        (b"{oh", "is not JSON: "),
        (b"[1]", "holds no JSON object"),
        (b"null", "holds no JSON object"),
        (b"\xef\xbb\xbf{}", "begins with a byte order mark"),
        (b'{"a": "\xe9"}', "is not UTF-8 at byte 7"),
        (b'{"a": ' + b"[" * 100_000, "is nested too deeply"),
        (
            configured(num_attention_heads=0),
            "has num_attention_heads 0, which is not a positive whole number",
        ),
        (configured(num_hidden_layers=-2), "has num_hidden_layers -2, which is not"),
        (configured(hidden_size=None), "has hidden_size None, which is not"),
        (configured(vocab_size="many"), "has vocab_size 'many', which is not"),
        (configured(max_position_embeddings=1.5), "has max_position_embeddings 1.5, which is not"),
        (configured(model_type=None), "has no model_type that is text"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_damaged_configuration_is_one_sentence(folder: Path, content: bytes | None, said: str) -> None:
    path = folder / CONFIGURATION
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(UnsupportedError) as refused:
        decoder_shape(REFERENCE)
    assert str(refused.value).startswith(f"config.json of path:model {said}")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda _: b"",
        lambda content: content[:5],
        lambda content: content[:-1],
        lambda content: content + b"more",
        lambda content: struct.pack("<Q", 10**9) + content[8:],
        lambda content: struct.pack("<Q", 2**63) + content[8:],
        lambda content: content[:8] + b"!" + content[9:],
        with_header(lambda header: header["a"].update(shape=[2, 4])),
        with_header(lambda header: header["a"].update(data_offsets=[0, 1 << 40])),
        with_header(lambda header: header["a"].update(dtype="F33")),
        with_header(lambda header: header["b"].update(data_offsets=[8, 24])),
    ],
)
def test_damaged_weights_are_one_sentence(folder: Path, change: Change) -> None:
    (folder / SINGLE).write_bytes(change((folder / SINGLE).read_bytes()))
    with pytest.raises(UnsupportedError) as refused:
        sound_directory(REFERENCE)
    assert str(refused.value).startswith("model.safetensors of path:model cannot be read: it is damaged (")
    assert str(refused.value).endswith("); copy or download it again.")


@pytest.mark.parametrize("dtype", ["I32", "U32"])
def test_integers_are_no_weights_unless_a_quantization_is_configured(folder: Path, dtype: str) -> None:
    """A header with another type of the same size is read without an error, as numbers of a thousand million."""
    save_file({"a.weight": np.zeros((2, 3), np.float32), "steps": np.zeros(4, np.int64)}, folder / SINGLE)
    assert sound_directory(REFERENCE) == folder
    change = with_header(lambda header: header["a.weight"].update(dtype=dtype))
    (folder / SINGLE).write_bytes(change((folder / SINGLE).read_bytes()))
    with pytest.raises(
        UnsupportedError, match=r"^model\.safetensors of path:model says that a\.weight holds integers"
    ):
        sound_directory(REFERENCE)
    (folder / CONFIGURATION).write_bytes(configured(quantization_config={"quant_method": "gptq"}))
    assert sound_directory(REFERENCE) == folder


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ([1], f"{INDEX} of path:model holds no JSON object"),
        ({}, f"{INDEX} of path:model has no weight_map of tensors to files"),
        ({"weight_map": {}}, f"{INDEX} of path:model has no weight_map"),
        ({"weight_map": ["a"]}, f"{INDEX} of path:model has no weight_map"),
        ({"weight_map": {"a": 5}}, f"{INDEX} of path:model has no weight_map"),
        ({"weight_map": {"a": "../x/model.safetensors"}}, "names '../x/model.safetensors', which is outside"),
        ({"weight_map": {"a": "/etc/passwd"}}, "names '/etc/passwd', which is outside of the model's folder"),
        (
            {"weight_map": {"a": "gone.safetensors"}},
            "gone.safetensors of path:model cannot be read: there is no",
        ),
    ],
)
def test_a_damaged_index_is_one_sentence(folder: Path, index: object, said: str) -> None:
    in_shards(folder, index)
    with pytest.raises(UnsupportedError) as refused:
        sound_directory(REFERENCE)
    assert said in str(refused.value)


def test_the_shard_that_is_damaged_is_named(folder: Path) -> None:
    in_shards(folder, {"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}})
    (folder / SHARDS[1]).write_bytes((folder / SHARDS[1]).read_bytes()[:-1])
    with pytest.raises(UnsupportedError, match=f"^{SHARDS[1]} of path:model cannot be read: it is damaged"):
        sound_directory(REFERENCE)


def test_a_folder_without_weights_says_which_files_are_read(folder: Path) -> None:
    (folder / SINGLE).unlink()
    with pytest.raises(
        UnsupportedError, match=f"^path:model cannot be loaded here: there is no {SINGLE} and"
    ):
        sound_directory(REFERENCE)


@pytest.mark.parametrize("file", [CONFIGURATION, SINGLE])
def test_a_link_out_of_the_model_directory_is_not_followed(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, file: str
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / file
    (folder / file).rename(folder.parent / file)
    (folder / file).symlink_to(folder.parent / file)
    assert sound_directory(REFERENCE) == folder
    (folder.parent / file).rename(elsewhere)
    (folder.parent / file).symlink_to(elsewhere)
    with pytest.raises(UnsupportedError, match=f"^path:model/{file} leads out of the model directory"):
        sound_directory(REFERENCE)


TEXT, ARRAY, NUMBER = 8, 9, 4
SIZES = {
    "block_count": 2,
    "embedding_length": 16,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "context_length": 64,
}
TENSORS: dict[str, tuple[int, ...]] = {"token_embd.weight": (16, 32), "blk.0.ffn_up.weight": (16, 24)}
Shapes = Mapping[str, tuple[int, ...]]
NO_OTHERS: Mapping[str, int] = MappingProxyType({})


def text(words: str) -> bytes:
    return struct.pack("<Q", len(words)) + words.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def gguf(
    path: Path, more: bytes = b"", tensors: Shapes = TENSORS, sizes: Mapping[str, int] = NO_OTHERS
) -> Path:
    """A file of float32 tensors, with `more` pairs of its own and these `sizes` instead of those of SIZES."""
    pairs = [pair(ARCHITECTURE, TEXT, text("llama"))]
    pairs += [
        pair(f"llama.{key}", NUMBER, struct.pack("<I", value)) for key, value in {**SIZES, **sizes}.items()
    ]
    pairs += [more] * bool(more)
    listed, offset = b"", 0
    for name, shape in tensors.items():
        listed += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, offset)
        offset += 2048
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join(pairs) + listed
    path.write_bytes(head + bytes(-len(head) % 32) + bytes(offset))
    return path


def read(path: Path) -> Header:
    header = read_header(path)
    facts_of(header)
    return header


def test_a_sound_file_is_read(tmp_path: Path) -> None:
    facts = facts_of(read_header(gguf(tmp_path / "model.gguf")))
    assert (facts.layers, facts.heads, facts.kv_heads, facts.head_size, facts.vocabulary) == (2, 4, 2, 4, 32)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        *(({"sizes": {name: 0}}, rf"its llama\.{name} is 0, which is not positive$") for name in SIZES),
        *(
            (
                {"more": pair(ALIGNMENT, NUMBER, struct.pack("<I", alignment))},
                f"its general.alignment is {alignment}, which is not a positive",
            )
            for alignment in (0, 7)
        ),
        (
            {"more": pair("nested", ARRAY, struct.pack("<IQ", ARRAY, 1) * 100_000)},
            "it has more than 8 arrays within each other$",
        ),
        *(
            ({"tensors": TENSORS | {"token_embd.weight": shape}}, f"{said}$")
            for shape, said in (
                ((16, 0), r"its tensor token_embd\.weight has the shape \[16, 0\], and so no numbers"),
                ((), "it has a tensor of 0 dimensions"),
                ((16, 2**40), rf"its tensor token_embd\.weight of {2**44} numbers has only 2048 bytes"),
            )
        ),
    ],
)
def test_what_cannot_be_is_named(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        read(gguf(tmp_path / "model.gguf", **given))


@pytest.mark.parametrize("kept", [0, 3, 20, 100, -2048])
def test_a_cut_file_is_one_sentence(tmp_path: Path, kept: int) -> None:
    path = gguf(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"^it (is empty|ends|does not begin)"):
        read(path)
