from collections.abc import Mapping
from typing import ClassVar, Literal

from optigpu.hardware.device_kinds import Ability
from optigpu.techniques.base import ON_MODELS, Choice, Expected, Forward, Notes, Phase, Step, Technique


class CudaGraphs(Technique):
    """Records the kernels of the decode step as a CUDA graph and decodes in a lean greedy loop around its replay.

    The recording has addresses and no values: tokens and position are copied to where it reads them, the static cache
    stays where it is, and outputs overwrite the previous ones. The result of torch_compile can be recorded as well,
    unless its mode records graphs by itself.
    """

    phase = Phase.CAPTURE
    tasks = ON_MODELS
    summary = (
        "the decode step's kernels recorded as a CUDA graph and launched at once; without decoding, the forward "
        "pass's"
    )
    citation = (
        "Nguyen et al., Accelerating PyTorch with CUDA Graphs, 2021, "
        "pytorch.org/blog/accelerating-pytorch-with-cuda-graphs"
    )
    expected = (
        Expected(
            "literature",
            "a decode step of Qwen2.5-7B at position 2048: 1.259x on an H100, 1.028x on an L4",
            "Chen, Memory-Bound but Not Bandwidth-Limited, 2026, arXiv:2605.30571",
        ),
        Expected(
            "aim",
            "2x and more at batch 1, where launches take longer than the kernels; no change for large batches",
        ),
    )
    abilities = (Ability.GRAPHS,)
    requires = ("static_kv_cache",)
    conflicts: ClassVar[Mapping[str, str]] = {
        "no_kv_cache": "a recorded decode step needs a cache that stays in place",
        "cpu_offload": "a recording holds addresses, and offloaded weights move each time",
        "grad_enabled": "a recording keeps no gradients",
    }
    choices = (Choice.CAPTURE,)
    only_when_asked = True  # torch_compile with mode reduce-overhead records graphs too, and fuses before

    name: Literal["cuda_graphs"] = "cuda_graphs"

    def step(self, step: Step, notes: Notes) -> Step:
        from optigpu.surgery.made_steps import Replayed, record_cuda_graph

        return Replayed(step, notes, record_cuda_graph)

    def forward(self, forward: Forward, notes: Notes) -> Forward:
        from optigpu.surgery.made_steps import Replayed, record_cuda_graph

        return Replayed(forward, notes, record_cuda_graph)
