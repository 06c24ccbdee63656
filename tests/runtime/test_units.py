"""Numbers as pages show them."""

import pytest

from runtime import units


@pytest.mark.parametrize(
  ("shown", "expected"),
  [
    (units.size(3 * 2**29), "1.5 GiB"),
    (units.seconds(0), "0 s"),
    (units.seconds(3.194), "3.19 s"),
    (units.seconds(4321.0), "4,321 s"),
    (units.seconds(0.0123), "12.3 ms"),
    (units.seconds(4.5e-5), "45 us"),
    (units.number(3.16e-5), "3.16e-05"),
    (units.number(819_200), "819,200"),
    (units.number(1.5e13), "15 trillion"),
    (units.clock(3723.4), "1:02:03"),
    (units.clock(59.6), "1:00"),
    (units.percent(0.1234), "12.3 %"),
    (units.plain(1234567), "1,234,567"),
    (units.plain(0.000123456), "0.00012346"),
    (units.plain(True), "True"),
    (units.plain("nan"), "nan"),
  ],
)
def test_numbers_are_in_the_usual_units(shown, expected):
  assert shown == expected
