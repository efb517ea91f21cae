import subprocess
import sys

import pytest

from assay.data import available, load_images, load_letters, load_preferences, load_reviews, load_series, load_text, needs
from assay.data.image_sets import LOADERS


@pytest.mark.slow  # reads most of the sets
def test_every_name_has_a_loader_and_what_is_present_loads():
    load = {
        "text": lambda n: load_text(n, limit=10),
        "images": load_images,
        "series": load_series,
        "reviews": load_reviews,
        "preferences": load_preferences,
        "letters": load_letters,
    }
    for data in available():
        assert data.licence
        assert data.home
        if data.kind == "images":
            assert data.name in LOADERS
        if data.present and data.name not in ("cifar10", "cifar100", "nab"):  # those have slower tests of their own
            load[data.kind](data.name)
    assert {data.name for data in available() if data.kind == "images"} == set(LOADERS)


def test_in_an_empty_place_only_what_dependencies_ship_is_present(empty_home):
    assert [data.name for data in available() if data.present] == ["stdlib", "pydoc", "digits"]
    assert all(data.path is None for data in available())


def test_asking_what_there_is_imports_nothing_heavy():
    script = (
        "import sys; from assay.data import available; available(); from assay.models import available as models; models();"
        "print([m for m in ('torch', 'sklearn', 'pandas', 'numpy', 'transformers', 'datasets', 'PIL') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_test_that_needs_absent_data_skips_and_under_ci_fails(empty_home, monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"(?s)'cifar10'.*cifar_subsets/cifar10_subset_jpeg.npz.*ASSAY_DATA"):
        needs("cifar10")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="'cifar10' is not available"):
        needs("cifar10")
    needs("digits")
    with pytest.raises(ValueError, match="no data set is called 'cifar11'"):
        needs("cifar11")


def test_a_name_that_its_module_bears_too_stays_a_function():
    script = (
        "import assay.data.needs, assay.models.locate\nfrom assay.data import needs\nfrom assay.models import locate\n"
        "print(callable(needs), callable(locate))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True True"
