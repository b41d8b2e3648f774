"""Plugins, markers and the header; what tests use is in `fixtures/`."""

import os

import psycopg
import pytest

from tests.fixtures.rung import choose_rung

pytest_plugins = [
    "tests.fixtures.server",
    "tests.fixtures.guard",
    "tests.fixtures.proxy",
    "tests.fixtures.measure",
    "tests.fixtures.hosts",
    "tests.fixtures.cluster",
    "tests.fixtures.pooler",
    "tests.fixtures.terminal",
    "tests.fixtures.events",
    "tests.fixtures.control_group",
    "tests.fixtures.queue",
]


def pytest_report_header() -> str:
    """Say what the tests run on."""
    rung, why = choose_rung()
    return f"server: {rung} ({why}); psycopg {psycopg.__version__}, libpq {psycopg.pq.version()}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs root where we are not root, and say so."""
    if os.geteuid() != 0:
        for item in items:
            if item.get_closest_marker("root"):
                item.add_marker(pytest.mark.skip(reason="needs root"))
