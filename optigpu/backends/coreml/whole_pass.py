"""A decoder as one pass over whole sequences of one length, without a cache, as Core ML's converter can read it."""

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.jit import ScriptModule
from torch.nn import Module
from transformers import PreTrainedModel


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
        _simplify(exported)
        found: ScriptModule = torch.jit.trace(exported, example)
    return found


def _simplify(module: GraphModule) -> None:
    """Removes what computes nothing and the converter does not know: another name for a tensor, checks of the input."""
    for node in list(module.graph.nodes):
        if node.target is torch.ops.aten.alias.default:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
        elif node.op == "call_module" and not node.users:
            module.graph.erase_node(node)
    module.recompile()
