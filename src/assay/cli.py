"""The command ``assay``. It parses, calls the bench and prints; nothing heavy is imported before it is needed."""

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from assay import catalog

HOLDS, TRIAL_FAILED, USAGE, CLAIM_FAILS = 0, 1, 2, 3

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Does this method help on my work, and can I have it?

`assay list` shows what there is, `assay show soap` one method, `assay run soap` puts its claim to the test.

Exit codes: 0 the claims hold, are mixed or inconclusive · 1 a trial failed · 2 usage · 3 a claim fails.
""",
)
data_app = typer.Typer(no_args_is_help=True, help="Data sets by name.")
models_app = typer.Typer(no_args_is_help=True, help="Pretrained models by name.")
app.add_typer(data_app, name="data")
app.add_typer(models_app, name="models")

out = Console()
err = Console(stderr=True)


class Scale(StrEnum):
    smoke = "smoke"
    desk = "desk"
    paper = "paper"


def _complete(incomplete: str) -> list[str]:
    known = catalog.methods()
    words = {word for m in known.values() for word in (m.slug, m.area, m.problem) if word}
    return sorted(word for word in words if word.startswith(incomplete))


Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Runs = Annotated[Path, typer.Option("--runs", help="Folder of the records.", envvar="ASSAY_RUNS")]
Target = Annotated[str, typer.Argument(help="A method.", autocompletion=_complete)]
Targets = Annotated[list[str], typer.Argument(help="Methods, areas or problems.", autocompletion=_complete)]
RUNS = Path("assay-runs")


@app.command("list")
def list_(
    names: Annotated[list[str] | None, typer.Argument(help="Areas or problems; all when left out.")] = None,
    as_json: Json = False,
) -> None:
    """The methods, by what they are for.

    Example: `assay list graphs`
    """
    chosen = _select(names) if names else list(catalog.methods().values())
    if as_json:
        return _print_json([_brief(m) for m in chosen])
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("method", "what it is for", "desk verdict"):
        table.add_column(heading, no_wrap=heading == "method")
    area = ""
    for m in chosen:
        if m.area != area:
            area = m.area
            table.add_row(Text(area, style="bold underline"), "", "")
        table.add_row(Text(f"  {m.slug}", style="cyan"), m.summary, Text(catalog.verdict_line(m.reference), style="dim"))
    out.print(table)
    out.print(Text("\nassay show <method> says when to use it, what it costs and how to import it", style="dim"))


@app.command()
def show(name: Target, as_json: Json = False) -> None:
    """What a method is, when to use it, what it costs, how to import it, the last verdict.

    Example: `assay show soap`
    """
    (method,) = _one(name)
    from assay.bench.estimate import estimate

    takes = estimate(method.reference)
    if as_json:
        return _print_json({**_brief(method), "reference": method.reference, "estimated_seconds": takes})
    out.print(Text.assemble((method.name, "bold"), f"  {method.summary}"))
    rows = [
        ("paper", method.paper + (f"  https://arxiv.org/abs/{method.arxiv}" if method.arxiv else "")),
        ("use it when", method.use_when),
        ("not when", method.avoid_when),
        ("cost", method.cost),
        ("import", method.import_line),
        ("install", f"pip install 'assay[{method.extra}]'" if method.extra else "nothing more"),
        ("compares with", f"assay compare {method.problem}" if method.problem else ""),
    ]
    for label, text in rows:
        if text:
            out.print(Text.assemble((f"{label:>14}  ", "dim"), text))
    if method.reference:
        from assay.bench.display import claims_table, duration

        out.print()
        out.print(claims_table(method.reference))
        ran = method.reference
        out.print(
            Text(
                f"{ran['scale']} scale, {len(ran['replicates'])} replicates, {ran['date']}, {ran['machine']['processor']}",
                style="dim",
            )
        )
        about = duration(takes) if takes else "unknown"
        out.print(
            Text(
                f"assay run {method.slug} takes about {about} on this machine; its page: {method.folder / 'README.md'}",
                style="dim",
            )
        )
    else:
        out.print(Text(f"\nnot run yet: assay run {method.slug}", style="dim"))


@app.command()
def run(
    names: Targets,
    scale: Annotated[
        Scale, typer.Option(help="smoke: seconds; desk: minutes, the evidence; paper: the published setting.")
    ] = Scale.desk,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Change a setting of the study.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Replicates.")] = None,
    arms: Annotated[
        list[str] | None,
        typer.Option("--arm", metavar="NAME=PATH", help="Add your own arm: name=module:attribute or name=file.py:attribute."),
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Run only these arms: comma-separated, or again for each.")] = None,
    case: Annotated[
        str, typer.Option(metavar="PATH", help="Your own model and data: module:attribute or file.py:attribute.")
    ] = "",
    on: Annotated[str, typer.Option(help="Where: here, ray (local or RAY_ADDRESS), or a Ray address.")] = "here",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps …")] = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be run and fetched; run nothing.")] = False,
    save_reference: Annotated[
        bool, typer.Option("--save-reference", help="Keep the result in the method's folder and page.")
    ] = False,
    as_json: Json = False,
    runs: Runs = RUNS,
) -> None:
    """Puts a method's claim to the test, or those of a whole area. Stopped runs resume where they were.

    Examples:

    - `assay run soap`
    - `assay run soap --set corpus=notes.txt --set width=256`
    - `assay run soap --case mywork.py:my_model_and_data`
    - `assay run soap --arm muon=mypkg.optim:make_muon`
    - `assay run optim --scale smoke --on ray`
    """
    chosen = _select(names)
    if (arms or case) and len(chosen) > 1:
        _usage("--arm and --case go with one method")
    if save_reference and (scale is not Scale.desk or settings or arms or case or only or seeds):
        _usage(
            "--save-reference keeps the desk run as the study defines it: no --scale, --set, --seeds, --arm, --only or --case"
        )
    results = []
    for method in chosen:
        with _usage_errors():
            results.append(
                _run_one(
                    method,
                    scale,
                    settings or [],
                    seeds,
                    arms or [],
                    only or [],
                    case,
                    on,
                    device,
                    dry_run,
                    save_reference,
                    as_json,
                    runs,
                )
            )
    if as_json:
        _print_json(results[0] if len(results) == 1 else results)
    if not dry_run:
        raise typer.Exit(_exit_code(results))


@app.command()
def compare(names: Targets, scale: Scale = Scale.desk, as_json: Json = False, runs: Runs = RUNS) -> None:
    """Every method that answers the same question, head to head, from the stored results.

    Example: `assay compare long_tail`
    """
    chosen = _select(names)
    from assay.bench.records import Records
    from assay.bench.report import collect, comparison, comparison_tables

    records = Records(runs) if runs.exists() else None
    pages = [page for page in collect(records, chosen, scale.value) if page.result]
    missing = [m.slug for m in chosen if m.slug not in {page.method.slug for page in pages}]
    if missing:
        err.print(Text(f"no {scale} result yet of {', '.join(missing)}: assay run {' '.join(missing)}", style="yellow"))
    if not pages:
        raise typer.Exit(USAGE)
    compared = comparison({page.method.slug: page.result for page in pages if page.result})
    if as_json:
        return _print_json(compared)
    for table in comparison_tables(compared):
        out.print(table)


@app.command()
def report(
    to: Annotated[Path, typer.Option("--out", help="Folder of the site.")] = Path("assay-report"),
    scale: Annotated[Scale | None, typer.Option(help="Only results of this scale; the newest when left out.")] = None,
    runs: Runs = RUNS,
) -> None:
    """A static site from the stored runs: verdicts, tables, curves. Needs no network to read.

    Example: `assay report --out site`
    """
    from assay.bench.records import Records
    from assay.bench.report import collect, write_site

    records = Records(runs) if runs.exists() else None
    pages = collect(records, list(catalog.methods().values()), scale.value if scale else None)
    index = write_site(pages, to)
    out.print(Text.assemble("written: ", (str(index), "bold")))


@app.command()
def speed(name: Target, as_json: Json = False) -> None:
    """Ours beside the peer, in one process, turn by turn: the ratio and its spread, and peak memory.

    Example: `assay speed soap`. Leave the machine alone while it runs.
    """
    (method,) = _one(name)
    from rich.progress import Progress

    from assay.bench.speed import compete, load_contests

    outcomes = []
    with _usage_errors():
        contests = load_contests(method.slug)
        with Progress(console=err, transient=True, disable=as_json or not err.is_terminal) as bars:
            for contest in contests:
                bar = bars.add_task(contest.name, total=1.0)

                def show_turn(what: str, share: float, latest: str, bar: Any = bar) -> None:
                    bars.update(bar, completed=share, description=f"{what} {latest}")

                outcomes.append(compete(contest, progress=show_turn))
    if as_json:
        return _print_json(outcomes)
    from assay.bench.display import speed_table

    out.print(speed_table(method.slug, outcomes))


@app.command()
def new(path: Annotated[str, typer.Argument(metavar="AREA/SLUG", help="Where the method goes.")]) -> None:
    """The skeleton of a new method: folder, page, study, test, benchmark. It runs at once.

    Example: `assay new optim/lion`
    """
    from assay.skeleton import write_skeleton

    with _usage_errors():
        written = write_skeleton(path, Path.cwd())
    for file in written:
        out.print(Text(f"  {file}"))
    slug = path.rpartition("/")[2]
    out.print(
        Text(
            f"try it: assay run {slug} --scale smoke; the way from here to a finished method is in CONTRIBUTING.md", style="dim"
        )
    )


@data_app.command("list")
def data_list(as_json: Json = False) -> None:
    """The data sets that can be named, where they come from, and whether they are here."""
    from assay import data

    sets = data.available()
    if as_json:
        return _print_json([_listed(s) for s in sets])
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("name", "kind", "what", "licence", "here"):
        table.add_column(heading, no_wrap=heading in ("name", "here"))
    for s in sets:
        table.add_row(
            Text(s.name, style="cyan"), s.kind, s.summary, s.licence, Text("yes", "green") if s.present else Text("no", "dim")
        )
    out.print(table)


@models_app.command("list")
def models_list(as_json: Json = False) -> None:
    """The models that can be named, and whether they are here."""
    from assay import models

    known = models.available()
    if as_json:
        return _print_json([_listed(m) for m in known])
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("name", "what", "licence", "here"):
        table.add_column(heading, no_wrap=heading in ("name", "here"))
    for m in known:
        table.add_row(
            Text(m.name, style="cyan"), m.summary, m.licence, Text("yes", "green") if m.present else Text("no", "dim")
        )
    out.print(table)


@models_app.command("pull")
def models_pull(name: Annotated[str, typer.Argument(help="A model's name.")]) -> None:
    """Fetches a model's weights and checks them.

    Example: `assay models pull smollm2-135m`
    """
    from assay import models

    if name not in (known := [model.name for model in models.available()]):
        _usage(f"no model is called {name!r}; there are {', '.join(known)}")
    with _usage_errors():
        out.print(Text(f"{name}: {models.pull(name)}"))


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        import assay

        out.print(assay.__version__)
        raise typer.Exit


def main() -> None:
    """Entry point of the command."""
    try:
        app()
    except catalog.CatalogError as error:
        err.print(Text(str(error), style="red"))
        sys.exit(USAGE)


def _run_one(
    method: catalog.Method,
    scale: Scale,
    settings: list[str],
    seeds: int | None,
    arms: list[str],
    only: list[str],
    case: str,
    on: str,
    device: str,
    dry_run: bool,
    save_reference: bool,
    as_json: bool,
    runs: Path,
) -> dict[str, Any]:
    from dataclasses import replace

    from assay.bench.config import UsageError, parse_settings, with_overrides
    from assay.bench.loading import load_object, load_study
    from assay.bench.study import with_arm

    study = load_study(method)
    overrides = parse_settings(settings) | ({"seeds": str(seeds)} if seeds else {})
    config = with_overrides(study.scale(scale.value), overrides)
    extra = {}
    for item in arms:
        label, equals, path = item.partition("=")
        if not equals:
            raise UsageError(f"--arm takes NAME=module:attribute, got {item!r}")
        study = replace(study, arms=with_arm(study, label, load_object(path, "--arm")))
        extra[label] = path
    users_case = load_object(case, "--case") if case else None
    where = _device(device)
    if dry_run:
        return _plan(method, study, scale, config, as_json)

    with err.status(f"{method.slug}: opening the records …") if err.is_terminal and not as_json else _nothing():
        from assay.bench.display import Quiet, Screen, arms_tables, claims_table
        from assay.bench.records import Records
        from assay.bench.runner import Job
        from assay.bench.runner import run as run_job

        records = Records(runs)
    with Screen(err) if not as_json else _nothing() as screen:
        job = Job(
            method.slug, study, scale.value, config, records, screen or Quiet(), overrides, where,
            tuple(part.strip() for item in only for part in item.split(",") if part.strip()), users_case, case, extra,
        )  # fmt: skip
        result = run_job(job, _executor(on))
    if save_reference:
        from assay.bench.reference import save

        stored = records.latest(method.slug, scale.value)
        save(method.folder, result, stored[1] if stored else {})
    if not as_json:
        for table in arms_tables(result):
            out.print(table)
        if result["claims"]:
            out.print(claims_table(result))
        _print_troubles(result)
        figures = _write_figures(records, method.slug, scale.value, runs)
        for figure in figures:
            out.print(Text.assemble(("figure  ", "dim"), str(figure)))
        out.print(Text.assemble(("records ", "dim"), f"{records.uri}   assay report makes a site of them", style="dim"))
    return result


def _plan(method: catalog.Method, study: Any, scale: Scale, config: Any, as_json: bool) -> dict[str, Any]:
    """What a run would do."""
    names = study.replicate_names(config)
    tuned = [arm for arm in study.arms if study.tune and arm not in study.tune.follow]
    plan = {
        "study": method.slug,
        "scale": scale.value,
        "arms": list(study.arms),
        "replicates": names,
        "tuning_trials": len(tuned) * len(study.tune.grid) if study.tune and scale is not Scale.smoke else 0,
        "trials": len(study.arms) * len(names),
        "config": config.model_dump(mode="json"),
        "claims": [{"text": c.text, "bound": str(c.holds or "reported"), "published": c.published} for c in study.claims],
        "needs": study.paper if scale is Scale.paper else "",
    }
    if not as_json:
        out.print(
            Text.assemble(
                (f"{method.slug} · {scale}", "bold"), f"  {plan['tuning_trials'] + plan['trials']} trials, nothing is run"
            )
        )
        out.print(
            Text(f"arms        {', '.join(plan['arms'])}\nreplicates  {', '.join(names[:12])}{' …' if len(names) > 12 else ''}")
        )
        fields = type(config).model_fields
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for heading in ("setting", "value", "what"):
            table.add_column(heading)
        for key, value in plan["config"].items():
            table.add_row(Text(key, style="cyan"), str(value), (fields[key].description or "").strip())
        out.print(table)
        for claim in plan["claims"]:
            out.print(Text(f"claim  {claim['text']}  ({claim['bound']})"))
        if plan["needs"]:
            out.print(Text(f"\n{plan['needs'].strip()}"))
    return plan


def _print_troubles(result: dict[str, Any]) -> None:
    from assay.bench.result import failed

    for arm, replicate, record in failed(result):
        err.print(Text(f"✗ {arm} · {replicate}: {record['error']}", style="red"))
        if record.get("trace"):
            err.print(Text(record["trace"].rstrip(), style="dim"))
    for arm, body in result["arms"].items():
        for record in body["replicates"].values():
            if record["status"] == "skipped":
                out.print(Text(f"– {arm} skipped: {record['error']}", style="yellow"))
                break
    if idle := result.get("not_applicable"):
        out.print(Text(f"{len(idle)} gates and claims do not apply here: {'; '.join(idle)}", style="dim"))
    if result["tune"] and result["tune"]["at_edge"]:
        edge = ", ".join(result["tune"]["at_edge"])
        out.print(
            Text(
                f"the best {result['tune']['field']} lies on the grid's edge for {edge}: a wider grid may do better",
                style="yellow",
            )
        )


def _write_figures(records: Any, slug: str, scale: str, runs: Path) -> list[Path]:
    stored = records.latest(slug, scale)
    if not stored or not stored[1]:
        return []
    folder = runs / "figures" / f"{slug}-{scale}"
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in stored[1].items():
        (folder / name).write_bytes(content)
    return [folder / name for name in stored[1]]


def _exit_code(results: list[dict[str, Any]]) -> int:
    from assay.bench.result import failed

    if any(failed(result) for result in results):
        return TRIAL_FAILED
    return CLAIM_FAILS if any(c["verdict"] == "fails" for result in results for c in result["claims"]) else HOLDS


def _executor(on: str) -> Any:
    if on == "here":
        return None
    from assay.bench.ray_executor import OnRay
    from assay.bench.study import require

    require("ray", extra="ray")
    return OnRay(None if on == "ray" else on)


def _device(asked: str) -> str:
    import torch

    from assay.bench.config import UsageError

    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=torch.device(asked))
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {asked}: {str(error).splitlines()[0]}") from None
    return asked


def _brief(method: catalog.Method) -> dict[str, Any]:
    keys = ("slug", "area", "name", "summary", "paper", "arxiv", "extra", "problem", "use_when", "avoid_when", "cost")
    return {key: getattr(method, key) for key in keys} | {
        "import": method.import_line,
        "verdicts": {c["text"]: c["verdict"] for c in (method.reference or {}).get("claims", [])},
    }


def _listed(entry: Any) -> dict[str, Any]:
    """A data set or model as JSON: what a person would be shown of it."""
    shown = ("name", "kind", "summary", "licence", "home", "present", "path")
    values = {key: getattr(entry, key) for key in shown if hasattr(entry, key)}
    return {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}


def _select(names: list[str]) -> list[catalog.Method]:
    try:
        return catalog.select(names)
    except KeyError as error:
        _usage(error.args[0])


def _one(name: str) -> list[catalog.Method]:
    if name not in (known := catalog.methods()) and name.replace("-", "_") not in known:
        chosen = _select([name])
        _usage(f"{name!r} is not one method; it holds {', '.join(m.slug for m in chosen)}")
    return _select([name])


class _usage_errors:  # noqa: N801 - reads as a statement
    """Turns what a user can mend into one line and exit code 2."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None:
            return
        mendable = isinstance(error, (ImportError, FileNotFoundError))
        if not mendable and "assay.bench.config" in sys.modules:
            mendable = isinstance(error, sys.modules["assay.bench.config"].UsageError)
        if mendable:
            _usage(str(error))


class _nothing:  # noqa: N801 - reads as a statement
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _usage(message: str) -> NoReturn:
    err.print(Text(message, style="red"))
    raise typer.Exit(USAGE)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
