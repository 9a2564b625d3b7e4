"""What the tests of engines that run converted models share: orders, prompts, and transformers' own answers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optigpu.backends import BACKENDS
from optigpu.backends.base import Order
from optigpu.hardware import probe
from optigpu.job.spec import resolve
from optigpu.models.loading.load import load_image_model, load_model
from optigpu.models.reference import parse_reference
from optigpu.techniques.base import Technique
from optigpu.vocabulary import DeviceKind
from optigpu.workloads.base import Workload
from optigpu.workloads.generate import Generate
from tests.engine.caches import CONVERTED, OPERATORS, PEAKS, cache_with

TINY = "bundled:tiny"
PROMPT, NEW = 24, 40


def own_cache(made: Path) -> Iterator[None]:
    """A cache folder that shares converted models with this user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache_with(made, OPERATORS, PEAKS, CONVERTED).parent))
        yield


def prepared(
    backend: str, folder: Path, *stack: Technique, model: str = TINY, threads: int = 1, **more: Workload
) -> Any:
    """A model in an engine with techniques; `workload` is generate where none is named."""
    workload = more.get("workload", Generate())
    resolved = resolve(stack, workload.kind)
    order = Order(model, resolved, workload, DeviceKind.CPU, 0, threads, folder, probe())
    return BACKENDS[backend].prepare(order, lambda _: None)


def prompts(rows: int, length: int = PROMPT, vocabulary: int = 2048) -> Any:
    """Random ids, always the same."""
    return np.random.default_rng(5).integers(vocabulary, size=(rows, length))


def transformers_tokens(model: str, prompt: Any, new: int) -> list[list[int]]:
    """What transformers decodes greedily after a prompt."""
    import torch

    loaded: Any = load_model(parse_reference(model), device="cpu", dtype="float32")
    made = loaded.generate(torch.from_numpy(prompt), max_new_tokens=new, min_new_tokens=new, do_sample=False)
    tokens: list[list[int]] = made[:, prompt.shape[1] :].tolist()
    return tokens


def transformers_logits(model: str, tokens: Any) -> Any:
    """After each token, [rows, length, vocabulary]."""
    import torch

    loaded = load_model(parse_reference(model), device="cpu", dtype="float32")
    with torch.no_grad():
        return loaded(input_ids=torch.from_numpy(tokens)).logits.numpy()


def transformers_classes(model: str, images: Any) -> Any:
    """Logits of images, [batch, classes]."""
    import torch

    loaded = load_image_model(parse_reference(model), device="cpu", dtype="float32")
    with torch.no_grad():
        return loaded(pixel_values=torch.from_numpy(images)).logits.numpy()


def scored(runtime: Any, tokens: Any, prefill: int = 0) -> Any:
    """Logits after each token from `prefill` on, [rows, length, vocabulary]."""
    return np.stack(list(runtime.score(tokens, prefill)), axis=1)


def error(found: Any, expected: Any) -> float:
    """The largest difference of a logit over the largest logit."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())
