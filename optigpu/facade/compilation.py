"""CompileOptimizer: torch.compile for a module of the caller, and what it buys on this machine."""

from typing import TYPE_CHECKING, TypeVar

from optigpu.documents.fields import refusing
from optigpu.documents.shapes import ImageFacts
from optigpu.facade.job_report import JobReport
from optigpu.facade.measuring import AskedWorkload, job_spec, printed
from optigpu.hardware import probe
from optigpu.job.bench import brief
from optigpu.models.facts import known_facts
from optigpu.models.reference import parse_reference
from optigpu.techniques.compilation.torch_compile import TorchCompile
from optigpu.vocabulary import BenchMode, DeviceKind, UnsupportedError
from optigpu.workloads.classify import Classify
from optigpu.workloads.generate import Generate

if TYPE_CHECKING:
    import torch

    Module = TypeVar("Module", bound=torch.nn.Module)


class CompileOptimizer:
    """What the technique `torch_compile` does, for any module."""

    @staticmethod
    def compile(model: "Module", mode: str = "default", *, backend: str = "inductor") -> "Module":
        """Has torch compile the module's forward pass at its first call, in place, and returns the module.

        A transformers model's `generate` then runs the compiled pass too, which is compiled again for a few lengths of
        the cache; the technique, with its fixed cache, compiles once. `mode` and `backend` are those of the technique:
        default, reduce-overhead, max-autotune, max-autotune-no-cudagraphs; inductor, aot_eager, eager, cudagraphs.

        Raises FieldsError, a SpecError, for an unknown mode or backend, and UnsupportedError where nothing can be
        compiled: TorchInductor needs a C++ compiler on a CPU.

        >>> import torch
        >>> from optigpu import CompileOptimizer
        >>> model = CompileOptimizer.compile(torch.nn.Linear(4, 2), backend="eager")
        >>> model(torch.zeros(1, 4)).shape
        torch.Size([1, 2])
        >>> CompileOptimizer.compile(model, mode="fastest")
        Traceback (most recent call last):
        ...
        optigpu.documents.fields.FieldsError: mode: ...
        """
        with refusing(TorchCompile):
            technique = TorchCompile.model_validate({"mode": mode, "backend": backend})
        weights = next(model.parameters(), None)
        from optigpu.backends.torch.device import kind_of

        device = kind_of(weights.device) if weights is not None else DeviceKind.CPU
        problem = technique.check(probe(), device, None)
        if problem:
            raise UnsupportedError(problem)
        model.compile(mode=technique.mode if backend == "inductor" else None, backend=backend)
        return model

    @staticmethod
    def benchmark(
        model: str = "preset:gpt2",
        mode: str = "default",
        *,
        backend: str = "inductor",
        workload: AskedWorkload | None = None,
        progress: bool | None = None,
        **fields: object,
    ) -> JobReport:
        """Measures a model eager and compiled, side by side in processes of their own, and prints the table.

        `model` is a reference: without a `workload` a decoder generates text, an image classifier classifies. `fields`
        are the others of a job, as `optigpu.run` takes them. Raises what that raises.
        """
        images = isinstance(known_facts(parse_reference(model)), ImageFacts)
        usual = Classify() if images else Generate(prompt_tokens=32, new_tokens=32)
        compiled = {"name": "torch_compile", "mode": mode, "backend": backend}
        asked = {**brief(BenchMode.QUICK), **fields, "plan": "ladder"}
        return printed(job_spec(workload or usual, model, [compiled], asked), progress)
