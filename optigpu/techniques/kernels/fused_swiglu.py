"""fused_swiglu: the two matrices of a gated MLP as one, and its activation and product in one kernel."""

import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from optigpu.documents.result import Environment
from optigpu.models.facts import ModelFacts
from optigpu.surgery.merging import activation_kernels, joined, linear_of, modules_of, require_mergeable
from optigpu.surgery.places import Place
from optigpu.techniques.base import ON_TEXT, Notes, Phase, Technique
from optigpu.vocabulary import DeviceKind, Layer, Task, UnsupportedError

_MLPS = ("LlamaMLP", "MistralMLP", "Qwen2MLP")
"""transformers' modules that compute down_proj(act_fn(gate_proj(x)) * up_proj(x))."""
_SILU = ("SiLU", "SiLUActivation")


class FusedSwiglu(Technique):
    """Replaces each gated MLP by one with a merged matrix, one kernel after it, and the same last layer."""

    layer: ClassVar[Layer] = Layer.KERNELS
    phase: ClassVar[Phase] = Phase.KERNELS
    tasks: ClassVar[tuple[Task, ...]] = ON_TEXT
    summary: ClassVar[str] = (
        "gate and up of a gated MLP as one matrix product, and all up to the next one in one kernel"
    )
    citation: ClassVar[str] = (
        "Hsu et al., Liger Kernel, 2024, arXiv:2410.10989; SwiGLU: Shazeer, 2020, arXiv:2002.05202"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "grad_enabled": "the fused activation has no gradient",
        "cpu_offload": "its kernel is chosen for the device that the weights are loaded on",
    }
    expected: ClassVar[str] = (
        "a few percent of an eager step: three operators of a layer fewer; the bytes of the weights stay the same"
    )

    name: Literal["fused_swiglu"] = "fused_swiglu"

    def check(self, environment: Environment, device: DeviceKind, model: ModelFacts | None) -> str | None:
        """The MLP must be gated, and a CPU needs a compiler for the operator."""
        if device is DeviceKind.CPU and environment.compiler is None:
            return f"{self.name} is a C++ operator on a CPU and there is no compiler; install g++."
        if model is not None and model.gated_mlp is False:
            return f"The MLP of {model.family} is not gated, so there are no two matrices to merge; leave it out."
        return None

    def suits(self, environment: Environment, device: DeviceKind) -> bool:
        """A step that is bound by the weights' bytes gains little, and torch_compile fuses the activation itself."""
        return False

    def modules(self, model: Any, notes: Notes) -> None:
        """Replaces every gated MLP in place, one after the other, so that only one is there twice.

        Raises UnsupportedError when there is none that it knows, when a gate is not SiLU, when its two matrices cannot
        become one (see `require_mergeable`), and where there is no kernel but torch's own.
        """
        places = modules_of(model, _MLPS)
        if not places:
            raise UnsupportedError(
                f"{self.name} knows the gated MLPs of Llama, Mistral and Qwen2, and {model.config.model_type} has none "
                "of them; leave it out."
            )
        for place in places:
            gate = type(place.layer.act_fn).__name__
            if gate not in _SILU:
                raise UnsupportedError(
                    f"{self.name}: {place.path} is gated by {gate} and not by SiLU; leave it out."
                )
        require_mergeable(model, self.name, [_pair(place) for place in places])
        backend = activation_kernels(self.name, model.device)
        for place in places:
            place.put(_swiglu_mlp_class()(place.layer))
        notes.record(fused_swiglu_layers=len(places), activation_backend=backend)


def _pair(place: Place) -> list[Place]:
    return [Place(f"{place.path}.{name}", place.layer, name) for name in ("gate_proj", "up_proj")]


@functools.cache
def _swiglu_mlp_class() -> Any:
    """Made at its first use, because its base class is torch's."""
    import torch

    from optigpu.ops import swiglu

    class SwigluMlp(torch.nn.Module):
        """down_proj(silu(gate) * up), where gate_up_proj(x) + bias = [gate | up].

        The bias, where there is one, is added with the activation and not with the matrix product.
        """

        bias: torch.nn.Parameter | None

        def __init__(self, mlp: Any) -> None:
            super().__init__()
            merged = joined([mlp.gate_proj, mlp.up_proj])
            self.gate_up_proj = linear_of(merged.weight, None)
            self.register_parameter("bias", merged.bias)
            self.down_proj = mlp.down_proj
            self.train(mlp.training)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.down_proj(swiglu(self.gate_up_proj(x), self.bias))
            return y

    return SwigluMlp
