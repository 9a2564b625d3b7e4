"""OpenVINO GenAI's LLMPipeline on the variant's folder, by its own `perf_metrics`.

The pipeline asks for a tokenizer although prompts are ids: the bundled model's is converted for it.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from benchmarks.own_tools.asked import Rate, found, parser, serve
from optigpu.backends.base import Order
from optigpu.vocabulary import UnsupportedError


def piped(order: Order) -> Rate:
    """With the attention of the graph, as the variant has it. Raises UnsupportedError where the package is missing."""
    if find_spec("openvino_genai") is None:
        raise UnsupportedError("openvino_genai is not installed; install with: pip install openvino-genai")
    import openvino_genai

    from optigpu.backends.openvino.kept import CONVERTER
    from optigpu.backends.openvino.library import ov
    from optigpu.backends.openvino.settings import form_of, properties_of
    from optigpu.techniques.base import engine_options

    options = engine_options(order.stack)
    _link(found(CONVERTER.kept(order, form_of(options).name)), order.folder)
    properties = properties_of(options, order.threads) | {"ATTENTION_BACKEND": "SDPA"}
    pipeline = openvino_genai.LLMPipeline(order.folder, _tokenizer(order.folder), "CPU", **properties)

    def rate(prompt: Sequence[int], count: int) -> float:
        asked = openvino_genai.GenerationConfig(max_new_tokens=count, ignore_eos=True)
        answer = pipeline.generate(ov.Tensor(np.array([list(prompt)], np.int64)), asked)
        return float(1e3 / answer.perf_metrics.get_tpot().mean)

    return rate


def _link(kept: Path, folder: Path) -> None:
    """The names that the pipeline looks for."""
    for path in kept.glob("model.*"):
        (folder / f"openvino_{path.name}").symlink_to(path)


def _tokenizer(folder: Path) -> object:
    import openvino as ov
    import openvino_genai
    from openvino_tokenizers import convert_tokenizer

    from optigpu.models.loading.load import load_tokenizer
    from optigpu.models.reference import parse_reference

    made = convert_tokenizer(load_tokenizer(parse_reference("bundled:tiny")), with_detokenizer=True)
    for model, name in zip(made, ("tokenizer", "detokenizer"), strict=True):
        ov.save_model(model, folder / f"openvino_{name}.xml")
    return openvino_genai.Tokenizer(folder)


if __name__ == "__main__":
    serve(piped, parser(__doc__).parse_args())
