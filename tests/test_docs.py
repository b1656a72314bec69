"""Every example in a docstring runs when it is pasted alone; every public name has one."""

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
    # Both packages are walked: torchrl_kl.envs is found inside torchrl_kl only where links are.
    names = {package.__name__ for package in PACKAGES}
    for package in PACKAGES:
        modules = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        names |= {module.name for module in modules}
    return sorted(names)


def examples_in(module: ModuleType) -> list[doctest.DocTest]:
    """The examples of a module's docstrings, each in a new, empty namespace: as if pasted alone."""
    alone = {"__name__": "__main__"}
    found = doctest.DocTestFinder(exclude_empty=True).find(module, globs=alone)
    return [test for test in found if test.examples]


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


def test_an_example_does_not_see_the_names_of_its_module():
    module = ModuleType("with_a_name")
    exec("import math\ndef f():\n    '''>>> math.pi > 3\n    True\n    '''", vars(module))
    (example,) = examples_in(module)
    output: list[str] = []
    doctest.DocTestRunner().run(example, out=output.append)
    assert "NameError: name 'math' is not defined" in "".join(output)


@pytest.mark.parametrize("name", public_objects())
def test_every_public_class_and_function_has_an_example(name):
    thing = public_objects()[name]
    finder = doctest.DocTestFinder(exclude_empty=True)
    home = inspect.getmodule(thing)
    examples = [example for test in finder.find(thing, module=home) for example in test.examples]
    assert examples, f"the docstring of {name} has no `>>>`"
    assert home is not None
    assert home.__name__ in module_names()  # where the test above runs it
