"""What the benchmarks for a GPU make without one."""

from argparse import Namespace

import pytest

from benchmarks.gpu_decode import OURS, ours_of, random_matrix
from benchmarks.launch_gaps import _measured
from benchmarks.launch_rungs import RUNGS
from optigpu.ops.decode.cuda.packing import unpack_from_cuda
from optigpu.ops.decode.program import WeightKind
from optigpu.vocabulary import OptiGPUError


@pytest.mark.parametrize("kind", [kind for kinds in OURS.values() for kind in kinds])
def test_random_weights_keep_the_size_of_what_they_are_multiplied_with(kind: WeightKind) -> None:
    matrix = random_matrix(kind, 96, 1024)
    assert float(unpack_from_cuda(matrix).std()) == pytest.approx(1024**-0.5, rel=0.03)


def test_the_ladder_of_launches_ends_with_our_recorded_graph() -> None:
    assert [rung.name for rung in RUNGS] == [
        "eager",
        "torch.compile",
        "torch.compile, CUDA graph",
        "our kernels, launched",
        "our kernels, CUDA graph",
    ]


def test_a_rung_that_there_is_not_is_refused() -> None:
    with pytest.raises(OptiGPUError, match="There is no rung 'fast'; there are 'eager', "):
        _measured("gpt2", "int4", Namespace(rungs=["fast"], steps=1))


def test_our_subjects_have_the_names_that_can_be_left_out() -> None:
    assert ours_of("int4") == {"ours": "w4", "ours, w4k": "w4k", "ours, w3k": "w3k"}
    assert ours_of("int8") == {"ours": "w8"}
