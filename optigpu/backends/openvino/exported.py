"""transformers models as OpenVINO models: traced by torch, and given the inputs that OpenVINO's own pipelines have.

The cache of a converted decoder becomes state of its infer requests, which OpenVINO then keeps in its own form. The
inputs and outputs have the names that OpenVINO's pipelines for text look for.
"""

import math
from collections.abc import Iterator

import torch
from torch.jit import ScriptModule
from torch.nn import Module
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from optigpu.backends.openvino.contents import NOTES
from optigpu.backends.openvino.library import apply_make_stateful_transformation, ops, ov
from optigpu.documents.facts import ModelFacts
from optigpu.models.loading.expressed import require_same, window_of
from optigpu.models.loading.footprint import image_footprint_of
from optigpu.models.loading.load import (
    ClassLogits,
    count_weights,
    load_image_model,
    load_model,
    loaded_facts,
    loaded_image_facts,
)
from optigpu.models.reference import parse_reference
from optigpu.surgery.places import exchange, expert_places
from optigpu.vocabulary import UnsupportedError

TOKENS = ("input_ids", "attention_mask", "position_ids")
_ROWS, _NEW, _PAST = 2, 3, 4
"""The sizes that are traced; all are left open after it."""
ORDER = "beam_idx"
"""The input that says which row each row goes on from."""


class LastLogits(Module):
    """A decoder that is given its cache: the logits of the last token, then the keys and values of each layer.

    All rows have the same length, so the mask says who is earlier and looks at no padding.
    """

    def __init__(self, model: PreTrainedModel, window: int | None) -> None:
        super().__init__()
        self.model = model
        self.window = window

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        *past: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """`past`: keys and values in turn, [batch, heads, length, size] each."""
        cache = _filled(past)
        seen = torch.arange(attention_mask.shape[1])[None, None, None, :]
        asking = position_ids[:, None, :, None]
        hidden = seen > asking
        if self.window is not None:
            hidden = hidden | (seen <= asking - self.window)
        lowest = torch.finfo(torch.float32).min
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=torch.where(hidden, lowest, 0.0),
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return (outputs.logits, *_kept(cache))


def exported_decoder(model: str, seed: int, threads: int) -> ov.Model:
    """A decoder whose keys and values are state of an infer request.

    Raises UnsupportedError for a model that cannot be loaded, and one that a trace does not express.
    """
    torch.set_num_threads(threads)
    loaded = load_model(parse_reference(model), device="cpu", dtype="float32", attention="sdpa", seed=seed)
    facts = loaded_facts(loaded)
    made = ov.convert_model(traced_decoder(loaded, facts))
    past, present = (
        [f"{kind}.{layer}.{part}" for layer in range(facts.layers) for part in ("key", "value")]
        for kind in ("past", "present")
    )
    for ports, names in ((made.inputs, [*TOKENS, *past]), (made.outputs, ["logits", *present])):
        for port, name in zip(ports, names, strict=True):
            port.get_tensor().set_names({name})
    open_past = ov.PartialShape([-1, facts.kv_heads, -1, facts.head_size])
    made.reshape(dict.fromkeys(TOKENS, ov.PartialShape([-1, -1])) | dict.fromkeys(past, open_past))
    _make_stateful(made, dict(zip(past, present, strict=True)))
    _note(made, parameters=count_weights(loaded))
    return made


def traced_decoder(model: PreTrainedModel, facts: ModelFacts) -> ScriptModule:
    """LastLogits of a model, for any number of rows and tokens. Raises UnsupportedError as `exported_decoder`.

    The experts of a mixture become linear layers: a trace has the same products for all tokens.
    """
    exchange(expert_places(model), lambda layer: layer)
    wrapped = LastLogits(model, window_of(model, "openvino")).eval()
    past = [torch.zeros(_ROWS, facts.kv_heads, _PAST, facts.head_size) for _ in range(2 * facts.layers)]
    positions = torch.arange(_PAST, _PAST + _NEW).expand(_ROWS, _NEW)
    tokens = (torch.zeros(_ROWS, _NEW, dtype=torch.int64), torch.ones(_ROWS, _PAST + _NEW, dtype=torch.int64))
    traced = _traced(wrapped, (*tokens, positions, *past))
    # Asks the trace for other tokens, of other lengths, than it was made with: a prompt, and a step after it.
    count = _PAST + _NEW
    ids = torch.linspace(0, facts.vocabulary - 1, count).long()[None]
    past = [torch.zeros(1, facts.kv_heads, 0, facts.head_size) for _ in range(2 * facts.layers)]
    with torch.no_grad():
        for start, end in ((0, count - 1), (count - 1, count)):
            seen, positions = torch.ones(1, end, dtype=torch.int64), torch.arange(start, end)[None]
            found, *past = traced(ids[:, start:end], seen, positions, *past)
            expected = model(input_ids=ids[:, :end], use_cache=False).logits[:, -1]
            require_same(found[:, -1], expected, model, "openvino")
    return traced


def exported_classifier(model: str, seed: int, threads: int, side: int) -> ov.Model:
    """A classifier of images of `side` pixels, in any number. Raises UnsupportedError for one that cannot be loaded."""
    torch.set_num_threads(threads)
    loaded = load_image_model(parse_reference(model), device="cpu", dtype="float32", seed=seed)
    facts = loaded_image_facts(loaded)
    shape = (facts.channels, side, side)
    made = ov.convert_model(_traced(ClassLogits(loaded).eval(), (torch.zeros(_ROWS, *shape),)))
    made.reshape(ov.PartialShape([-1, *shape]))
    _note(made, parameters=count_weights(loaded), flops=image_footprint_of(loaded, facts, shape).flops)
    return made


def _traced(module: LastLogits | ClassLogits, inputs: tuple[torch.Tensor, ...]) -> ScriptModule:
    """Raises UnsupportedError for a model that takes no such inputs."""
    try:
        with torch.no_grad():
            traced: ScriptModule = torch.jit.trace(module, inputs, strict=False, check_trace=False)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        kind = module.model.config.model_type
        raise UnsupportedError(f"openvino cannot trace {kind} models: {why[:300]}") from error
    return traced


def _filled(past: tuple[torch.Tensor, ...]) -> DynamicCache:
    cache = DynamicCache()
    for keys, values in zip(past[::2], past[1::2], strict=True):
        layer = DynamicLayer()
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        cache.layers.append(layer)
    return cache


def _kept(cache: DynamicCache) -> Iterator[torch.Tensor]:
    for layer in cache.layers:
        assert isinstance(layer, DynamicLayer), "_filled makes no other"
        assert layer.keys is not None
        assert layer.values is not None
        yield layer.keys
        yield layer.values


def _note(model: ov.Model, **numbers: float) -> None:
    for name, number in numbers.items():
        model.set_rt_info(str(math.floor(number)), [NOTES, name])


def _make_stateful(model: ov.Model, present_of: dict[str, str]) -> None:
    """The past becomes state that begins empty with as many rows as ORDER has, and that the present is assigned to."""
    order = ops.parameter([-1], ov.Type.i32, name=ORDER)
    order.output(0).get_tensor().set_names({ORDER})
    model.add_parameters([order])
    for name in present_of:
        port = model.input(name)
        readers = port.get_target_inputs()
        taken = ops.gather(port, order, ops.constant(0, ov.Type.i64))  # along the rows
        for reader in readers:
            reader.replace_source_output(taken.output(0))
    model.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(model, present_of)
    for read in [each for each in model.get_ordered_ops() if each.get_type_name() == "ReadValue"]:
        _, heads, _, size = read.get_output_partial_shape(0)
        rest = ops.constant([heads.get_length(), 0, size.get_length()], ov.Type.i64)
        shape = ops.concat([ops.shape_of(order, output_type="i64"), rest], axis=0)
        read.set_arguments([ops.broadcast(ops.constant(0.0, ov.Type.f32), shape).output(0)])
    model.validate_nodes_and_infer_types()
