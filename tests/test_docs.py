"""Every example in a docstring runs, and every public class and function has one."""

import doctest
import importlib
import inspect
import pkgutil
from types import ModuleType

import pytest

import torchrl_kl
import torchrl_kl.envs

PACKAGES: list[ModuleType] = [torchrl_kl, torchrl_kl.envs]


def module_names() -> list[str]:
    # The packages are listed one by one: torchrl_kl.envs is found inside torchrl_kl only where links are.
    names = {package.__name__ for package in PACKAGES}
    for package in PACKAGES:
        names |= {
            module.name
            for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        }
    return sorted(names)


def examples_in(module: ModuleType) -> list[doctest.DocTest]:
    return [
        test for test in doctest.DocTestFinder(exclude_empty=True).find(module) if test.examples
    ]


def public_objects() -> dict[str, object]:
    objects = {
        f"{package.__name__}.{name}": getattr(package, name)
        for package in PACKAGES
        for name in package.__all__
    }
    return {
        name: thing
        for name, thing in objects.items()
        if inspect.isclass(thing) or inspect.isfunction(thing)
    }


@pytest.mark.parametrize("name", module_names())
def test_examples_run(name):
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=doctest.REPORT_NDIFF)
    output: list[str] = []
    for example in examples_in(module):
        runner.run(example, out=output.append)
    assert runner.failures == 0, "".join(output)


@pytest.mark.parametrize("name", public_objects())
def test_every_public_class_and_function_has_an_example(name):
    thing = public_objects()[name]
    finder = doctest.DocTestFinder(exclude_empty=True)
    home = inspect.getmodule(thing)
    examples = [example for test in finder.find(thing, module=home) for example in test.examples]
    assert examples, f"the docstring of {name} has no `>>>`"
    assert home is not None
    assert home.__name__ in module_names()  # where the test above runs it
