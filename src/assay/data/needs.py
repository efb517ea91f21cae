"""A test that needs real data skips where they are absent, and fails where they ought to be there."""

import os

from .catalog import available
from .places import DataUnavailable, looked_at


def needs(name: str) -> None:
    """Skip the running test unless the data set is on this machine (nothing is downloaded); under ``CI=true``, fail.

    Raises:
        ValueError: no data set of that name is in `available`.
    """
    import pytest

    known = {data.name: data for data in available()}
    if name not in known:
        raise ValueError(f"no data set is called {name!r}; there are {', '.join(known)}")
    data = known[name]
    if data.present:
        return
    reason = str(DataUnavailable(name, looked_at(*data.places), data.home, "this test needs it"))
    if os.environ.get("CI", "").lower() == "true":
        pytest.fail(reason)
    pytest.skip(reason)
