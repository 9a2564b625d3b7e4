"""What techniques declare of the layers of this folder. Read when a job is posted: imports no torch."""

from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from optigpu.documents.result import Environment
from optigpu.vocabulary import Frozen

Package = Literal["bitsandbytes", "gptqmodel", "peft"]
_EXTRAS = {"bitsandbytes": "quant", "torchao": "quant", "gptqmodel": "gptq", "peft": "train"}
_ENGINES = ("llama-cpp-python", "gguf", "ai-edge-litert", "openvino", "nncf")
OPTIONAL_PACKAGES = (*_EXTRAS, "triton", *_ENGINES)
"""Packages that a machine may have or lack; workers say which they have. Triton comes with torch for NVIDIA GPUs."""


def missing(packages: Iterable[Package], environment: Environment) -> str | None:
    """Why the first package that is not installed cannot be used, with the command that installs it; else None."""
    absent = (package for package in packages if package not in environment.software)
    return next(map(how_to_install, absent), None)


def how_to_install(package: Package) -> str:
    return f"{package} is not installed; install it with: {install_command(package)}."


def install_command(package: str) -> str:
    extra = _EXTRAS.get(package)
    return f"pip install -e '.[{extra}]'" if extra else f"pip install {package}"


Targets = Literal["all-linear", "attention"]
"""Every linear layer but the head and the experts of a mixture, or those within attentions."""


class AdapterParameters(Frozen):
    """The parameters of a technique that trains factors A [rank, inputs] and B [outputs, rank] beside layers.

    A layer computes W x + alpha / rank * B A x; B begins at zero.
    """

    rank: int = Field(8, ge=1, le=1024, description="Rows of A, and columns of B.")
    alpha: float = Field(16.0, gt=0, le=4096, description="Weight of the factors, times the rank.")
    targets: Targets = Field("all-linear", description="Which layers get factors; the head never does.")


FOUR_BITS = {
    "autocast": "the 4-bit operator computes in the dtype of its inputs, which autocast does not change",
    "cpu_offload": "weights are packed for the device that loads them, and an offloaded model is loaded on the CPU",
    "grad_enabled": "4-bit weights have no gradient",
}
KEEPS_A_CACHE = {"no_kv_cache": "one uses a key-value cache and the other disables it"}
FUSED_ACTIVATIONS = {
    "grad_enabled": "the fused activation has no gradient",
    "cpu_offload": "its kernel is chosen where the weights are loaded, which is the CPU for an offloaded model",
}
STAGING_SLOTS = 2
"""Layers of an offloaded model on the device at once: one that computes and one that arrives."""


def other_vocabulary(draft: str, drafting: int, model: int) -> str | None:
    """Why a draft of so many ids cannot guess for a model of so many, in one sentence, or None."""
    if drafting == model:
        return None
    return (
        f"speculative_decoding needs a draft with the model's vocabulary; {draft} has {drafting} tokens and the model "
        f"{model}. Name another draft."
    )
