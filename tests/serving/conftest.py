"""Servers that several tests of this room talk to."""

import pytest

from serving_helpers import in_process, in_thread


@pytest.fixture(scope="module")
def server(trained_run):
    """In a thread, with the small run."""
    with in_thread(trained_run) as running:
        yield running


@pytest.fixture(scope="session")
def process(trained_run, tmp_path_factory):
    """In a process of its own, for many clients."""
    with in_process(trained_run, folder=tmp_path_factory.mktemp("process")) as running:
        yield running
