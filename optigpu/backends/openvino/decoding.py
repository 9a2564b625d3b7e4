"""A decoder in OpenVINO, as what workloads and meters ask of."""

from collections.abc import Callable
from importlib.metadata import version

from optigpu.backends.base import Order
from optigpu.backends.converted import weights_of, whole
from optigpu.backends.openvino.contents import Contents, contents_of
from optigpu.backends.openvino.library import ov
from optigpu.backends.openvino.model import OpenVinoModel, Sequences
from optigpu.backends.openvino.settings import PLAIN, decoder_of, form_of, properties_of
from optigpu.backends.stepped import Loaded, SteppedRuntime
from optigpu.documents.shapes import Footprint, ModelFacts
from optigpu.models.described import decoder_facts
from optigpu.models.reference import parse_reference
from optigpu.techniques.base import Notes, engine_options

_WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2}
ENGINE = "OpenVINO"
NOT_SAID = "OpenVINO has its own attention, not one of transformers'."


def prepared(order: Order, progress: Callable[[str], None]) -> SteppedRuntime:
    """Converts the model if it is not kept already, and compiles it.

    Raises UnsupportedError for a model that cannot be converted, OptiGPUError when writing or reading fails.
    """
    facts = decoder_facts(parse_reference(str(order.model)))
    options = engine_options(order.stack)
    path = decoder_of(order, form_of(options), progress)
    progress("compiling")
    with whole(path, ENGINE):
        contents = contents_of(path)
        model = OpenVinoModel(path, properties_of(options, order.threads))
    own = contents.figures
    loaded = Loaded(
        engine=ENGINE,
        facts=facts,
        steps=lambda rows, length: Sequences(model, rows, length),
        weights=weights_of(order).model_copy(update=own),
        footprint=Footprint(facts, contents.streamed_bytes, contents.row_bytes, multiplied(model, contents)),
    )
    notes = described(model, contents)
    notes.record(
        attention_kernels=model.attention,
        kv_cache=ENGINE,
        kv_cache_dtype=model.cache_dtype,
        kv_cache_bytes_per_token=_cached_bytes(facts, model.cache_dtype),
        decode_loop="OptiGPU's, a request for each step",
        decode_operator="a compiled graph with the cache as its state",
        openvino_weights=form_of(options).name,
    )
    return SteppedRuntime(order, loaded, notes)


def multiplied(model: OpenVinoModel, contents: Contents) -> tuple[str, ...]:
    """What is multiplied besides float32: a narrower float, and int8 where activations are rounded to it."""
    floats = () if model.dtype == PLAIN else (model.dtype,)
    return (*floats, "int8") if contents.is_quantized and model.dynamic_group else floats


def described(model: OpenVinoModel, contents: Contents) -> Notes:
    """The facts that a decoder and a classifier share."""
    notes = Notes()
    notes.record(
        dtype=PLAIN,
        threads=model.threads,
        versions={name: version(name) for name in ("openvino", "nncf")},
        reasons={"attn_implementation": NOT_SAID},
        openvino_build=ov.get_version(),
        openvino_cpu=model.cpu,
        openvino_capabilities=model.capabilities,
        openvino_computes_in=model.dtype,
        openvino_dynamic_quantization_group=model.dynamic_group,
        openvino_constants=contents.types,
    )
    return notes


def _cached_bytes(facts: ModelFacts, dtype: str) -> int:
    """Of one token; keys and values of 8 bits have a scale and an offset in float32 for each head."""
    width = _WIDTHS.get(dtype)
    of_a_head = facts.head_size + 8 if width is None else facts.head_size * width
    return 2 * facts.layers * facts.kv_heads * of_a_head
