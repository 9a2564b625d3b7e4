from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import model_validator

from optigpu.documents.facts import ModelFacts
from optigpu.documents.result import Environment
from optigpu.hardware.device_kinds import Ability, refusal
from optigpu.techniques.base import ON_MODELS, Choice, Expected, Forward, Notes, Phase, Step, Technique, Trial
from optigpu.vocabulary import DeviceKind

if TYPE_CHECKING:
    from optigpu.surgery.compiling import Compiled


class TorchCompile(Technique):
    """Compiles the decode step and decodes in a lean greedy loop around it; without decoding, the forward pass.

    With `fullgraph` a graph break is an error, without it breaks are counted. With `dynamic` batch and length may
    change: one graph serves them all, but for batches of one, which torch gives a graph of their own. `backend`
    generates the code of the graph: "inductor" writes kernels, "aot_eager" and "eager" run the captured graph operator
    by operator, which shows what capturing alone buys, and "cudagraphs" records those operators on CUDA.
    """

    phase = Phase.COMPILATION
    tasks = ON_MODELS
    abilities = (Ability.INDUCTOR,)
    summary = "the decode step as one graph of fused kernels, in a lean greedy loop; without decoding, the forward pass"
    citation = "Ansel et al., PyTorch 2, ASPLOS 2024, doi:10.1145/3620665.3640366"
    expected = (
        Expected("literature", "2.27x, the geometric mean of inference with more than 180 models on an A100"),
        Expected(
            "measured here", "GPT-2 decoded on two Zen 4 cores: 1.18x eager fp32 alone", "results/README.md"
        ),
        Expected("aim", "1.3x to 3x at batch 1, where the interpreter's overhead dominates"),
    )
    requires = ("static_kv_cache",)
    conflicts: ClassVar[Mapping[str, str]] = {"no_kv_cache": "a compiled decode step needs a cache"}
    choices = (Choice.STEP,)
    later = ("dynamic", "fullgraph", "backend")
    trials = (Trial(), Trial({"mode": "reduce-overhead"}, devices=(DeviceKind.CUDA,)))

    name: Literal["torch_compile"] = "torch_compile"
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    dynamic: bool = False
    fullgraph: bool = True
    backend: Literal["inductor", "aot_eager", "eager", "cudagraphs"] = "inductor"

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.backend != "inductor" and self.mode != "default":
            raise ValueError(f"mode {self.mode} needs the backend inductor; leave mode out")
        if self.backend == "cudagraphs" and self.dynamic:
            raise ValueError("the backend cudagraphs needs fixed shapes; leave dynamic out")
        return self

    def chosen(self) -> tuple[Choice, ...]:
        """Some modes record CUDA graphs by themselves."""
        records = self.mode in ("reduce-overhead", "max-autotune") or self.backend == "cudagraphs"
        return (*self.choices, Choice.CAPTURE) if records else self.choices

    def check(self, environment: Environment, device: DeviceKind, model: ModelFacts | None) -> str | None:
        """TorchInductor writes C++ for a CPU and needs a compiler there; on a GPU some modes record graphs."""
        if self.backend == "cudagraphs":
            return refusal(device, Ability.GRAPHS, "torch_compile with cudagraphs", "set backend to inductor")
        if Choice.CAPTURE in self.chosen() and device is not DeviceKind.CPU:
            return refusal(
                device, Ability.GRAPHS, f"torch_compile with mode {self.mode}", "set mode to default"
            )
        if self.backend == "inductor" and device is DeviceKind.CPU and environment.compiler is None:
            return "TorchInductor needs a C++ compiler on a CPU, and none was found; install g++."
        return None

    def step(self, step: Step, notes: Notes) -> Step:
        return self._compiled("decode_step", step, notes)

    def forward(self, forward: Forward, notes: Notes) -> Forward:
        return self._compiled("forward_pass", forward, notes)

    def _compiled(self, name: str, function: Step | Forward, notes: Notes) -> "Compiled":
        from optigpu.surgery.compiling import Compiled, CompileOptions

        options = CompileOptions(self.backend, self.mode, self.fullgraph, self.dynamic)
        return Compiled(options, name, function, notes)
