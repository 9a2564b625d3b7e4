"""python -m optigpu.backends.coreml.convert: writes one Core ML package of a whole forward pass into a folder.

It converts on Linux as well, where nothing can run what it wrote.
"""

import argparse
import sys

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.jit import ScriptModule
from torch.nn import Module
from transformers import PreTrainedModel

from optigpu.backends.converted import converter_parser, require_space, written
from optigpu.backends.coreml import INPUT, OUTPUT, PACKAGE
from optigpu.models.loading.expressed import require_same, window_of
from optigpu.models.loading.load import count_weights, load_model
from optigpu.models.reference import parse_reference
from optigpu.vocabulary import UnsupportedError


def main() -> int:
    """Writes the package."""
    parser = converter_parser("optigpu.backends.coreml.convert", __doc__, "folder")
    parser.add_argument("--rows", type=int, required=True, help="how many sequences")
    parser.add_argument("--length", type=int, required=True, help="the tokens of each")
    options = parser.parse_args()
    return written(lambda: convert(options), options.output)


def convert(options: argparse.Namespace) -> None:
    """Converts the pass over ids [rows, length] to the logits of each token, in float32.

    Raises UnsupportedError for a model that cannot be had here or cannot be converted.
    """
    import coremltools

    torch.set_num_threads(options.threads)
    reference, shape = parse_reference(options.model), (options.rows, options.length)
    loaded = load_model(reference, device="cpu", dtype="float32", attention="eager", seed=options.seed)
    whole = WholePass(loaded, options.length, window_of(loaded, "coreml"))
    ids = torch.linspace(0, loaded.config.vocab_size - 1, options.length).long().expand(shape)
    options.output.mkdir()
    require_space(options.output, torch.float32.itemsize * count_weights(loaded))
    try:
        graph = traced(whole, *shape)
        with torch.no_grad():
            require_same(graph(ids), loaded(input_ids=ids, use_cache=False).logits, loaded, "coreml")
        package = coremltools.convert(
            graph,
            inputs=[coremltools.TensorType(name=INPUT, shape=shape, dtype=np.int32)],
            outputs=[coremltools.TensorType(name=OUTPUT, dtype=np.float32)],
            compute_precision=coremltools.precision.FLOAT32,
            minimum_deployment_target=coremltools.target.macOS14,
        )
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UnsupportedError(f"{reference} cannot be converted for Core ML: {why[:300]}") from error
    package.save(str(options.output / PACKAGE))


class WholePass(Module):
    """Ids [rows, length] to the logits after each token, [rows, length, vocabulary].

    The mask and the positions are constants: transformers finds them with operations that the converter lacks.
    """

    mask: Tensor
    positions: Tensor

    def __init__(self, model: PreTrainedModel, length: int, window: int | None) -> None:
        """`window`: how many tokens the attention reaches back; None without a bound."""
        super().__init__()
        self.inner = model
        asking, seen = torch.arange(length)[:, None], torch.arange(length)[None, :]
        hidden = seen > asking
        if window is not None:
            hidden = hidden | (seen <= asking - window)
        mask = torch.where(hidden, torch.finfo(torch.float32).min, 0.0)
        self.register_buffer("mask", mask[None, None])  # [1, 1, length, length]
        self.register_buffer("positions", torch.arange(length)[None])

    def forward(self, ids: Tensor) -> Tensor:
        """What follows a token cannot change its logits."""
        logits: Tensor = self.inner(
            input_ids=ids, attention_mask=self.mask, position_ids=self.positions, use_cache=False
        ).logits
        return logits


def traced(whole: WholePass, rows: int, length: int) -> ScriptModule:
    """Through torch.export, which makes every size a number: the converter cannot read all that are computed."""
    example = torch.zeros((rows, length), dtype=torch.int64)
    with torch.no_grad():
        exported = torch.export.export(whole.eval(), (example,)).module()
        assert isinstance(exported, GraphModule)
        # The converter does not know another name for a tensor, and checks of the input compute nothing.
        for node in list(exported.graph.nodes):
            if node.target is torch.ops.aten.alias.default:
                node.replace_all_uses_with(node.args[0])
                exported.graph.erase_node(node)
            elif node.op == "call_module" and not node.users:
                exported.graph.erase_node(node)
        exported.recompile()
        found: ScriptModule = torch.jit.trace(exported, example)
    return found


if __name__ == "__main__":
    sys.exit(main())
