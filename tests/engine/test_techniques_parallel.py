"""tensor_parallel and pipeline_parallel compute what one process computes, and leave no process behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from optigpu.models.loading.load import load_model
from optigpu.models.reference import parse_reference
from optigpu.surgery.parallel import pipeline, tensor
from optigpu.surgery.parallel.ranks import Ranks
from optigpu.techniques.base import Notes
from optigpu.techniques.memory.pipeline_parallel import PipelineParallel
from optigpu.techniques.memory.tensor_parallel import TensorParallel
from optigpu.vocabulary import UnsupportedError
from tests.breadth import spread
from tests.engine.tiny_models import assert_needs_hook

pytestmark = pytest.mark.usefixtures("forked_ranks")
Divide = Callable[[PreTrainedModel, int], Ranks]
TINY = ("preset:tiny-llama-test", "preset:tiny-gpt2-test", "bundled:tiny")
WAYS = 2


def loaded(reference: str, dtype: str = "float32") -> PreTrainedModel:
    return load_model(parse_reference(reference), device="cpu", dtype=dtype)


@contextmanager
def divided(divide: Divide, model: PreTrainedModel, ways: int = WAYS) -> Iterator[Ranks]:
    threads = torch.get_num_threads()
    ranks = divide(model, ways)
    try:
        yield ranks
    finally:
        ranks.end()
        torch.set_num_threads(threads)


@torch.inference_mode()
def decoded(model: PreTrainedModel, ids: torch.Tensor, steps: int = 4) -> torch.Tensor:
    """The logits after a prompt and after each of the most likely tokens, through a cache."""
    cache, found, inputs = DynamicCache(), [], ids
    for _ in range(steps):
        logits = model(input_ids=inputs, past_key_values=cache, use_cache=True).logits[:, -1]
        found.append(logits)
        inputs = logits.argmax(dim=-1, keepdim=True)
    return torch.stack(found)


@pytest.mark.slow
@pytest.mark.parametrize(("divide", "reference"), spread([tensor.divide, pipeline.divide], TINY))
def test_two_processes_compute_what_one_does(divide: Divide, reference: str) -> None:
    model = loaded(reference)
    ids = torch.randint(model.config.vocab_size, (3, 9), generator=torch.Generator().manual_seed(1))
    alone, whole_pass = decoded(model, ids), model(input_ids=ids, use_cache=False).logits
    generate: Callable[..., torch.Tensor] = model.generate  # type: ignore[assignment]
    generated = generate(ids, max_new_tokens=6, do_sample=False)
    with divided(divide, model):
        torch.testing.assert_close(decoded(model, ids), alone, atol=1e-4, rtol=1e-4)
        with torch.inference_mode():
            again = model(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(again, whole_pass, atol=1e-4, rtol=1e-4)
        assert torch.equal(generate(ids, max_new_tokens=6, do_sample=False), generated)


@pytest.mark.slow
@pytest.mark.parametrize("technique", [TensorParallel(), PipelineParallel()], ids=lambda each: str(each.name))
def test_the_technique_leaves_this_process_its_part(technique: TensorParallel | PipelineParallel) -> None:
    def claim() -> None:
        model = loaded("preset:tiny-llama-test")
        before = sum(weight.numel() for weight in model.model.layers.parameters())
        threads = torch.get_num_threads()
        technique.modules(model, Notes())
        for hook in model.model._forward_pre_hooks.values():
            hook.__self__.end()
        torch.set_num_threads(threads)
        assert sum(weight.numel() for weight in model.model.layers.parameters()) < 0.6 * before

    assert_needs_hook(technique, "modules", claim)


def like_llama(**changes: int) -> PreTrainedModel:
    shapes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
    }
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", **(shapes | changes))
    )
    model.eval()
    return model


@pytest.mark.parametrize(
    ("divide", "model", "ways", "why"),
    [
        (tensor.divide, {}, 4, "key-value heads that 4 processes can share evenly; this model has 2"),
        (tensor.divide, {"num_key_value_heads": 4, "intermediate_size": 66}, 4, "66 features"),
        (pipeline.divide, {}, 3, "needs a block for each of 3 processes; this model has 2"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    divide: Divide, model: dict[str, int], ways: int, why: str
) -> None:
    made = like_llama(**model)
    ids = torch.arange(6)[None]
    before = decoded(made, ids)
    with pytest.raises(UnsupportedError, match=why):
        divide(made, ways)
    assert torch.equal(decoded(made, ids), before), "the model was left as it was"


@pytest.mark.slow
def test_padding_is_refused() -> None:
    model = loaded("preset:tiny-llama-test")
    mask = torch.tensor([[0, 1, 1, 1]])
    with divided(tensor.divide, model), pytest.raises(UnsupportedError, match="without padding"):
        model(input_ids=torch.arange(4)[None], attention_mask=mask)


DIVIDES = """
import sys, time
from optigpu.models.loading.load import load_model
from optigpu.models.reference import parse_reference
from optigpu.surgery.parallel import tensor
model = load_model(parse_reference("preset:tiny-llama-test"), device="cpu", dtype="float32")
tensor.divide(model, 2)
print("divided", flush=True)
time.sleep(60)
"""


@pytest.mark.long
def test_the_others_end_when_rank_0_is_killed() -> None:
    process = subprocess.Popen([sys.executable, "-c", DIVIDES], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "divided\n"
    (other,) = psutil.Process(process.pid).children()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    ends = time.monotonic() + 60
    while other.is_running() and other.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < ends, "it outlives rank 0"
        time.sleep(0.1)
