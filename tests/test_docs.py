"""Every example in a docstring runs when it is pasted alone; every public name has one."""

import doctest
import importlib
import inspect
import pkgutil
from types import ModuleType

import pytest

import torchrl_kl
import torchrl_kl.envs
import torchrl_kl.exact
import torchrl_kl.functional
import torchrl_kl.language

PACKAGES: list[ModuleType] = [torchrl_kl, torchrl_kl.envs]
PUBLIC = [*PACKAGES, torchrl_kl.exact, torchrl_kl.functional, torchrl_kl.language]


def module_names() -> list[str]:
    # Both packages are walked: torchrl_kl.envs is found inside torchrl_kl only where links are.
    names = {package.__name__ for package in PACKAGES}
    for package in PACKAGES:
        modules = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        names |= {module.name for module in modules}
    return sorted(names)


@pytest.mark.parametrize("name", module_names())
def test_examples_run(name):
    alone = {"__name__": "__main__"}  # an empty namespace for each: as if pasted alone
    found = doctest.DocTestFinder(exclude_empty=True).find(
        importlib.import_module(name), globs=alone
    )
    runner, output = doctest.DocTestRunner(optionflags=doctest.REPORT_NDIFF), []
    for example in found:
        runner.run(example, out=output.append)
    assert runner.failures == 0, "".join(output)


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_every_public_class_and_function_has_an_example(module):
    for name in module.__all__:
        thing = getattr(module, name)
        if not (inspect.isclass(thing) or inspect.isfunction(thing)):
            continue
        home = inspect.getmodule(thing)
        assert home is not None
        assert home.__name__ in module_names(), name  # where the test above runs it
        tests = doctest.DocTestFinder(exclude_empty=True).find(thing, module=home)
        assert any(test.examples for test in tests), f"the docstring of {name} has no `>>>`"
