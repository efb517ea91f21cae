"""Numbers as a reader wants them: few digits, a true minus, one decimal point above the other."""

import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

_SUPERSCRIPT = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
_BOUND = re.compile(r"([≤<≥>]) (\S+)|(\S+) to (\S+)")
ABSENT = "–"


class Measured(NamedTuple):
    """A mean over replicates; ``spread`` is the standard deviation, None for a single value or an infinite one."""

    mean: float
    spread: float | None
    n: int


class Bounds(NamedTuple):
    """What a claim's bound says: ``low`` to ``high``, ends included unless ``strict``."""

    low: float
    high: float
    strict: bool

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, (int, float)):
            return False
        return self.low < value < self.high if self.strict else self.low <= value <= self.high


def as_number(value: Any) -> float | None:
    """The number that a result holds, infinities written as text included; None for anything else, NaN too.

    Example:
        >>> as_number("inf"), as_number(2), as_number("nan"), as_number(None)
        (inf, 2.0, None, None)
    """
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if math.isnan(number) else number


def measured(values: Iterable[Any]) -> Measured | None:
    """Mean and spread of the values that are numbers; None when there are none.

    Example:
        >>> measured([1.0, 3.0, None])
        Measured(mean=2.0, spread=1.4142135623730951, n=2)
        >>> measured([1.0, "inf"])
        Measured(mean=inf, spread=None, n=2)
    """
    numbers = [number for number in map(as_number, values) if number is not None]
    if not numbers:
        return None
    count = len(numbers)
    total = math.inf if math.inf in numbers else -math.inf if -math.inf in numbers else math.fsum(numbers)
    mean = total if math.isinf(total) else total / count
    if math.inf in numbers and -math.inf in numbers:
        return None  # neither end is the mean
    if count < 2 or math.isinf(mean):
        return Measured(mean, None, count)
    spread = math.sqrt(math.fsum((x - mean) ** 2 for x in numbers) / (count - 1))
    return Measured(mean, spread if spread > 1e-12 * abs(mean) else 0.0, count)  # less is rounding, not spread


def figures(value: float | None, digits: int = 4) -> str:
    """One number in at most ``digits`` significant digits.

    Example:
        >>> [figures(x) for x in (0.123456, -2.0, 123456, 1.2345e-7, 3e9, float("inf"), None)]
        ['0.1235', '−2', '123,456', '1.235×10⁻⁷', '3×10⁹', '∞', '–']
    """
    if value is None or math.isnan(value):
        return ABSENT
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if 10**digits <= abs(value) < 10**6:
        return _minus(f"{value:,.0f}")
    mantissa, _, exponent = f"{value:.{digits}g}".partition("e")
    if exponent:
        return f"{_minus(mantissa)}×10{str(int(exponent)).translate(_SUPERSCRIPT)}"
    return _minus(mantissa)


def decimals(values: Iterable[float | None], spreads: Iterable[float | None] = (), digits: int = 4) -> int | None:
    """Decimals that suit a whole column: ``digits`` significant ones in its largest value, two in its smallest.

    Returns:
        None where no common number serves: the magnitudes lie too far apart, or are too large or too small to write out.

    Example:
        >>> decimals([0.7, 0.0123]), decimals([12.5, 3.25]), decimals([3.0, 12.0]), decimals([1e-9, 1.0])
        (4, 2, 0, None)
    """
    finite = [abs(v) for v in values if v is not None and math.isfinite(v)]
    sizes = [v for v in finite if v > 0]
    known = [s for s in spreads if s is not None and math.isfinite(s) and s > 0]
    if not sizes:
        sizes = known
    if not sizes:
        return 0
    top, low = max(sizes), min(sizes)
    if top >= 1e6 or top < 1e-3 or top / low > 1e5:
        return None
    if not known and all(v == int(v) for v in finite):
        return 0
    enough = digits - 1 - math.floor(math.log10(top))
    wanted = max(enough, min(1 - math.floor(math.log10(low)), enough + 2))
    if known:  # a spread must not be rounded away to nothing
        wanted = max(wanted, min(-math.floor(math.log10(min(known))), enough + 2))
    return min(max(wanted, 0), 8)


def fixed(value: float | None, places: int | None, digits: int = 4) -> str:
    """A number with the column's decimals, or by itself where the column has none.

    Example:
        >>> fixed(-0.5, 3), fixed(float("inf"), 3), fixed(1234.5, 0), fixed(0.00012, None)
        ('−0.500', '∞', '1,234', '0.00012')
    """
    if places is None or value is None or not math.isfinite(value):
        return figures(value, digits)
    text = f"{value:,.{places}f}"
    return _minus(text if float(text.replace(",", "")) else text.lstrip("-"))


def column(cells: Iterable[Measured | None], digits: int = 4) -> list[tuple[str, str]]:
    """Mean and spread of each cell as text, aligned with each other; the spread is empty for a single value.

    Example:
        >>> column([Measured(0.5, 0.01, 3), Measured(12.25, None, 1), None])
        [('0.50', '0.01'), ('12.25', ''), ('–', '')]
    """
    listed = list(cells)
    spreads = [cell.spread for cell in listed if cell]
    places = decimals([cell.mean for cell in listed if cell], spreads, digits)
    return [(fixed(cell.mean, places, digits), _spread(cell.spread, places)) if cell else (ABSENT, "") for cell in listed]


def _spread(spread: float | None, places: int | None) -> str:
    return "" if spread is None else fixed(spread, places, 2) if spread else "0"  # none at all is not 0.000


def joined(cell: tuple[str, str]) -> str:
    """``0.50 ± 0.01``."""
    mean, spread = cell
    return f"{mean} ± {spread}" if spread else mean


def parse_bound(text: str) -> Bounds | None:
    """Reads a bound back from the words it is stored in.

    Example:
        >>> parse_bound("≤ 0.75"), parse_bound("1 to 2"), parse_bound("")
        (Bounds(low=-inf, high=0.75, strict=False), Bounds(low=1.0, high=2.0, strict=False), None)
    """
    match = _BOUND.fullmatch(text or "")
    if not match:
        return None
    ends = [as_number(end) for end in (match[2], match[3], match[4])]
    if match[1]:
        one = ends[0]
        if one is None:
            return None
        strict = match[1] in "<>"
        return Bounds(-math.inf, one, strict) if match[1] in "≤<" else Bounds(one, math.inf, strict)
    low, high = ends[1:]
    return None if low is None or high is None else Bounds(low, high, False)


def bound_text(text: str) -> str:
    """A stored bound with true minus signs; as it stands where it cannot be read.

    Example:
        >>> bound_text("≥ -0.5"), bound_text("1e-05 to 2")
        ('≥ −0.5', '1×10⁻⁵ to 2')
    """
    bounds = parse_bound(text)
    if bounds is None:
        return text or ""
    if math.isinf(bounds.low):
        return f"{'<' if bounds.strict else '≤'} {figures(bounds.high, 6)}"
    if math.isinf(bounds.high):
        return f"{'>' if bounds.strict else '≥'} {figures(bounds.low, 6)}"
    return f"{figures(bounds.low, 6)} to {figures(bounds.high, 6)}"


def _minus(text: str) -> str:
    return text.replace("-", "−")
