"""compensated_groups: numbers of the same kind as plain rounding's, whose errors matter less where inputs lie."""

import pytest
import torch  # noqa: TID253 - types

from optigpu.ops.int4_compensated import compensated_groups, compensation
from optigpu.ops.int4_quantize import Int4Scheme, dequantize_groups, quantize_groups, scale_units

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


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: str(scheme.group_size))
def test_errors_make_up_for_each_other_on_inputs_like_the_samples(scheme: Int4Scheme) -> None:
    samples, unseen = correlated().split([400, 200])
    found = compensated_groups(weight(), compensation(samples.T @ samples), scheme)
    plain = output_error(unseen, weight(), dequantize_groups(quantize_groups(weight(), scheme)))
    assert output_error(unseen, weight(), dequantize_groups(found)) < 0.6 * plain


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: str(scheme.group_size))
def test_inputs_that_know_nothing_of_each_other_are_rounded_as_usual(scheme: Int4Scheme) -> None:
    found = compensated_groups(weight(), compensation(torch.eye(256)), scheme)
    plain = quantize_groups(weight(), scheme)
    assert torch.equal(found.q, plain.q)
    assert torch.equal(found.scale, plain.scale)


def test_numbers_and_scales_are_of_the_usual_kind() -> None:
    samples = correlated()
    found = compensated_groups(weight(33), compensation(samples.T @ samples), Int4Scheme(64))
    assert found.q.dtype == torch.uint8
    assert found.q.shape == (33, 256)
    assert int(found.q.max()) <= 15
    assert found.scale.dtype == torch.bfloat16
    assert found.scale.shape == (33, 4)
    assert found.offset is None


def test_numbers_are_chosen_for_scales_of_eight_bits_where_there_are_units() -> None:
    samples, given = correlated(), weight()
    unit, factor = scale_units(given, 8), compensation(samples.T @ samples)
    found, usual = (compensated_groups(given, factor, Int4Scheme(32), each) for each in (unit, None))
    assert found.scale.dtype == torch.int8
    whole = found._replace(scale=found.scale.float() * unit.float()[:, None])
    expected = output_error(samples, given, dequantize_groups(usual))
    assert output_error(samples, given, dequantize_groups(whole)) < 1.05 * expected


def test_inputs_that_are_always_zero_are_no_trouble() -> None:
    samples = correlated()
    samples[:, 100:140] = 0
    found = compensated_groups(weight(), compensation(samples.T @ samples), Int4Scheme(32))
    plain = dequantize_groups(quantize_groups(weight(), Int4Scheme(32)))
    assert output_error(samples, weight(), dequantize_groups(found)) < output_error(samples, weight(), plain)


def test_the_weight_is_left_as_it_was() -> None:
    samples, given = correlated(), weight()
    compensated_groups(given, compensation(samples.T @ samples), Int4Scheme(32))
    assert torch.equal(given, weight())


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="finite square matrix"):
        compensation(torch.full((4, 4), torch.nan))
    with pytest.raises(ValueError, match="finite square matrix"):
        compensation(torch.zeros(4, 5))
    with pytest.raises(ValueError, match="256 inputs"):
        compensated_groups(weight(), torch.eye(128), Int4Scheme(32))
    with pytest.raises(ValueError, match="symmetric"):
        compensated_groups(weight(), torch.eye(256), Int4Scheme(32, symmetric=False))
