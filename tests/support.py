"""What the bench's tests share: jobs of the toy study, its marks on disk, what has to be equal between runs."""

from pathlib import Path

from assay.bench.display import Quiet
from assay.bench.runner import Job


class Messages(Quiet):
    def __init__(self):
        self.texts = []

    def message(self, text):
        self.texts.append(text)


def job(study, records, scale="desk", **options):
    settings = options.pop("settings", {})
    config = study.scale(scale).model_copy(update=settings)
    options = {"display": Quiet(), "overrides": {k: str(v) for k, v in settings.items()}, **options}
    return Job(name="toy", study=study, scale=scale, config=config, records=records, **options)


def marks(folder, kind):
    return sorted(path.name.rpartition("-")[0] for path in Path(folder).glob(f"{kind}-*"))


def numbers(result):
    """What of a result has to be the same on every run."""
    arms = {
        arm: {name: (record["metrics"], record["curves"]) for name, record in body["replicates"].items()}
        for arm, body in result["arms"].items()
    }
    return arms, result["tune"], result["claims"], result["gates"]
