"""What the checks share: the machine, the small models, and how a model is prepared with a stack."""

from dataclasses import dataclass
from pathlib import Path

from optigpu.backends import BACKENDS
from optigpu.backends.base import Order
from optigpu.backends.runtime import Runtime
from optigpu.documents.result import Environment
from optigpu.job.spec import resolve
from optigpu.techniques.base import Technique
from optigpu.vocabulary import DeviceKind, Task
from optigpu.workloads.base import Workload

TRAINED_MODEL = "bundled:tiny"
TEXT_MODELS = (TRAINED_MODEL, "preset:tiny-llama-test")
"""A trained GPT-2, and a Llama for what needs its blocks. A technique is checked on the first that it can run."""
IMAGE_MODELS = ("preset:tiny-vit-test", "preset:tiny-resnet-test")
MODELS: dict[Task, tuple[str, ...]] = {
    Task.DECODING: TEXT_MODELS,
    Task.PREFILL: TEXT_MODELS,
    Task.IMAGES: IMAGE_MODELS,
    Task.TRAINING: TEXT_MODELS,
}
PLAIN_BACKEND = "torch"
"""Runs the unmodified model that all others are compared with."""
SEED = 0


@dataclass(frozen=True)
class Setting:
    """The machine as the checks use it. `folder` is an empty one for files."""

    environment: Environment
    device: DeviceKind
    threads: int
    folder: Path

    def prepared(
        self,
        workload: Workload,
        model: str | None,
        stack: tuple[Technique, ...] = (),
        *,
        backend: str = PLAIN_BACKEND,
        device: DeviceKind | None = None,
    ) -> Runtime:
        """The model with the stack and what it requires; without a model, the bare device. Raises UnsupportedError when
        this machine cannot do it."""
        order = Order(
            model=model,
            stack=resolve(stack, workload.kind),
            workload=workload,
            device=device or self.device,
            seed=SEED,
            threads=self.threads,
            folder=self.folder,
            environment=self.environment,
        )
        return BACKENDS[backend].prepare(order, lambda _: None)
