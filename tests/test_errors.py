"""The error tree: every class is ours and a standard-library type, documented, and survives a process border."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys

import pytest

from areal.utils import errors

ALL = [e for _, e in inspect.getmembers(errors, inspect.isclass) if issubclass(e, errors.ArealError)]
CONCRETE = [e for e in ALL if e is not errors.ArealError]


@pytest.mark.parametrize("error", CONCRETE)
def test_error_is_ours_and_a_stdlib_type(error):
    stdlib = [base for base in error.__mro__ if base.__module__ == "builtins" and base not in (object, BaseException)]
    assert any(base is not Exception for base in stdlib)


@pytest.mark.parametrize("error", ALL)
def test_error_pickled_keeps_type_and_message(error):
    copy = pickle.loads(pickle.dumps(error("url: nothing after 3 s")))
    assert type(copy) is error
    assert str(copy) == "url: nothing after 3 s"


@pytest.mark.parametrize("error", CONCRETE)
def test_error_stands_in_the_tree_of_the_docstring(error):
    assert error.__name__ in errors.__doc__


@pytest.mark.parametrize(
    ("error", "stdlib"),
    [
        (errors.ConfigError, ValueError),
        (errors.UnsupportedFeatureError, NotImplementedError),
        (errors.UnsupportedFeatureError, ValueError),
        (errors.TrajectoryError, ValueError),
        (errors.WeightSyncError, RuntimeError),
        (errors.RolloutTimeoutError, TimeoutError),
        (errors.NameEntryNotFoundError, LookupError),
    ],
)
def test_error_can_be_caught_as(error, stdlib):
    with pytest.raises(stdlib):
        raise error("x")


def test_import_errors_loads_no_third_party_package():
    code = "import sys, areal.utils.errors; print([m for m in ('torch', 'rich', 'omegaconf') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
