"""Orders of the onnxruntime backend, and what transformers gives for the same models."""

from pathlib import Path
from typing import Any

import numpy as np

from optigpu.backends import BACKENDS
from optigpu.backends.base import Order
from optigpu.hardware import probe
from optigpu.techniques.base import Technique
from optigpu.vocabulary import DeviceKind
from optigpu.workloads.base import Workload
from optigpu.workloads.generate import Generate

BACKEND = BACKENDS["onnxruntime"]
TINY = "bundled:tiny"


def ordered(
    folder: Path, *stack: Technique, model: str = TINY, workload: Workload | None = None, threads: int = 1
) -> Order:
    return Order(model, stack, workload or Generate(), DeviceKind.CPU, 0, threads, folder, probe())


def prepared(
    folder: Path, *stack: Technique, model: str = TINY, workload: Workload | None = None, threads: int = 1
) -> Any:
    order = ordered(folder, *stack, model=model, workload=workload, threads=threads)
    return BACKEND.prepare(order, lambda _: None)


def prompts(rows: int, length: int, vocabulary: int = 2048) -> Any:
    return np.random.default_rng(5).integers(vocabulary, size=(rows, length))


def torch_model(reference: str) -> Any:
    from optigpu.models.loading.load import load_model
    from optigpu.models.reference import parse_reference

    return load_model(parse_reference(reference), device="cpu", dtype="float32")


def torch_logits(model: Any, tokens: Any) -> Any:
    """After each token, [rows, length, vocabulary]."""
    import torch

    with torch.no_grad():
        return model(input_ids=torch.from_numpy(tokens)).logits.numpy()
