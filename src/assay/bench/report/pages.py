"""What a page of the report is made from, and where that is found."""

import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from assay.catalog import Method

if TYPE_CHECKING:
    from assay.bench.records import Records

FORMAT = 1
_SHAPE = {"arms": dict, "claims": list, "gates": list, "replicates": list, "config": dict, "machine": dict}


@dataclass(frozen=True)
class Page:
    """A method and its newest result.

    Attributes:
        method: The method, as the catalog has it.
        result: A result as in ``result.json``; None when there is none yet.
        figures: SVG files by name.
        source: Where the result came from.
        problem: Why a stored result is not shown, if so.
    """

    method: Method
    result: Mapping[str, Any] | None = None
    figures: Mapping[str, bytes] = field(default_factory=dict)
    source: Literal["records", "reference", ""] = ""
    problem: str = ""


def collect(records: "Records | None", methods: Iterable[Method], scale: str | None = None) -> list[Page]:
    """A page for every method, in their order.

    Args:
        records: Where runs are kept; None to show reference runs alone.
        methods: The methods, from the catalog.
        scale: Only results at this scale; any when None.

    Returns:
        For each method its newest stored result, else its reference run, else a page without a result. A smoke run, which
        only shows that a study runs, is taken where it is asked for or where there is nothing else.
    """
    known = set(records.studies()) if records else set()
    return [_page(records if method.slug in known else None, method, scale) for method in methods]


def problem_of(result: Any) -> str:
    """Why a result cannot be shown; empty when it can. A shared store may hold anything."""
    if not isinstance(result, Mapping):
        return "it is not a result"
    if result.get("format") != FORMAT:
        return f"it has format {result.get('format')!r}, this version reads format {FORMAT}"
    wrong = [name for name, kind in _SHAPE.items() if not isinstance(result.get(name), kind)]
    if wrong:
        return f"it has no proper {', '.join(wrong)}"
    records = [record for body in result["arms"].values() for record in _records(body)]
    if not all(isinstance(record, Mapping) and isinstance(record.get("metrics"), Mapping) for record in records):
        return "an arm's records are not whole"
    if not all(isinstance(f, Mapping) and isinstance(f.get("values"), Mapping) for f in result["claims"] + result["gates"]):
        return "a claim's record is not whole"
    return ""


def clean(value: Any) -> Any:
    """A result without the characters that neither HTML nor XML may hold: control characters and lone surrogates.

    Example:
        >>> clean({"a": ["x\\x1b[31m\\ny", 1]})
        {'a': ['x[31m\\ny', 1]}
    """
    if isinstance(value, str):
        if value.isprintable():
            return value
        return "".join(c for c in value if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs"))
    if isinstance(value, Mapping):
        return {clean(str(k)): clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(item) for item in value]
    return value


def _page(records: "Records | None", method: Method, scale: str | None) -> Page:
    problem = ""
    if records:
        try:
            stored = records.latest(method.slug, scale)
            if stored and scale is None and stored[0].get("scale") == "smoke":
                stored = records.latest(method.slug, "desk") or (None if method.reference else stored)
        except Exception as error:  # one broken record must not cost the site
            stored, problem = None, f"the stored result could not be read: {type(error).__name__}: {error}"
        if stored:
            result, figures = stored
            problem = problem_of(result)
            if not problem:
                return Page(method, result, figures, "records")
            problem = f"the stored result could not be read: {problem}"
    reference = method.reference
    if reference is not None and (scale is None or reference.get("scale") == scale):
        if gap := problem_of(reference):
            return Page(method, problem=f"the reference result could not be read: {gap}")
        files = {path.name: path.read_bytes() for path in sorted(method.folder.glob("result*.svg"))}
        return Page(method, reference, files, "reference", problem)
    return Page(method, problem=problem)


def _records(body: Any) -> list[Any]:
    replicates = body.get("replicates") if isinstance(body, Mapping) else None
    return list(replicates.values()) if isinstance(replicates, Mapping) else [None]
