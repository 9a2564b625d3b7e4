"""A device proves that it works: a process of its own multiplies two small matrices on it.

A worker without this proof would take jobs and fail one after the other.
"""

from collections.abc import Callable, Sequence

from optigpu.child.messages import Proven, RunProof
from optigpu.conductor.processes.child import TASKS, Child, TimedWatch, ask, readable
from optigpu.conductor.processes.variables import child_variables
from optigpu.documents.result import Environment
from optigpu.hardware import probe
from optigpu.hardware.device_kinds import KINDS
from optigpu.vocabulary import DeviceKind, OutOfMemoryError, ReplicateError, UnsupportedError

PROOF_S = 180.0
"""How long it may take: torch and the driver's libraries may have to be read from a slow disk."""

OLD_DRIVER = (
    "The NVIDIA driver {driver} is too old for torch {torch}: it runs CUDA up to {cuda}, and this torch was built for "
    "CUDA {torch_cuda}; update the driver, or install a torch for CUDA {cuda} or older."
)
NO_GPU = (
    "torch finds no GPU, although the driver lists {gpu}; check with nvidia-smi that the GPU answers, and that this "
    "user may open the files /dev/nvidia*."
)
NO_KERNELS = (
    "torch {torch} has no kernels for {gpu} (compute capability {capability}); install a torch that was built for it, "
    "or start the worker with --device cpu."
)
SENTENCES: dict[str, str] = {
    "driver on your system is too old": OLD_DRIVER,
    "CUDA driver version is insufficient": OLD_DRIVER,
    "forward compatibility was attempted": OLD_DRIVER,
    "not compiled with CUDA enabled": (
        "torch {torch} was built without CUDA and cannot use {gpu}; install a CUDA build of torch, or start the worker "
        "with --device cpu."
    ),
    "no kernel image is available": NO_KERNELS,
    "ARCH_MISMATCH": NO_KERNELS,
    "Found no NVIDIA driver": NO_GPU,
    "No CUDA GPUs are available": NO_GPU,
    "no CUDA-capable device is detected": NO_GPU,
    "busy or unavailable": (
        "Another process has {gpu} for itself; end it (nvidia-smi shows it), or let several processes use the GPU "
        "with: nvidia-smi -c DEFAULT."
    ),
    "no temporary directory": (
        "{reason}: give the folder of OPTIGPU_DATA_DIR to the user that the worker runs as."
    ),
    "system not yet initialized": (
        "The fabric manager of {gpu} does not run; start it with: systemctl start nvidia-fabricmanager."
    ),
}
"""What to say, by a part of the error of torch or CUDA."""
NO_HOST_MEMORY = "This host has too little free memory to load torch; free some and start the worker again."
NO_GPU_MEMORY = (
    "{gpu} has too little free memory to multiply small matrices; end the processes that hold it ({tool} shows them) "
    "and start the worker again."
)
OTHERWISE_CPU = "torch {torch} cannot multiply small matrices on this CPU: {reason}; install torch again."
OTHERWISE_GPU = (
    "torch {torch} cannot multiply small matrices on {gpu}: {reason}; check the GPU with {tool}, or start the worker "
    "with --device cpu."
)


def prove(
    device: DeviceKind,
    *,
    cancelled: Callable[[], str | None],
    program: Sequence[str] = TASKS,
    within_s: float = PROOF_S,
) -> None:
    """Returns once the device has computed what it was asked to. `cancelled` is asked four times a second. Raises
    UnsupportedError with the reason and what helps if it does not in time, CancelledError when asked to stop."""
    watch = TimedWatch(within_s, cancelled, f"there was no answer within {within_s:g} s")
    try:
        with Child(program, child_variables(1)) as child:
            ask(child, RunProof(device=device), Proven, watch)
    except (ReplicateError, UnsupportedError) as error:
        raise UnsupportedError(sentence(error, device, probe())) from error


def sentence(error: Exception, device: DeviceKind, environment: Environment) -> str:
    on_cpu = device is DeviceKind.CPU
    if isinstance(error, OutOfMemoryError):
        text = NO_HOST_MEMORY if on_cpu else NO_GPU_MEMORY
    else:
        known = (text for part, text in SENTENCES.items() if part.lower() in str(error).lower())
        text = next(known, OTHERWISE_CPU if on_cpu else OTHERWISE_GPU)
    # The first line, and the last one, where the output of a process follows.
    lines = readable(str(error)).splitlines() or ["it said nothing"]
    gpu = next(iter(environment.gpus(device)), None)
    facts = {
        "reason": " ... ".join(dict.fromkeys((lines[0], lines[-1]))).rstrip("."),
        "tool": KINDS[device].tool,
        "gpu": gpu.name if gpu else "the GPU",
        "capability": gpu.compute_capability if gpu else None,
        "driver": environment.driver,
        "cuda": environment.cuda,
        "torch": environment.software.get("torch"),
        "torch_cuda": environment.software.get("torch_cuda"),
    }
    return text.format(**{name: value or "unknown" for name, value in facts.items()})
