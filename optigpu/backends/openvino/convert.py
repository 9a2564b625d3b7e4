"""python -m optigpu.backends.openvino.convert: writes one model in OpenVINO's format into a folder."""

import sys
from pathlib import Path

from optigpu.backends.converted import converter_parser, require_space, written
from optigpu.backends.openvino.contents import GRAPH
from optigpu.backends.openvino.library import ov


def main() -> int:
    """Converts a decoder or a classifier, or quantizes a decoder that was converted before."""
    parser = converter_parser("optigpu.backends.openvino.convert", __doc__, "folder", needs_model=False)
    parser.add_argument("--side", type=int, help="of the images of a classifier, in pixels")
    parser.add_argument("--plain", type=Path, help="the folder of a decoder in float32: quantized by NNCF")
    parser.add_argument("--mode", help="NNCF's name of a way to quantize, such as int4_sym")
    parser.add_argument("--group", type=int, default=0, help="numbers of a row that share a scale; 0: all")
    parser.add_argument("--everywhere", action="store_true", help="4 bits for embedding and head too")
    options = parser.parse_args()

    def write() -> None:
        options.output.mkdir()
        if options.plain:
            quantize(options.plain, options.output, options.mode, options.group, options.everywhere)
        else:
            convert(options.model, options.output, options.seed, options.threads, options.side)

    return written(write, options.output)


def convert(model: str, output: Path, seed: int, threads: int, side: int | None) -> None:
    """Writes a model reference in float32: a decoder, or a classifier of images of `side` pixels.

    A preset's weights are drawn from `seed`, as the torch backend does. Raises UnsupportedError for a model that cannot
    be had here or cannot be converted.
    """
    from optigpu.backends.openvino.exported import exported_classifier, exported_decoder

    options = (model, seed, threads)
    _save(exported_decoder(*options) if side is None else exported_classifier(*options, side), output)


def quantize(plain: Path, output: Path, mode: str, group: int, everywhere: bool) -> None:
    """Writes a decoder with weights as NNCF quantizes them, without calibration.

    A row that `group` does not divide has groups of the largest power of 2 that does, from 32 on, or 8 bits.
    """
    import nncf

    how: dict[str, object] = {"mode": nncf.CompressWeightsMode(mode)}
    if not mode.startswith("int8"):
        adjusted = nncf.GroupSizeFallbackMode.ADJUST
        how |= {"group_size": group or -1, "ratio": 1.0, "all_layers": everywhere}
        how["advanced_parameters"] = nncf.AdvancedCompressionParameters(group_size_fallback_mode=adjusted)
    _save(nncf.compress_weights(ov.Core().read_model(plain / GRAPH), **how), output)


def _save(model: ov.Model, folder: Path) -> None:
    """Raises OSError on a full disk, of which OpenVINO says no more than that it cannot write."""
    constants = (each for each in model.get_ops() if each.get_type_name() == "Constant")
    require_space(folder, sum(each.data.nbytes for each in constants))
    ov.save_model(model, folder / GRAPH, compress_to_fp16=False)


if __name__ == "__main__":
    sys.exit(main())
