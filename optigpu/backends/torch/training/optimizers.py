"""The optimizers of training: torch's own, and the update of each weight within the backward pass."""

from collections.abc import Callable, Sequence

import torch
from torch.nn import Parameter
from torch.optim import SGD, AdamW, Optimizer

from optigpu.backends.training import MakeOptimizer, UpdateRule

FOREACH = ("cuda", "xpu")
"""torch's names of devices whose optimizers update all weights together, unless they are told otherwise."""
_CLASSES: dict[str, type[AdamW] | type[SGD]] = {"adamw": AdamW, "sgd": SGD}


def optimizer_of(rule: UpdateRule) -> MakeOptimizer:
    """torch's own optimizer, which chooses between its implementations."""

    def make(weights: Sequence[Parameter]) -> Optimizer:
        return _CLASSES[rule.name](weights, lr=rule.learning_rate)

    return make


def implementation_of(optimizer: Optimizer) -> str:
    """How torch's optimizer updates its weights: "fused", "foreach", or "for-loop" over one weight after the other.

    Without a choice torch takes foreach for weights on the devices of FOREACH, and the loop elsewhere. Another
    library's optimizer has the name of its module.
    """
    if not type(optimizer).__module__.startswith("torch.optim"):
        return type(optimizer).__module__
    (group, *_) = optimizer.param_groups
    if group.get("fused"):
        return "fused"
    chosen = group.get("foreach")
    by_default = all(weight.device.type in FOREACH for weight in group["params"])
    return "foreach" if chosen or (chosen is None and by_default) else "for-loop"


class UpdatesInBackward:
    """An optimizer for each weight, which runs as soon as the weight's gradient is complete, and frees that.

    While `paused`, gradients are kept and no weight changes.
    """

    def __init__(self, weights: Sequence[Parameter], make: MakeOptimizer) -> None:
        self.optimizers = [make([weight]) for weight in weights]
        self.paused = False
        self._hooks = [
            weight.register_post_accumulate_grad_hook(self._updating(optimizer))
            for weight, optimizer in zip(weights, self.optimizers, strict=True)
        ]

    def remove(self) -> None:
        """Takes the hooks off the weights."""
        for hook in self._hooks:
            hook.remove()

    def _updating(self, optimizer: Optimizer) -> Callable[[torch.Tensor], None]:
        def update(_weight: torch.Tensor) -> None:
            if not self.paused:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

        return update
