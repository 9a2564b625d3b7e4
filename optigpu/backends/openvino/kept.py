"""Models in OpenVINO's format, written once and kept: a folder each, with the graph and its constants."""

from collections.abc import Callable
from pathlib import Path

from optigpu.backends import traced
from optigpu.backends.base import Order
from optigpu.backends.converted import Converter
from optigpu.backends.converter_program import model_arguments
from optigpu.backends.openvino import convert
from optigpu.backends.openvino.settings import PLAIN, WeightForm

_WRITERS = ("contents", "convert", "exported")
CONVERTER = Converter(
    engine="openvino",
    program=convert.__name__,
    suffix=".openvino",
    sources=(*(Path(__file__).with_name(f"{name}.py") for name in _WRITERS), Path(traced.__file__)),
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


def classifier_of(order: Order, side: int, progress: Callable[[str], None]) -> Path:
    """The folder of an order's classifier for images of that side. Raises as `decoder_of` does."""
    arguments = [*model_arguments(order), "--side", str(side)]
    return CONVERTER.made(order, f"{PLAIN}-{side}", arguments, progress)
