"""python tensorflow_passes.py FOLDER: what the tensorflow backend makes of FOLDER's networks, as JSON.

A program of its own, by a Python with TensorFlow, which shares no process with Triton.
"""

import json
import sys
from pathlib import Path
from typing import cast

import keras
import numpy as np

from optigpu.backends.base import Order
from optigpu.backends.runtime import ImageRuntime
from optigpu.backends.tensorflow import TensorFlowBackend
from optigpu.backends.tensorflow.runtime import TensorFlowRuntime
from optigpu.hardware import probe
from optigpu.techniques.base import Technique
from optigpu.techniques.compilation.tensorflow_xla import TensorflowXla
from optigpu.vocabulary import DeviceKind, UnsupportedError
from optigpu.workloads.classify import Classify

BATCH = 2
BACKEND = TensorFlowBackend()


def ordered(name: str, *stack: Technique) -> Order:
    workload = Classify(batch_size=BATCH)
    return Order(f"path:{name}.keras", stack, workload, DeviceKind.CPU, 0, 1, Path("unused"), probe())


def prepared(name: str, *stack: Technique) -> TensorFlowRuntime:
    runtime = BACKEND.prepare(ordered(name, *stack), _silent)
    assert isinstance(runtime, TensorFlowRuntime)
    return runtime


def told(name: str) -> dict[str, object]:
    """How far the logits are from Keras' own, and what is known of the network."""
    model = keras.models.load_model(Path(sys.argv[1]) / f"{name}.keras", compile=False)
    side, _, channels = model.input_shape[1:]
    images = np.random.default_rng(1).standard_normal((BATCH, channels, side, side), np.float32)
    expected = np.asarray(model(images.transpose(0, 2, 3, 1), training=False))
    plain, compiled = prepared(name), prepared(name, TensorflowXla())
    return {
        "apart": float(np.abs(plain.forward(images).logits - expected).max()),
        "apart_xla": float(np.abs(compiled.forward(images).logits - expected).max()),
        "chosen": plain.forward(images).chosen.tolist() == expected.argmax(axis=-1).tolist(),
        "parameters": plain.weights().parameters == model.count_params(),
        "flops": plain.footprint().flops,
        "xla": [each.notes.facts["tensorflow_xla"] for each in (plain, compiled)],
        "problem": Classify(batch_size=BATCH).prepare(cast(ImageRuntime, plain)).check().problem,
    }


def refused(name: str) -> str:
    try:
        BACKEND.prepare(ordered(name), _silent)
    except UnsupportedError as error:
        return str(error)
    return "it was not refused"


def _silent(_: str) -> None:
    """Ignores what is done."""


BACKEND.use_threads(1)
print(json.dumps({"tiny": told("tiny"), "vector": refused("vector"), "dynamic": refused("dynamic"),
                  "damaged": refused("damaged"), "absent": refused("absent")}))  # fmt: skip
