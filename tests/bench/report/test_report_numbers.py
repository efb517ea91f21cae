import itertools
import math
import random

import pytest

from assay.bench.claims import above, at_least, at_most, below, between
from assay.bench.report.charts import spread_apart, strip
from assay.bench.report.numbers import (
    Bounds,
    Measured,
    as_number,
    bound_text,
    column,
    decimals,
    figures,
    fixed,
    measured,
    parse_bound,
)


@pytest.mark.parametrize("bound", [at_most(0.75), at_least(-1e-5), below(3), above(-2.5), between(-1, 2.25)])
def test_a_stored_bound_is_read_back_with_the_same_members(bound):
    read = parse_bound(str(bound))
    assert read is not None
    for value in (bound.low, bound.high, bound.low - 0.1, bound.high + 0.1, 0.0, math.inf, -math.inf):
        assert (value in read) == (value in bound)


@pytest.mark.parametrize("text", ["", "about 3", "≤ many", "1 to", "≤ 1 ≤ 2"])
def test_an_unreadable_bound_is_shown_as_it_stands(text):
    assert parse_bound(text) is None
    assert bound_text(text) == text


@pytest.mark.parametrize("value", [0.0, 1.0, -3.25, 1e-12, -2.5e9, 123456.0, 0.98765, 1 / 3])
def test_figures_keep_the_value_to_four_digits(value):
    text = figures(value).replace("−", "-").replace(",", "")
    mantissa, _, exponent = text.partition("×10")
    power = int(exponent.translate(str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")) or 0)
    assert float(mantissa) * 10**power == pytest.approx(value, rel=5e-4)


def test_a_column_has_one_number_of_decimals_and_loses_no_spread():
    generator = random.Random(0)
    for _ in range(300):
        scale = 10 ** generator.uniform(-2.5, 5)
        cells = [Measured(scale * generator.uniform(0.1, 1), scale * 10 ** generator.uniform(-3, -1), 3) for _ in range(5)]
        texts = column(cells)
        places = {len(text.partition(".")[2]) for text, _ in texts}
        assert len(places) == 1
        assert all(float(spread.replace(",", "")) > 0 for _, spread in texts)
        for cell, (text, _) in zip(cells, texts, strict=True):
            assert float(text.replace(",", "")) == pytest.approx(cell.mean, rel=0.05)


def test_no_column_of_decimals_for_numbers_that_lie_too_far_apart():
    assert decimals([1e-9, 1.0]) is None
    assert decimals([2e7]) is None
    assert column([Measured(1e-9, None, 1), Measured(1.0, None, 1)]) == [("1×10⁻⁹", ""), ("1", "")]


def test_minus_signs_are_true_and_zero_has_none():
    assert fixed(-0.0001, 2) == "0.00"
    assert fixed(-1.5, 1) == "−1.5"
    assert "-" not in figures(-1e-9)


def test_infinite_and_absent_values():
    assert as_number("-inf") == -math.inf
    assert as_number({}) is None
    assert measured(["inf", 1.0]) == Measured(math.inf, None, 2)
    assert measured(["inf", "-inf"]) is None
    assert measured(["nan", None]) is None
    assert column([Measured(math.inf, None, 2), None]) == [("∞", ""), ("–", "")]


def test_equal_values_have_no_spread_from_rounding():
    assert measured([1.3e-6] * 3).spread == 0


def test_labels_are_moved_apart_but_stay_in_order_and_inside():
    generator = random.Random(1)
    for count in (1, 2, 15):
        for _ in range(50):
            ends = [generator.choice([0.0, 0.5, generator.random(), 1.0]) for _ in range(count)]
            placed = spread_apart(ends, 0.06)
            in_order = [placed[i] for i in sorted(range(count), key=lambda i: (ends[i], placed[i]))]
            assert all(b - a >= 0.06 - 1e-5 for a, b in itertools.pairwise(in_order))
            assert min(placed) >= -1e-6
            assert max(placed) <= 1 + 1e-6


def test_labels_that_do_not_touch_are_not_moved():
    assert spread_apart([0.9, 0.1, 0.5], 0.1) == [0.9, 0.1, 0.5]


def test_a_strip_places_values_on_the_side_of_the_bound_where_they_are():
    drawn = strip([0.5, 1.5, math.inf], Bounds(-math.inf, 1.0, False), (-40.0, 60.0))
    edge = drawn.inside[1]
    assert [(x < edge, within) for x, within in drawn.points] == [(True, True), (False, False), (False, False)]
    assert drawn.points[2][0] == 100
    assert drawn.mean is None
    assert drawn.interval == (0, 100)
    assert strip([math.inf], Bounds(-math.inf, 1.0, False), None) is None
    assert strip([], None, None) is None
    assert strip([2.0, 2.0], None, None).points == ((50.0, True), (50.0, True))
