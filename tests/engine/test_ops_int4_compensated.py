"""compensated_groups: the same kind of numbers as plain rounding, with smaller errors on the given inputs."""

import pytest
import torch

from optigpu.ops.four_bits import descent as int4_descent
from optigpu.ops.four_bits.compensated import compensated_groups, compensation, share_left
from optigpu.ops.four_bits.descent import improved_groups
from optigpu.ops.four_bits.grid import Even
from optigpu.ops.four_bits.quantize import dequantize_groups, quantize_groups, scale_units
from optigpu.ops.four_bits.scheme import Int4Scheme, Int4Weights

pytestmark = pytest.mark.usefixtures("one_torch_thread")

SCHEMES = [Int4Scheme(size) for size in (32, 64, 128)]


def weight(outputs: int = 48, inputs: int = 256) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))


def correlated(samples: int = 600, inputs: int = 256) -> torch.Tensor:
    """Inputs of which each says something about the others, as activations do."""
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(64, inputs, generator=generator)
    return torch.randn(samples, 64, generator=generator) @ mixing + 0.3 * torch.randn(
        samples, inputs, generator=generator
    )


def output_error(x: torch.Tensor, exact: torch.Tensor, rounded: torch.Tensor) -> float:
    return float((x.double() @ (exact - rounded).double().T).square().mean())


def compensated(given: torch.Tensor, moment: torch.Tensor, scheme: Int4Scheme) -> torch.Tensor:
    """The weights that are left, float32 [outputs, inputs]."""
    unit = scale_units(given, 8)
    return whole(compensated_groups(given, compensation(moment), scheme, unit), unit)


def plain(given: torch.Tensor, scheme: Int4Scheme) -> torch.Tensor:
    unit = scale_units(given, 8)
    return whole(quantize_groups(given, scheme, unit), unit)


def whole(found: Int4Weights, unit: torch.Tensor) -> torch.Tensor:
    return dequantize_groups(found._replace(scale=found.scale * unit.float()[:, None]))


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: str(scheme.group_size))
def test_errors_make_up_for_each_other_on_inputs_like_the_samples(scheme: Int4Scheme) -> None:
    samples, unseen = correlated().split([400, 200])
    found = output_error(unseen, weight(), compensated(weight(), samples.T @ samples, scheme))
    assert found < 0.5 * output_error(unseen, weight(), plain(weight(), scheme))


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: str(scheme.group_size))
def test_inputs_that_know_nothing_of_each_other_are_rounded_to_the_nearest(scheme: Int4Scheme) -> None:
    unit = scale_units(weight(), 8)
    found = compensated_groups(weight(), compensation(torch.eye(256)), scheme, unit)
    scale = (found.scale * unit.float()[:, None]).repeat_interleave(scheme.group_size, dim=1)
    assert torch.equal(found.q, ((weight() / scale).round().clamp(-8, 7) + 8).to(torch.uint8))


def test_numbers_and_scales_are_of_the_usual_kind() -> None:
    samples, given = correlated(), weight(33)
    known = compensation(samples.T @ samples)
    found = compensated_groups(given, known, Int4Scheme(64), scale_units(given, 8))
    assert (found.q.dtype, found.q.shape) == (torch.uint8, (33, 256))
    assert int(found.q.max()) <= 15
    assert (found.scale.dtype, found.scale.shape) == (torch.int8, (33, 4))
    assert int(found.scale.abs().min()) > 0
    assert found.offset is None


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: str(scheme.group_size))
def test_each_round_of_improvement_leaves_less_of_the_error(
    scheme: Int4Scheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = correlated()
    errors = []
    for rounds in range(4):
        monkeypatch.setattr(int4_descent, "ROUNDS", rounds)
        errors.append(output_error(samples, weight(), compensated(weight(), samples.T @ samples, scheme)))
    assert errors[1] < 0.9 * errors[0]
    assert errors[3] < errors[2] < errors[1]


def test_no_number_could_be_improved_alone_when_there_is_nothing_left_to_improve() -> None:
    """After many rounds: of every number the two beside it are tried, with the error written out."""
    given, samples = weight(4, 64), correlated()[:, :64]
    known, unit = compensation(samples.T @ samples), scale_units(given, 8)
    start = quantize_groups(given, Int4Scheme(32), unit)
    for _ in range(30):
        start = improved_groups(given, known, start, unit, Even())

    def loss(found: Int4Weights) -> torch.Tensor:
        error = (given - whole(found, unit)).double()
        return torch.einsum("oi,ij,oj->o", error, known.moment.double(), error)

    least = loss(start)
    for place in range(64):
        for step in (-1, 1):
            q = start.q.int()
            q[:, place] = (q[:, place] + step).clamp(0, 15)
            assert bool((loss(start._replace(q=q.to(torch.uint8))) >= least * (1 - 1e-5)).all())


def test_inputs_that_are_always_zero_are_no_trouble() -> None:
    samples, scheme = correlated(), Int4Scheme(32)
    samples[:, 100:140] = 0
    found = output_error(samples, weight(), compensated(weight(), samples.T @ samples, scheme))
    assert found < output_error(samples, weight(), plain(weight(), scheme))


def test_weights_of_nothing_stay_nothing() -> None:
    given, samples = weight(), correlated()
    given[3], given[5, 64:128] = 0, 0
    found = compensated(given, samples.T @ samples, Int4Scheme(64))
    assert not found[3].any()
    assert bool(found.isfinite().all())


def test_the_weight_is_left_as_it_was() -> None:
    samples, given = correlated(), weight()
    compensated(given, samples.T @ samples, Int4Scheme(32))
    assert torch.equal(given, weight())


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="finite square matrix"):
        compensation(torch.full((4, 4), torch.nan))
    with pytest.raises(ValueError, match="finite square matrix"):
        compensation(torch.zeros(4, 5))
    unit = scale_units(weight(), 8)
    with pytest.raises(ValueError, match="256 inputs"):
        compensated_groups(weight(), compensation(torch.eye(128)), Int4Scheme(32), unit)
    with pytest.raises(ValueError, match="symmetric"):
        compensated_groups(weight(), compensation(torch.eye(256)), Int4Scheme(32, symmetric=False), unit)


@pytest.mark.parametrize("are_alike", [False, True])
def test_the_share_of_the_error_that_is_left_is_known_from_the_inputs(are_alike: bool) -> None:
    x = correlated() if are_alike else torch.randn(4096, 256, generator=torch.Generator().manual_seed(2))
    moment = x.T @ x
    found = output_error(x, weight(), compensated(weight(), moment, Int4Scheme(32)))
    left = found / output_error(x, weight(), plain(weight(), Int4Scheme(32)))
    assert 0.5 < left / share_left(moment) < 1.1, "descent leaves less than the first rounding"
    assert (share_left(moment) < 0.5) is are_alike
