"""CudaDecoder on an NVIDIA GPU: compiled kernels against the reference, and their recorded graph against launches."""

from typing import TYPE_CHECKING

import pytest
import torch

from optigpu.ops.decode.program import WEIGHT_KINDS, CacheKind, WeightKind

if TYPE_CHECKING:
    from optigpu.ops.decode.cuda.decoder import CudaDecoder

pytestmark = [pytest.mark.gpu]
CAPACITY = 60
FIRST = pytest.mark.gpu_first


@pytest.mark.parametrize("kv", ["bf16", "int8"])
@pytest.mark.parametrize(
    "kinds",
    [
        *(pytest.param((kind,), marks=FIRST) for kind in WEIGHT_KINDS),
        *(("w8", "w4", "w4", "bf16", "w4"), ("w3k", "w4k")),
    ],
    ids="+".join,
)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_steps_are_the_references(family: str, kinds: tuple[WeightKind, ...], kv: CacheKind) -> None:
    from tests.engine.triton_decode import assert_step_as_reference

    assert_step_as_reference(family, kinds, kv, device="cuda")


@FIRST
@pytest.mark.parametrize("kind", WEIGHT_KINDS)
def test_each_weight_is_the_unpacked_one_bit_by_bit(kind: WeightKind) -> None:
    from tests.engine.triton_decode import assert_every_weight

    assert_every_weight(kind, 32, torch.device("cuda"))


@pytest.mark.parametrize(
    "family",
    [pytest.param("all", marks=FIRST), "gemma", "neox", "olmo", "mixtral", "oss", *map(str, range(4))],
)
def test_steps_of_further_blocks_are_the_references(family: str) -> None:
    from tests.engine.triton_decode import assert_step_as_reference

    assert_step_as_reference(family, ("w8", "w4", "bf16"), "int8", device="cuda")


@pytest.mark.parametrize("kv", ["bf16", "int8"])
@pytest.mark.parametrize(
    "family", [*(pytest.param(each, marks=FIRST) for each in ("gpt2", "llama")), "all", "oss"]
)
def test_the_recorded_graph_does_what_its_launches_do_up_to_the_end(family: str, kv: CacheKind) -> None:
    from tests.engine.triton_decode import SEQUENCES

    prompt = torch.tensor([[5, 7, 1]] * SEQUENCES)
    replayed, launched = (decoder_of(family, kv) for _ in range(2))
    assert launched._step is not None
    launched._step.run = launched._step._launch
    texts = []
    for decoder in (replayed, launched, replayed):
        decoder.begin(SEQUENCES, CAPACITY)
        first = decoder.extend(prompt).argmax(dim=1, keepdim=True)
        texts.append((decoder.decode(first, CAPACITY - 3), decoder.logits))
    assert replayed.length == CAPACITY
    for tokens, logits in texts[1:]:
        assert torch.equal(tokens, texts[0][0])
        assert torch.equal(logits, texts[0][1])


def decoder_of(family: str, kv: CacheKind) -> "CudaDecoder":
    from optigpu.ops.decode.cuda.decoder import CudaDecoder
    from optigpu.ops.decode.cuda.packing import pack_for_cuda
    from tests.engine.triton_decode import SEQUENCES, tiny_program

    decoder = CudaDecoder(tiny_program(pack_for_cuda, family, ("w4",), "cuda"), kv)
    decoder.begin(SEQUENCES, CAPACITY)
    return decoder
