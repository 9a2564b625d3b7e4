"""An exported graph as a compiled package: made by AOTInductor, kept in the cache folder, loaded around given tensors.

The package has no weights and no values of weights in it, so that one serves every model of the same graph. What it
reads and writes are the tensors that it is given when it is loaded, in place.
"""

import hashlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock  # torch itself depends on it
from torch._inductor.cpu_vec_isa import pick_vec_isa

from optigpu.paths import cache_dir
from optigpu.vocabulary import UnsupportedError

BUILD_TIMEOUT_S = 1800
CONFIG = {
    # Weights stay the model's own: packed into the library they would be there twice.
    "aot_inductor.package_constants_in_so": False,
    # TorchInductor puts tensors of few elements into the code, also such as a step writes (torch 2.13); not with these.
    "always_keep_tensor_constants": True,
    "joint_graph_constant_folding": False,
}


Run = Callable[[list[torch.Tensor]], list[torch.Tensor]]


@dataclass(frozen=True)
class Package:
    """A loaded package: `run([inputs])` returns the outputs, flat. `hit` says that it was compiled before."""

    run: Run
    hit: bool
    build_s: float
    load_s: float
    size_bytes: int


def load_package(exported: torch.export.ExportedProgram) -> Package:
    """Compiles an exported program, unless that was done before, and loads it around the tensors that it was made of.

    Raises UnsupportedError when it cannot be compiled or loaded here, with the compiler's first line.
    """
    started = time.perf_counter()
    path = folder() / f"{_digest(exported)}.pt2"
    hit = path.is_file()
    try:
        if not hit:
            _build(exported, path)
        built = time.perf_counter()
        loaded = torch._inductor.aoti_load_package(str(path), run_single_threaded=True)
    except (OSError, RuntimeError) as error:
        why = str(error).strip().splitlines()[0].rstrip(".")
        raise UnsupportedError(f"AOTInductor cannot compile this model here: {why}.") from error
    tensors: Mapping[str, torch.Tensor] = {**exported.state_dict, **exported.constants}
    names = loaded.get_constant_fqns()
    if unknown := set(names) - set(tensors):
        raise UnsupportedError(
            f"AOTInductor made constants that are not weights of this model ({', '.join(sorted(unknown))}); leave "
            "export_aot out of the stack."
        )
    wanted = {name: tensors[name] for name in names}
    loaded.load_constants(wanted, check_full_update=True, user_managed=True)
    run = _Holding(loaded.loader.boxed_run, wanted)
    return Package(run, hit, built - started, time.perf_counter() - built, path.stat().st_size)


def folder() -> Path:
    """The folder of the compiled packages."""
    return cache_dir() / "aot"


class _Holding:
    """Runs a function that uses the addresses of tensors, and keeps these tensors alive."""

    def __init__(self, run: Run, tensors: Mapping[str, torch.Tensor]) -> None:
        self._run = run
        self._tensors = tensors

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return self._run(inputs)


def _build(exported: torch.export.ExportedProgram, target: Path) -> None:
    """Compiles next to `target` and renames, so that half a file is never loaded."""
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    unfinished = target.with_name(f"{target.stem}.{os.getpid()}.pt2")
    with FileLock(target.with_suffix(".lock"), timeout=BUILD_TIMEOUT_S):
        if target.is_file():
            return
        try:
            torch._inductor.aoti_compile_and_package(
                exported, package_path=str(unfinished), inductor_configs=dict(CONFIG)
            )
            unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)


def made_of(exported: torch.export.ExportedProgram) -> dict[str, str]:
    """All that the code depends on: the graph, its tensors' layouts, the compiler and the device."""
    values = [node.meta["val"] for node in exported.graph.nodes if node.op == "placeholder"]
    layouts = [(str(value.dtype), str(value.device), value.shape, value.stride()) for value in values]
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    other = torch.xpu.get_device_name(0) if torch.xpu.is_available() else "none"
    return {
        "graph": str(exported.graph),
        "signature": str(exported.graph_signature),
        "layouts": str(layouts),
        "torch": torch.__version__,
        "inductor": _inductor_settings(),
        "config": str(CONFIG),
        "instructions": str(pick_vec_isa()),
        "threads": str(torch.get_num_threads()),
        "gpu": f"{gpu.name} {gpu.major}.{gpu.minor}" if gpu else other,
    }


def _inductor_settings() -> str:
    """TorchInductor's settings, without what it notes among them about the last package made in this process."""
    settings = torch._inductor.config.save_config_portable(ignore_private_configs=False)
    return str(sorted((name, value) for name, value in settings.items() if name != "aot_inductor.metadata"))


def _digest(exported: torch.export.ExportedProgram) -> str:
    return hashlib.sha256("\0".join(made_of(exported).values()).encode()).hexdigest()[:32]
