"""Decoders and image classifiers that OpenVINO has compiled for a CPU, as what workloads and meters ask of."""

from collections import Counter
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

import numpy as np

from optigpu.backends.base import Order
from optigpu.backends.converted import model_arguments, weights_of, whole
from optigpu.backends.engine import EngineRuntime, SteppedRuntime, timed_pass
from optigpu.backends.openvino import CONVERTER, DTYPES, PLAIN, decoder_of, form_of, properties_of
from optigpu.backends.openvino.contents import GRAPH, Contents, contents_of
from optigpu.backends.openvino.library import ov
from optigpu.backends.runtime import Ids, Images, Logits, Pass, Runtime
from optigpu.documents.facts import Footprint, ImageFacts, ImageFootprint
from optigpu.hardware.cpu import has_vnni
from optigpu.models.described import decoder_facts, known_facts
from optigpu.techniques.base import Notes, engine_options
from optigpu.vocabulary import Task, UnsupportedError

ENGINE = "OpenVINO"
_DEVICE = "CPU"
_WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2}
_ATTENTION = "ScaledDotProductAttention"
"""The operator that computes attention, and appends to the cache where it is state."""
_SHARED = "undef"
"""The kernel of a layer that takes an earlier layer's."""


def prepared(order: Order, progress: Callable[[str], None]) -> Runtime:
    """Converts the model if it is not kept already, and compiles it.

    Raises UnsupportedError for a model that cannot be converted, OptiGPUError when writing or reading fails.
    """
    if order.workload.task is Task.IMAGES:
        return OpenVinoImages(order, progress)
    facts = decoder_facts(order.reference)
    options = engine_options(order.stack)
    form = form_of(options)
    path = decoder_of(order, form, progress)
    progress("compiling")
    with whole(path, ENGINE):
        contents = contents_of(path)
        model = OpenVinoModel(path, properties_of(options, order.threads))
    # Keys and values of 8 bits have a scale and an offset in float32 for each head.
    width = _WIDTHS.get(model.cache_dtype)
    of_a_head = facts.head_size + 8 if width is None else facts.head_size * width
    notes = model.described(contents)
    notes.record(
        kv_cache=ENGINE,
        kv_cache_dtype=model.cache_dtype,
        kv_cache_bytes_per_token=2 * facts.layers * facts.kv_heads * of_a_head,
        decode_loop="OptiGPU's, a request for each step",
        decode_operator="a compiled graph with the cache as its state",
        openvino_weights=form.name,
    )
    products = model.products(contents)
    return SteppedRuntime(
        order,
        notes,
        engine=ENGINE,
        facts=facts,
        steps=lambda rows, length: Sequences(model, rows, length),
        weights=weights_of(order).model_copy(update=contents.figures),
        footprint=Footprint(facts, contents.streamed_bytes, contents.row_bytes, products),
    )


class OpenVinoModel:
    """A compiled model. `shape` fixes that of its one input, for an image classifier."""

    def __init__(
        self, folder: Path, properties: Mapping[str, str], shape: tuple[int, ...] | None = None
    ) -> None:
        """Raises RuntimeError when OpenVINO cannot read or compile it."""
        self._core = ov.Core()
        model = self._core.read_model(folder / GRAPH)
        if shape is not None:
            model.reshape(ov.PartialShape(list(shape)))
        self._compiled = self._core.compile_model(model, _DEVICE, dict(properties))

    @property
    def dtype(self) -> str:
        """What floats are multiplied in."""
        return _dtype(self._compiled.get_property("INFERENCE_PRECISION_HINT"))

    @property
    def cache_dtype(self) -> str:
        """What keys and values are kept in."""
        return _dtype(self._compiled.get_property("KV_CACHE_PRECISION"))

    @property
    def dynamic_group(self) -> int:
        """How many activations share a scale where products are of int8; 0 where they are of floats.

        Without VNNI OpenVINO multiplies floats, whatever group it is asked for.
        """
        if not has_vnni():
            return 0
        return int(str(self._compiled.get_property("DYNAMIC_QUANTIZATION_GROUP_SIZE")))

    def products(self, contents: Contents) -> tuple[str, ...]:
        """What is multiplied besides float32: a narrower float, and int8 where activations are rounded to it."""
        floats = () if self.dtype == PLAIN else (self.dtype,)
        return (*floats, "int8") if contents.is_quantized and self.dynamic_group else floats

    def described(self, contents: Contents) -> Notes:
        """The facts that a decoder and a classifier share."""
        capabilities = self._core.get_property(_DEVICE, "OPTIMIZATION_CAPABILITIES")
        notes = Notes()
        notes.record(
            dtype=PLAIN,
            threads=int(str(self._compiled.get_property("INFERENCE_NUM_THREADS"))),
            versions={name: version(name) for name in ("openvino", "nncf")},
            reasons={"attn_implementation": "OpenVINO has its own attention, not one of transformers'."},
            attention_kernels=self._attention(),
            openvino_build=ov.get_version(),
            openvino_cpu=str(self._core.get_property(_DEVICE, "FULL_DEVICE_NAME")),
            openvino_capabilities=[str(each) for each in capabilities],
            openvino_computes_in=self.dtype,
            openvino_dynamic_quantization_group=self.dynamic_group,
            openvino_constants=dict(Counter(each.type for each in contents.constants)),
        )
        return notes

    def _attention(self) -> tuple[str, ...]:
        """The operators of the compiled graph that compute attention, with the kernels that OpenVINO names for them."""
        found = set()
        for node in self._compiled.get_runtime_model().get_ops():
            said = node.get_rt_info()
            kind = str(said["layerType"].astype(str)) if "layerType" in said else ""
            kernel = str(said["primitiveType"].astype(str)) if kind == _ATTENTION else _SHARED
            if not kernel.startswith(_SHARED):
                found.add(f"{kind} {kernel}")
        return tuple(sorted(found))

    def request(self) -> ov.InferRequest:
        """A request with state of its own."""
        return self._compiled.create_infer_request()


class Sequences:
    """`rows` sequences of at most `length` tokens that are decoded together; their keys and values are OpenVINO's."""

    def __init__(self, model: OpenVinoModel, rows: int, length: int) -> None:
        self.rows, self.length = rows, length
        self._request = model.request()
        self._order = np.arange(rows, dtype=np.int32)
        self._used = 0

    def begin(self) -> None:
        """Forgets the sequences."""
        self._used = 0
        self._request.reset_state()

    def forward(self, tokens: Ids) -> Logits:
        """Appends `tokens` [rows, count]. Logits after the last token of each, in OpenVINO's memory until the next."""
        rows, count = tokens.shape
        end = self._used + count
        positions = np.broadcast_to(np.arange(self._used, end), (rows, count))
        given = {
            "input_ids": np.ascontiguousarray(tokens),
            "attention_mask": np.ones((rows, end), np.int64),
            "position_ids": np.ascontiguousarray(positions),
            "beam_idx": self._order,
        }
        self._request.infer(given, share_inputs=True, share_outputs=True)
        self._used = end
        logits: Logits = self._request.get_output_tensor(0).data[:, -1]
        return logits

    def close(self) -> None:
        """Gives the request back, and its keys and values with it."""
        del self._request


def _dtype(name: object) -> str:
    """Of OpenVINO's type, as text or as its own class: <Type: 'float32'>, "f32"."""
    said = name.get_type_name() if isinstance(name, ov.Type) else str(name)
    return DTYPES.get(said, said)


class OpenVinoImages(EngineRuntime):
    """An ImageRuntime: a graph of one shape, which is compiled anew for another number of images."""

    engine = ENGINE

    def __init__(self, order: Order, progress: Callable[[str], None]) -> None:
        """Raises UnsupportedError for a model that is no preset of a classifier, OptiGPUError when writing fails."""
        self.device, self.seed = order.device, order.seed
        facts = known_facts(order.reference)
        if not isinstance(facts, ImageFacts):
            raise UnsupportedError(
                f"openvino cannot classify with {order.reference}: only presets of image classifiers are converted; "
                "name one, for example preset:resnet-50."
            )
        self.facts = facts
        side = order.workload.image_side or facts.image_size
        arguments = [*model_arguments(order), "--side", str(side)]
        self._folder = CONVERTER.made(order, f"{PLAIN}-{side}", arguments, progress)
        self._properties = properties_of(engine_options(order.stack), order.threads)
        progress("compiling")
        with whole(self._folder, ENGINE):
            self._contents = contents_of(self._folder)
            self._compile((order.workload.classified_images or 1, facts.channels, side, side))
        self._weights = weights_of(order).model_copy(update=self._contents.figures)
        self.notes = self._model.described(self._contents)

    def forward(self, inputs: Images) -> Pass:
        """Its time ends when the most likely class of each image is chosen, as every backend's does."""
        if inputs.shape != self._shape:
            self._compile(inputs.shape)
        given = [np.ascontiguousarray(inputs)]

        def run() -> Logits:
            self._request.infer(given, share_inputs=True, share_outputs=True)
            logits: Logits = self._request.get_output_tensor(0).data
            return logits

        return timed_pass(run)

    def footprint(self) -> ImageFootprint:
        """A pass reads all constants."""
        contents, pixels = self._contents, int(np.prod(self._shape[1:]))
        products = self._model.products(contents)
        return ImageFootprint(self.facts, contents.bytes, contents.notes["flops"], pixels, products)

    def _compile(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        self._model = OpenVinoModel(self._folder, self._properties, shape)
        self._request = self._model.request()
