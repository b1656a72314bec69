"""One Ray for all tests that need it."""

import importlib
import logging
import os
from collections.abc import Iterator
from unittest import mock

import pytest


@pytest.fixture(scope="session")
def ray_runtime() -> Iterator[None]:
    import ray
    from ray import cloudpickle

    # Ray starts its workers at niceness 15: on a busy machine they would hardly ever run.
    with mock.patch.dict(os.environ, RAY_worker_niceness="0"):
        ray.init(
            num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
        )
        modules = [importlib.import_module(name) for name in ("tests.helpers", "tests.adapters")]
        for module in modules:  # actors of Ray do not find the tests
            cloudpickle.register_pickle_by_value(module)
        yield
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)
        ray.shutdown()
