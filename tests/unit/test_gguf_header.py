"""Damaged GGUF files: what is wrong is one sentence, before llama.cpp reads them."""

import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from optigpu.backends.llama_cpp.gguf_header import ALIGNMENT, ARCHITECTURE, Header, read_header
from optigpu.backends.llama_cpp.source import facts_of

TEXT, ARRAY, NUMBER = 8, 9, 4
SIZES = {
    "block_count": 2,
    "embedding_length": 16,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "context_length": 64,
}
TENSORS = {"token_embd.weight": (16, 32), "blk.0.ffn_up.weight": (16, 24)}
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


@pytest.mark.parametrize("name", SIZES)
def test_a_size_that_is_not_positive_is_named(tmp_path: Path, name: str) -> None:
    path = gguf(tmp_path / "model.gguf", sizes={name: 0})
    with pytest.raises(ValueError, match=rf"^its llama\.{name} is 0, which is not positive$"):
        read(path)


@pytest.mark.parametrize("alignment", [0, 7])
def test_an_alignment_that_is_none_is_named(tmp_path: Path, alignment: int) -> None:
    path = gguf(tmp_path / "model.gguf", pair(ALIGNMENT, NUMBER, struct.pack("<I", alignment)))
    with pytest.raises(ValueError, match=f"^its general.alignment is {alignment}, which is not a positive"):
        read(path)


def test_arrays_within_arrays_have_an_end(tmp_path: Path) -> None:
    nested = struct.pack("<IQ", ARRAY, 1) * 100_000
    path = gguf(tmp_path / "model.gguf", pair("nested", ARRAY, nested))
    with pytest.raises(ValueError, match=r"^it has more than 8 arrays within each other$"):
        read(path)


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((16, 0), r"its tensor token_embd\.weight has the shape \[16, 0\], and so no numbers"),
        ((), "it has a tensor of 0 dimensions"),
        ((16, 2**40), rf"its tensor token_embd\.weight of {2**44} numbers has only 2048 bytes"),
    ],
)
def test_a_shape_that_cannot_be_is_named(tmp_path: Path, shape: tuple[int, ...], said: str) -> None:
    path = gguf(tmp_path / "model.gguf", tensors=TENSORS | {"token_embd.weight": shape})
    with pytest.raises(ValueError, match=f"^{said}$"):
        read(path)


@pytest.mark.parametrize("kept", [0, 3, 20, 100, -2048])
def test_a_cut_file_is_one_sentence(tmp_path: Path, kept: int) -> None:
    path = gguf(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"^it (ends|does not begin)"):
        read(path)
