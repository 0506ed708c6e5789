"""Which steps count in a probe, and what is concluded from few of them on a machine with noise."""

from statistics import NormalDist

import pytest

from carme_runtime.graph import Timing
from carme_runtime.scaling import ScalingError, sampling
from carme_runtime.scaling.simulation import straggling


def test_what_probes_of_all_frameworks_share() -> None:
    assert sampling.batches(32) == [1, 2, 4, 8, 16, 32] and sampling.batches(1) == [1]
    assert sampling.batches(1000)[0] == 16 and len(sampling.batches(1000)) == 7
    assert sampling.common_batch([32, 32, 8]) == sampling.common_batch([8, 32], 32) == 32
    for sizes, last in (([2, 3, 4, 5], None), ([32, 32, 32], 8), ([8, 32], 8)):
        with pytest.raises(ScalingError, match="batches of different sizes"):
            sampling.common_batch(sizes, last)
    # Less work does not take longer, and single delays do not count.
    runs = {4: [(2.0, 5.0)] * 3, 8: [(3.0, 4.0), (3.0, 4.0), (90.0, 90.0)]}
    assert sampling.timings(runs) == (Timing(4, 2.0, 4.0), Timing(8, 3.0, 4.0))
    assert sampling.spread([1.0, 1.0, 1.0, 9.0]) == sampling.spread([1.0, 1.0, 9.0]) == 0.0


def test_a_third_of_the_steps_that_others_delay_is_seen() -> None:
    """With two ranks more than half of the steps wait for one of them: the middle step is delayed."""
    delayed = [100.0] * 13 + [120.0] * 7
    assert sampling.spread(delayed) == pytest.approx(0.2 / 0.545, rel=0.01)
    assert straggling(sampling.spread(delayed), 2) == pytest.approx(0.2, rel=0.15)
    assert sampling.spread([100.0] * 15 + [120.0] * 5) == 0.0, "of 20 steps both ranks are on time in 11"
    assert sampling.spread([]) == sampling.spread([0.0]) == 0.0
    # Of normal variables both are the same.
    normal = [NormalDist(100, 5).inv_cdf((n + 0.5) / 1000) for n in range(1000)]
    assert sampling.spread(normal) == pytest.approx(0.05, rel=0.02)
    assert sampling.relative([2.0, 1.0, 4.0]) == [1.0, 0.5, 2.0] and sampling.relative([0.0]) == []


def test_steps_of_a_script_change_what_is_measured_again_by_what_is_no_noise() -> None:
    exact = [100.0, 100.0, 100.0]
    assert sampling.factor([110.0] * 3, exact) == pytest.approx(1.1)
    assert sampling.factor(exact, exact) == sampling.factor([0.0] * 3, exact) == 1.0
    assert sampling.factor([900.0] * 3, exact) == 4.0 and sampling.factor([10.0] * 3, exact) == 0.5
    assert sampling.factor([110.0, 110.0, 990.0], exact) == pytest.approx(1.1), "one delay hides nothing"
    noisy = [90.0, 95.0, 100.0, 105.0, 110.0]
    a_little, much = [each * 1.02 for each in noisy], [each * 1.5 for each in noisy]
    assert 1.0 < sampling.factor(a_little, noisy) < 1.003
    assert 1.47 < sampling.factor(much, noisy) < 1.5
    fewer = [each / 1.02 for each in noisy]
    assert 0.997 < sampling.factor(fewer, noisy) < 1.0


@pytest.mark.parametrize("longer", [0.6, 0.9, 0.98, 1.0, 1.02, 1.1, 1.4])
def test_what_is_left_out_as_noise_is_at_most_half_of_a_standard_error(longer: float) -> None:
    """Of the watched passes, in both directions: by so much one rank's predicted step is away from them."""
    repeated = [90.0, 95.0, 100.0, 105.0, 110.0]
    watched = [longer * each for each in repeated]
    error = 1.25 * sampling.spread(repeated) / 5**0.5 * 2**0.5
    away = abs(100.0 * sampling.factor(watched, repeated) - 100.0 * longer)
    assert away <= 100.0 * longer * error / 2
    if abs(longer - 1) > 5 * error:
        assert away < 0.1 * abs(100.0 * longer - 100.0), "a difference that is no noise counts"


def test_when_gradients_are_complete_in_the_backward_pass() -> None:
    assert sampling.shares([13.0, 12.0, 11.0], 10.0) == pytest.approx((1.0, 2 / 3, 1 / 3))
    assert sampling.shares([9.0, 12.0], 10.0) == (0.0, 1.0)  # a clock that ran before the loss was there
    assert sampling.shares([10.0, 10.0], 10.0) == (1.0, 1.0) and sampling.shares([], 10.0) == ()
