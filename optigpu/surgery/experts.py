"""The experts of a mixture as linear layers: transformers holds them as tensors [experts, outputs, inner].

They are known by the shapes of these tensors and by what their `forward` takes, not by a family's name.
"""

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import Linear, Module, ModuleList, Parameter

UP, DOWN, LONE = ("gate_up_proj", "up_proj"), "down_proj", "weight"
"""transformers' names of the tensor before the activation, of the one after it, and of one without an activation."""


class OpenedExperts(Module):
    """Experts whose matrices are linear layers, in a list under the name of transformers' tensor.

    Until a layer is replaced its weight is a view of that tensor. `rest` is transformers' own module without matrices:
    its activation, its limits, its norm.
    """

    def __init__(self, experts: Module) -> None:
        super().__init__()
        stacks = _stacks(experts)
        turned = _is_transposed(experts, stacks)
        for name, stack in stacks.items():
            self.add_module(
                name, _layers(stack.mT if turned else stack, getattr(experts, f"{name}_bias", None))
            )
        self.rest: Any = _without_matrices(experts)
        self.train(experts.training)

    def lists(self) -> list[tuple[str, ModuleList]]:
        """Each list of linear layers with its name: what comes before the activation first."""
        return [(name, part) for name, part in self.named_children() if isinstance(part, ModuleList)]

    def expert(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """What one expert makes of x, [tokens, width]; one that has no matrices returns x."""
        (_, up), (_, down) = self.lists()
        if number >= len(down):
            return x
        y: torch.Tensor = down[number](self._activated(up[number](x)))
        return self.rest.post_expert_norm(y) if hasattr(self.rest, "post_expert_norm") else y

    def _activated(self, inner: torch.Tensor) -> torch.Tensor:
        if not getattr(self.rest, "has_gate", True):
            activated: torch.Tensor = self.rest.act_fn(inner)
        elif hasattr(self.rest, "_apply_gate"):
            activated = self.rest._apply_gate(inner)
        else:
            gate, up = inner.chunk(2, dim=-1)
            activated = self.rest.act_fn(gate) * up
        return activated


class RoutedExperts(OpenedExperts):
    """Experts that are told which tokens are theirs."""

    def forward(self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The sum over a token's experts of weight * expert(x), [tokens, width].

        x: [tokens, width]; indices (int64) and weights: [tokens, experts of each].
        """
        if _is_recorded(x):  # no shape may depend on the indices, so every expert computes every token
            share = torch.where(indices == 0, weights, 0).sum(dim=-1, keepdim=True)
            total = self.expert(0, x) * share
            for number in range(1, len(self.lists()[0][1])):
                share = torch.where(indices == number, weights, 0).sum(dim=-1, keepdim=True)
                total = total + self.expert(number, x) * share
            return total.to(x.dtype)
        total = torch.zeros_like(x)
        for number in indices.unique().tolist():
            tokens, places = torch.where(indices == number)
            y = self.expert(number, x[tokens]) * weights[tokens, places, None]
            total.index_add_(0, tokens, y.to(x.dtype))
        return total


class ExpertsInTurn(OpenedExperts):
    """Experts that each get an equal share of the rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [experts * tokens, width], the first expert's tokens first; returns as much."""
        parts = x.chunk(len(self.lists()[1][1]))
        return torch.cat([self.expert(number, part) for number, part in enumerate(parts)])


class ExpertProducts(OpenedExperts):
    """One product for each expert, of as many rows as it is told."""

    def forward(self, inputs: torch.Tensor, expert_size: list[int]) -> torch.Tensor:
        """inputs: [rows, inner], the first expert's rows first; returns [rows, outputs]."""
        layers = self.lists()[0][1]
        parts = zip(layers, inputs.split(expert_size), strict=True)
        return torch.cat([layer(part) for layer, part in parts if len(part)])


def opened(module: Module) -> OpenedExperts | None:
    """The experts of a module as linear layers, beside the module, which stays as it is; None for other modules."""
    stacks = _stacks(module)
    if not stacks:
        return None
    takes = list(inspect.signature(type(module).forward).parameters)[1:]
    if set(stacks) in ({up, DOWN} for up in UP):
        kind = {1: ExpertsInTurn, 3: RoutedExperts}.get(len(takes))
        return None if kind is None else kind(module)
    return ExpertProducts(module) if set(stacks) == {LONE} and "expert_size" in takes else None


def _stacks(module: Module) -> Mapping[str, Parameter]:
    """A module's own tensors of all experts' matrices, by their names."""
    own = dict(module.named_parameters(recurse=False))
    return {name: own[name] for name in (*UP, DOWN, LONE) if name in own and own[name].dim() == 3}


def _is_transposed(module: Module, stacks: Mapping[str, Parameter]) -> bool:
    """Whether the tensors are [experts, inner, outputs]; where the module does not say so, by the width of tokens."""
    if hasattr(module, "is_transposed") or LONE in stacks:
        return bool(getattr(module, "is_transposed", False))
    first, last = stacks.values()
    return first.shape[1] == last.shape[2]


def _layers(stack: torch.Tensor, biases: torch.Tensor | None) -> ModuleList:
    """Linear layers around views of a tensor [experts, outputs, inner] and, if there are any, of [experts, outputs]."""
    trained, found = stack.requires_grad, ModuleList()
    for number, matrix in enumerate(stack.detach()):
        outputs, inner = matrix.shape
        layer = Linear(inner, outputs, bias=False, device="meta")
        layer.weight = Parameter(matrix, trained)
        if biases is not None:
            layer.bias = Parameter(biases.detach()[number], trained)
        found.append(layer)
    return found


def _without_matrices(module: Module) -> Module:
    """A copy of a module that shares all it has with it, but for the matrices and biases of experts."""
    rest = copy.copy(module)
    gone = {name for stack in _stacks(module) for name in (stack, f"{stack}_bias")}
    rest._parameters = {name: own for name, own in module._parameters.items() if name not in gone}
    return rest


def _is_recorded(x: torch.Tensor) -> bool:
    """Whether operations are being compiled, exported, or captured as a CUDA graph."""
    return torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing())
