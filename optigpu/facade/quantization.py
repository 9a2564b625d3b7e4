"""QuantizationOptimizer: a model in one of nine precisions, loaded and changed in this process."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from optigpu.documents.fields import closest, did_you_mean
from optigpu.documents.result import Environment
from optigpu.documents.shapes import ModelFacts
from optigpu.facade.decoded import ORIGINS, Origin
from optigpu.facade.in_process import device_of
from optigpu.facade.quantized import accelerate
from optigpu.hardware import best_device, probe
from optigpu.job.spec import resolve
from optigpu.models.facts import known_facts
from optigpu.models.reference import ModelReference, parse_reference
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import Technique
from optigpu.techniques.decoding.native_decode import NativeDecode
from optigpu.vocabulary import DeviceKind, SpecError, UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NATIVE, INT4 = "native", "int4"
STACKS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "fp32": (),
        "fp16": ("fp16",),
        "bf16": ("bf16",),
        "int8": ("int8_weight_only",),
        INT4: ("int4_weight_only",),
        "nf4": ("nf4",),
        "gptq": ("gptq",),
        "awq": ("awq",),
        NATIVE: ("native_decode",),
    }
)
"""The techniques of each precision; int4 is NF4 where its library and a GPU are there."""


class QuantizationOptimizer:
    """Loads language models in a precision, by the techniques that jobs measure."""

    @staticmethod
    def load(
        name: str, precision: str, *, device: str | None = None, seed: int = 0
    ) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase | None]":
        """A model that is ready for `model.generate`, and its tokenizer.

        `name` is a reference as in a job: preset:NAME, bundled:tiny, path:DIR, or a name of the hub such as "gpt2". A
        preset has random weights, drawn from `seed`, and no tokenizer: that is None. `precision` is one of

        - fp32, fp16, bf16: the dtype of the weights;
        - int8: int8 weights with a scale for each output channel (`int8_weight_only`);
        - int4: NF4 where bitsandbytes and a GPU are there, else 4-bit integers (`int4_weight_only`);
        - nf4, gptq, awq: those techniques, which need their extras or a checkpoint that was made so;
        - native: our decoder behind `model.generate`, by `optigpu.accelerate`.

        Raises SpecError for an unknown precision, device or name, which lists the known ones, and UnsupportedError
        where this machine cannot do it or the model cannot be had, for example without a network.

        >>> from optigpu import QuantizationOptimizer
        >>> model, tokenizer = QuantizationOptimizer.load("bundled:tiny", precision="int8", device="cpu")
        >>> ids = tokenizer("Once upon a time", return_tensors="pt").input_ids
        >>> model.generate(ids, max_new_tokens=4).shape[1] - ids.shape[1]
        4
        """
        if precision not in STACKS:
            meant = did_you_mean(closest(precision, STACKS))
            raise SpecError(
                f"There is no precision {precision!r}.{meant} The precisions are {', '.join(STACKS)}."
            )
        reference, kind = parse_reference(name), best_device() if device is None else device_of(device)
        environment, names = probe(), STACKS[precision]
        if precision == INT4 and kind is DeviceKind.CUDA and "bitsandbytes" in environment.software:
            names = STACKS["nf4"]
        stack = tuple(TECHNIQUES[name](name=name) for name in names)
        _require(stack, environment, kind, reference)
        from optigpu.backends.torch.applied import DecodingModel
        from optigpu.models.loading.load import load_tokenizer
        from optigpu.techniques.decoding.native_decode.programs import attached

        applied = resolve(() if precision == NATIVE else stack, "generate")
        loaded = DecodingModel(str(reference), applied, kind, seed, lambda _: None)
        model, weights = loaded.model, loaded.weights
        if precision == NATIVE:
            accelerate(model)
            stack = (NativeDecode(weights=attached(model).head.kind, calibration="none"),)
        ORIGINS[model] = Origin(str(reference), stack, weights)
        return model, None if reference.kind == "preset" else load_tokenizer(reference)


def _require(
    stack: tuple[Technique, ...], environment: Environment, device: DeviceKind, reference: ModelReference
) -> None:
    facts = known_facts(reference)
    decoder = facts if isinstance(facts, ModelFacts) else None
    for technique in stack:
        if device not in technique.devices:
            raise UnsupportedError(technique.not_on(device))
        if reason := technique.check(environment, device, decoder):
            raise UnsupportedError(reason)
