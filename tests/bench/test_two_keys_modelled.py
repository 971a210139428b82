"""The model of two keys runs. It repeats exactly, since its time is virtual."""

from unittest.mock import patch

from bench.two_keys_modelled import modelled
from scheduler.fairness import DeviceTurns


def test_short_steps_shorten_the_wait_and_cost_the_flood_a_part() -> None:
    ratio, rate = modelled(60, 0.5)
    assert modelled(60, 0.5) == (ratio, rate)
    with patch.object(DeviceTurns, "expects_other", return_value=False):
        long_ratio, long_rate = modelled(60, 0.5)
    assert 1.0 < ratio < long_ratio
    assert 0.75 * long_rate < rate < long_rate
