"""What the tests of engines beside torch share: orders, prompts, and transformers' own answers. Imports no torch."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from optigpu.backends import BACKENDS
from optigpu.backends.base import Order
from optigpu.job.spec import resolve
from optigpu.models.loading.load import load_image_model, load_model
from optigpu.models.reference import parse_reference
from optigpu.techniques.base import Technique
from optigpu.vocabulary import DeviceKind
from optigpu.workloads.base import Workload
from optigpu.workloads.generate import Generate
from tests.engine.caches import BUILDS, CONVERTED, OPERATORS, PEAKS, own_folders, resident_converter
from tests.engine.machines import here

TINY = "bundled:tiny"
PROMPT, NEW = 24, 40


def own_cache(made: Path) -> Iterator[None]:
    """A cache folder that shares converted models with this user's; they are written by the resident converter."""
    with resident_converter(), own_folders(made, BUILDS, OPERATORS, PEAKS, CONVERTED):
        yield


def ordered(
    folder: Path,
    *stack: Technique,
    model: str = TINY,
    workload: Workload | None = None,
    seed: int = 0,
    threads: int = 1,
    endpoint: str | None = None,
) -> Order:
    """On a CPU, with what the techniques require; generate where no workload is named."""
    workload = workload or Generate()
    resolved = resolve(stack, workload.kind)
    return Order(model, resolved, workload, DeviceKind.CPU, seed, threads, folder, here(), endpoint)


def prepared(backend: str, folder: Path, *stack: Technique, **asked: Any) -> Any:
    """A model in an engine with techniques; what is asked for beside them is as `ordered` has it."""
    return BACKENDS[backend].prepare(ordered(folder, *stack, **asked), lambda _: None)


def prompts(rows: int, length: int = PROMPT, vocabulary: int = 2048) -> Any:
    """Random ids, always the same."""
    return np.random.default_rng(5).integers(vocabulary, size=(rows, length))


def transformers_model(reference: str) -> Any:
    """A model that generates text, as it is without an engine."""
    return load_model(parse_reference(reference), device="cpu", dtype="float32")


def transformers_classifier(reference: str) -> Any:
    """A model that classifies images, as it is without an engine."""
    return load_image_model(parse_reference(reference), device="cpu", dtype="float32")


def transformers_tokens(model: str, prompt: Any, new: int) -> list[list[int]]:
    """What transformers decodes greedily after a prompt."""
    given, count = torch.from_numpy(prompt), {"max_new_tokens": new, "min_new_tokens": new}
    made = transformers_model(model).generate(given, do_sample=False, **count)
    tokens: list[list[int]] = made[:, prompt.shape[1] :].tolist()
    return tokens


def transformers_logits(model: str, tokens: Any) -> Any:
    """After each token, [rows, length, vocabulary]."""
    with torch.no_grad():
        return transformers_model(model)(input_ids=torch.from_numpy(tokens)).logits.numpy()


def transformers_classes(model: str, images: Any) -> Any:
    """Logits of images, [batch, classes]."""
    with torch.no_grad():
        return transformers_classifier(model)(pixel_values=torch.from_numpy(images)).logits.numpy()


def scored(runtime: Any, tokens: Any, prefill: int = 0) -> Any:
    """Logits after each token from `prefill` on, [rows, length, vocabulary]."""
    return np.stack(list(runtime.score(tokens, prefill)), axis=1)


def error(found: Any, expected: Any) -> float:
    """The largest difference of a logit over the largest logit."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def loaded_by_measuring(backend: str, folder: Path, *names: str) -> str:
    """Which of these modules are in a process of their own that measures a model that is kept already, as a list."""
    program = f"""
import sys
from pathlib import Path
from optigpu.backends import BACKENDS
from optigpu.backends.base import Order
from optigpu.hardware import probe
from optigpu.vocabulary import DeviceKind
from optigpu.workloads.generate import Generate

folder = Path({str(folder)!r})
order = Order({TINY!r}, (), Generate(), DeviceKind.CPU, 0, 1, folder, probe())
runtime = BACKENDS[{backend!r}].prepare(order, lambda _: None)
request = Generate(prompt_tokens=4, new_tokens=4).prepare(runtime)
assert request.run()["tokens_per_s"] > 0
assert runtime.weights().hash
print([name for name in sorted({names!r}) if sys.modules.get(name)])
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()
