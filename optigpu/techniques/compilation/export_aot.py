from collections.abc import Mapping
from typing import ClassVar, Literal

from optigpu.documents.facts import ModelFacts
from optigpu.documents.result import Environment
from optigpu.hardware.device_kinds import Ability
from optigpu.techniques.base import Choice, Expected, Notes, Phase, Step, Technique
from optigpu.vocabulary import DeviceKind


class ExportAot(Technique):
    """Exports the decode step with torch.export, compiles it with AOTInductor, and decodes in a lean greedy loop.

    The library reads the model's weights and writes the static cache where they are, so nothing is there twice. It is
    kept in the cache folder: the next process with the same graph finds it there.
    """

    phase = Phase.COMPILATION
    abilities = (Ability.INDUCTOR,)
    summary = "the decode step compiled ahead of time into a library without Python, which is kept for later processes"
    citation = (
        "PyTorch documentation, torch.export and AOTInductor (since torch 2.6, 2025); Ansel et al., PyTorch 2, ASPLOS "
        "2024, doi:10.1145/3620665.3640366"
    )
    expected = (
        Expected(
            "arithmetic",
            "no second copy of the weights; the next process with the same graph loads the library without "
            "compiling",
        ),
        Expected(
            "aim", "the speed of torch_compile or a little more, since the step has no guards and no Python"
        ),
    )
    requires = ("static_kv_cache",)
    conflicts: ClassVar[Mapping[str, str]] = {
        "no_kv_cache": "an exported decode step needs a cache",
        "autocast": "torch.export leaves autocast out of the graph",
        "grad_enabled": "an exported step keeps no gradients",
        "cpu_offload": "an exported step needs weights that stay in place",
    }
    choices = (Choice.STEP,)
    only_when_asked = True  # It excludes torch_compile, which a default ladder tries

    name: Literal["export_aot"] = "export_aot"

    def check(self, environment: Environment, device: DeviceKind, model: ModelFacts | None) -> str | None:
        """AOTInductor writes C++ around its kernels, on CUDA too."""
        if environment.compiler is None:
            return "AOTInductor needs a C++ compiler, and none was found; install g++."
        return None

    def step(self, step: Step, notes: Notes) -> Step:
        from optigpu.surgery.made_steps import ExportedStep

        return ExportedStep(step, notes)
