"""GGUF files: what they hold, as llama.cpp reads it, and their cache, written once, whole or not at all."""

import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from optigpu.backends.base import Order
from optigpu.backends.converted import BOUND
from optigpu.backends.llama_cpp import convert, engine
from optigpu.backends.llama_cpp.engine import gguf_of
from optigpu.backends.llama_cpp.file_types import FileType, Form
from optigpu.backends.llama_cpp.gguf_tensors import metadata, rope_factors, tensors
from optigpu.documents.result import Environment
from optigpu.hardware import probe
from optigpu.vocabulary import DeviceKind, OptiGPUError, UnsupportedError
from optigpu.workloads.generate import Generate

LLAMA = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
GPT2 = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 100.0}
SCALED = PLAIN_ROPE | {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def made(family: str, config: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config)).eval()


def turned_by_neighbours(rows: torch.Tensor, position: int, config: Any) -> torch.Tensor:
    """llama.cpp's rotation of [heads, size]: the pairs (0, 1), (2, 3), ... by theta^(-2i / size) / factor_i."""
    size = rows.shape[-1]
    factors = torch.tensor(rope_factors(config) or [1.0] * (size // 2), dtype=torch.float64)
    pairs = torch.arange(size // 2, dtype=torch.float64)
    angles = position * config.rope_parameters["rope_theta"] ** (-2 * pairs / size) / factors
    even, odd = rows[:, ::2].double(), rows[:, 1::2].double()
    first = even * angles.cos() - odd * angles.sin()
    second = even * angles.sin() + odd * angles.cos()
    return torch.stack([first, second], dim=-1).flatten(1)


@pytest.mark.parametrize("rope", [PLAIN_ROPE, SCALED], ids=["plain", "llama3 scaling"])
@pytest.mark.parametrize("head_size", [8, 16])
def test_scores_of_permuted_rows_in_llama_cpps_order_are_transformers_scores(
    rope: dict[str, Any], head_size: int
) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    model = made("llama", LLAMA | {"rope_parameters": rope, "head_dim": head_size})
    config, attention = model.config, model.model.layers[0].self_attn
    written = dict(tensors(model))
    x = torch.randn(2, LLAMA["hidden_size"])
    positions = torch.tensor([[100, 3]])

    query = attention.q_proj(x).view(1, 2, 6, head_size).transpose(1, 2)
    key = attention.k_proj(x).view(1, 2, 2, head_size).transpose(1, 2)
    query, key = apply_rotary_pos_emb(query, key, *model.model.rotary_emb(x[None], positions))
    expected = (query[0, :, 0] * key[0, :, 1].repeat_interleave(3, dim=0)).sum(dim=-1)

    theirs = (x[0] @ written["blk.0.attn_q.weight"].T).view(6, head_size)
    their_key = (x[1] @ written["blk.0.attn_k.weight"].T).view(2, head_size)
    turned = turned_by_neighbours(theirs, 100, config)
    turned_key = turned_by_neighbours(their_key, 3, config).repeat_interleave(3, dim=0)
    torch.testing.assert_close((turned * turned_key).sum(dim=-1).float(), expected, rtol=1e-4, atol=1e-6)


def test_gpt2s_matrices_lie_the_other_way_round() -> None:
    model = made("gpt2", GPT2)
    written = dict(tensors(model))
    assert torch.equal(written["blk.1.ffn_up.weight"], model.transformer.h[1].mlp.c_fc.weight.T)
    assert written["blk.0.attn_qkv.weight"].shape == (96, 32)
    assert torch.equal(written["position_embd.weight"], model.transformer.wpe.weight)
    assert "output.weight" not in written
    assert len(written) == 4 + 2 * 12


def test_what_is_not_written_is_refused() -> None:
    from transformers import AutoConfig

    linear: Any = AutoConfig.for_model(
        "llama", **LLAMA, rope_parameters=PLAIN_ROPE | {"rope_type": "linear", "factor": 2.0}
    )
    with pytest.raises(UnsupportedError, match="rope_type = 'linear', only 'default' or 'llama3'; ask"):
        metadata(linear)
    with pytest.raises(
        UnsupportedError, match="opt models cannot be written as GGUF here, only gpt2 and llama"
    ):
        metadata(AutoConfig.for_model("opt"))


EXACT, ROUNDED = 1e-3, 1e-2
"""The largest difference over the largest logit, with everything in float32 (llama.cpp looks GELU up in a table of
float16), and with float16 matrices, which hold these models exactly, a float16 cache and flash attention."""
TOKENS = 96
SHARP_LLAMA = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.1,
}
SHARP_SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"vocab_size": 512, "n_embd": 256, "n_layer": 3, "n_head": 4, "initializer_range": 0.1}),
    "tied head": ("llama", SHARP_LLAMA | {"tie_word_embeddings": True}),
    "untied head": ("llama", SHARP_LLAMA | {"tie_word_embeddings": False}),
    "wide heads": ("llama", SHARP_LLAMA | {"tie_word_embeddings": False, "head_dim": 64}),
    "llama3 scaling": ("llama", SHARP_LLAMA | {"tie_word_embeddings": True, "rope_parameters": SHARP_SCALED}),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A random model whose norms and biases do something, of weights that float16 holds."""
    family, config = MODELS[request.param]
    torch.manual_seed(0)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config)).eval()
    for parameter in made.requires_grad_(False).parameters():
        if parameter.dim() == 1:
            parameter.add_(0.1 * torch.randn_like(parameter))
        # Not the whole model: a rotary embedding's frequencies are a buffer.
        parameter.copy_(parameter.half())
    return made


def difference(model: PreTrainedModel, path: Path, exact: bool) -> float:
    """The largest difference of the logits after each of TOKENS random tokens, over the largest logit."""
    from optigpu.backends.llama_cpp.file_types import ExactCaches, asked_of
    from optigpu.backends.llama_cpp.gguf_tensors import write
    from optigpu.backends.llama_cpp.native import LlamaCpp
    from optigpu.backends.llama_cpp.runtime import Context, GgufModel

    write(model, path, "float32" if exact else "float16")
    tokens = torch.randint(model.config.vocab_size, (1, TOKENS))
    expected = model(input_ids=tokens).logits[0].numpy()
    loaded = GgufModel(LlamaCpp(), path, model.config.vocab_size)
    context = Context(loaded, 1, TOKENS, asked_of((), "F32" if exact else "F16", 1, ExactCaches()))
    found = np.stack([context.forward(token[None, None])[0].copy() for token in tokens[0].numpy()])
    context.close()
    loaded.close()
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.llama
def test_logits_in_float32_are_transformers_logits(model: PreTrainedModel, tmp_path: Path) -> None:
    assert difference(model, tmp_path / "model.gguf", exact=True) <= EXACT


@pytest.mark.llama
def test_logits_with_float16_matrices_are_rounded_alone(model: PreTrainedModel, tmp_path: Path) -> None:
    assert difference(model, tmp_path / "model.gguf", exact=False) <= ROUNDED


SIZE = 1000
REAL = subprocess.run
MODEL = "preset:tiny-gpt2-test"


class Converter:
    """Stands in for the process that writes a file: SIZE bytes, unless it is told to fail."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.status, self.said = 0, ""

    def run(self, command: Sequence[str], **more: Any) -> "subprocess.CompletedProcess[str]":
        if command[0] != sys.executable:  # what describes the machine calls others
            return REAL(command, **more)
        options = dict(zip(command[4::2], command[5::2], strict=True))
        assert list(command[:4]) == [sys.executable, "-P", "-m", convert.__name__]
        what = options.get("--form") or options["--type"]
        self.calls.append((what, options.get("--plain", options.get("--model", ""))))
        Path(options["--output"]).write_bytes(b"x" * (SIZE // 2 if self.status else SIZE))
        return subprocess.CompletedProcess(list(command), self.status, self.said, self.said)


@cache
def environment() -> Environment:
    return probe()


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Converter:
    """In the place of the real one, with a cache folder of its own."""
    environment()  # asks git, before nothing can be run any more
    made = Converter()
    monkeypatch.setattr(subprocess, "run", made.run)
    for name in ("PLAIN", "MATTERS"):  # their libraries need not be installed
        monkeypatch.setattr(engine, name, replace(getattr(engine, name), libraries=()))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(BOUND.variable, raising=False)
    return made


def got(kind: FileType, tmp_path: Path, seed: int = 0) -> Path:
    order = Order(MODEL, (), Generate(), DeviceKind.CPU, seed, 1, tmp_path / "job", environment())
    ours = replace(engine.LLAMA_CPP, quantizer=replace(engine.LLAMA_CPP.quantizer, libraries=()))
    return gguf_of(order, ours, Form(kind), lambda _: None)


def files(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache").rglob("*.gguf"))


def test_a_file_is_written_once(converter: Converter, tmp_path: Path) -> None:
    first = got("F16", tmp_path)
    assert first.stat().st_size == SIZE
    assert first.is_relative_to(tmp_path / "cache" / "optigpu" / "converted" / "gguf")
    assert got("F16", tmp_path) == first
    assert converter.calls == [("F16", "preset:tiny-gpt2-test")]


def test_what_failed_leaves_no_file(converter: Converter, tmp_path: Path) -> None:
    converter.status, converter.said = 1, "Traceback\nOSError: No space left on device"
    with pytest.raises(
        OptiGPUError, match="could not be converted for gguf: OSError: No space left on device"
    ):
        got("F16", tmp_path)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.suffix != ".lock"]
    converter.status = 0
    assert got("F16", tmp_path).stat().st_size == SIZE


def test_with_a_bound_of_0_files_live_as_long_as_their_job(
    converter: Converter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BOUND.variable, "0")
    path = got("Q4_0", tmp_path)
    assert path.is_relative_to(tmp_path / "job")
    assert got("Q4_0", tmp_path) == path
    assert len(converter.calls) == 2
    assert files(tmp_path) == []


def test_processes_that_want_the_same_file_wait_for_the_one_that_writes_it(
    converter: Converter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go_on = threading.Event(), threading.Event()

    def slow(command: Sequence[str], **more: Any) -> "subprocess.CompletedProcess[str]":
        if command[0] == sys.executable:
            writing.set()
            assert go_on.wait(30)
        return converter.run(command, **more)

    monkeypatch.setattr(subprocess, "run", slow)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(got("F16", tmp_path))) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert writing.wait(30)
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert len(found) == 3
    assert len(set(found)) == len(converter.calls) == 1
