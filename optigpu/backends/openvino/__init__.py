"""The openvino backend: models in OpenVINO's own format, converted here, on a CPU.

Without a technique a variant is the baseline: weights, products, keys and values in float32. What a stack asks of
OpenVINO stands here, how weights are stored and the properties that a model is compiled with: only `start` and
`prepare` import OpenVINO.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from optigpu.backends.base import Order
from optigpu.backends.converted import Converter, model_arguments
from optigpu.backends.engine import EngineBackend
from optigpu.techniques.base import EngineOptions


class OpenVinoBackend(EngineBackend):
    """Decodes and classifies on a CPU, what transformers has a model of and OpenVINO can convert."""

    name = "openvino"
    summary = "decoders and image classifiers in OpenVINO's format, on a CPU"
    packages = ("openvino", "nncf")
    install = 'pip install -e ".[openvino]"'
    workloads = ("generate", "quality", "classify")


PLAIN = "float32"
DYNAMIC_GROUP = 32
"""Activations of a row that share a scale where products are of int8; OpenVINO's own default on a CPU."""
DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "u8": "uint8", "i8": "int8"}
"""OpenVINO's names of the numbers that it computes with, and ours."""


@dataclass(frozen=True)
class WeightForm:
    """How matrices are stored. `mode` is NNCF's name of a way to quantize, or PLAIN.

    `group` is how many numbers of a row share a scale, 0 for a whole row. `everywhere` is said of 4 bits alone.
    """

    mode: str
    group: int = 0
    everywhere: bool = False

    @property
    def name(self) -> str:
        """For a file's name: "int4_sym-128-all"."""
        parts = (self.mode, str(self.group) if self.group else "", "all" if self.everywhere else "")
        return "-".join(part for part in parts if part)


def form_of(options: EngineOptions) -> WeightForm:
    """What a stack asks for; PLAIN without a technique that names another."""
    return WeightForm(options.weights, options.group, bool(options.everywhere))


def properties_of(options: EngineOptions, threads: int) -> dict[str, str]:
    """How a model is compiled: for one request at a time, with the threads that it may use.

    Weights of float32 are multiplied in float32 and have a cache of float32, and what is not rounded to int8 for a
    product is float32 as well. Else OpenVINO's own defaults hold, where no technique says otherwise.
    """
    found = {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": "1",
        "INFERENCE_NUM_THREADS": str(threads),
        "ENABLE_CPU_PINNING": "YES",
    }
    if options.weights == PLAIN:
        found |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    if options.cache is not None:
        found["KV_CACHE_PRECISION"] = options.cache
    if options.products is not None:
        group = DYNAMIC_GROUP if options.products == "int8" else 0
        found["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = str(group)
    if options.products == "int8":
        # On a CPU with AMX the default is bfloat16, in which OpenVINO rounds no activations to int8.
        found["INFERENCE_PRECISION_HINT"] = "f32"
    return found


_WRITERS = ("contents", "convert", "exported")
CONVERTER = Converter(
    engine="openvino",
    program="optigpu.backends.openvino.convert",
    suffix=".openvino",
    sources=tuple(Path(__file__).with_name(f"{name}.py") for name in _WRITERS),
    libraries=("torch", "transformers", "openvino", "nncf"),
)


def decoder_of(order: Order, form: WeightForm, progress: Callable[[str], None]) -> Path:
    """The folder of an order's decoder; other forms than PLAIN are made of that one, which is written before them.

    Raises UnsupportedError for a model that cannot be converted, OptiGPUError when writing fails.
    """
    if form.mode == PLAIN or CONVERTER.kept(order, form.name):
        return CONVERTER.made(order, form.name, model_arguments(order), progress)
    plain = CONVERTER.made(order, PLAIN, model_arguments(order), progress)
    how = ["--plain", str(plain), "--mode", form.mode, "--group", str(form.group)]
    if form.everywhere:
        how.append("--everywhere")
    return CONVERTER.made(order, form.name, how, progress, "quantizing the weights")
