"""A group of tests runs in one worker, so that what they share (a cluster, a finished run) is made once and not per worker."""

from __future__ import annotations

import os

import pytest

pytestmark = pytest.mark.xdist_group("groups")


def test_workers_are_chosen_by_group(request: pytest.FixtureRequest) -> None:
    """The scheduler reads the group off the id. pytest 9.2 no longer takes the id that xdist 3.8 gives."""
    assert request.node.nodeid.endswith("@groups") == ("PYTEST_XDIST_WORKER" in os.environ)
