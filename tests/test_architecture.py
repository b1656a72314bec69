"""What may import what, and which names are promised to users. The imports are read, not run."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

SCRIPTS = sorted(ROOT.glob("examples/*.py")) + sorted(ROOT.glob("benchmarks/*.py"))

# The promise to users: a name that is added, renamed or lost must be added, renamed or struck out here too.
PUBLIC_NAMES = {
    "torchrl_kl": [
        "GPT",
        "AdaptiveKLController",
        "ConstantKLController",
        "Enumeration",
        "ExactValues",
        "ExponentialKLController",
        "FrozenActor",
        "GPTActor",
        "GPTCritic",
        "GPTRewardModel",
        "KLConstrainedTransform",
        "KLControlHook",
        "KLController",
        "KLDivergenceTransform",
        "KLPenaltyLoss",
        "KLMonitor",
        "KLRewardTransform",
        "KLStatistics",
        "PIDKLController",
        "PolicyValues",
        "ReferenceModelLogProbTransform",
        "RewardAdjustmentTransform",
        "TopKActor",
        "TargetKLController",
        "coeff_for_budget",
        "exact_kl",
        "kl_exact",
        "kl_collector",
        "kl_k1",
        "kl_k2",
        "kl_k3",
        "kl_top_k",
        "masked_mean",
        "masked_sum",
        "sum_over_trajectories",
    ],
    "torchrl_kl.envs": ["DigitLanguage", "DigitLanguageEnv"],
}

# Modules of torchrl_kl, lowest first: what each may import of the others. All arrows point to an earlier line.
ARROWS = {
    "_divergence": set(),
    "functional": {"_divergence"},
    "_scalars": set(),
    "statistics": {"_scalars"},
    "controllers": {"_scalars"},
    "budget": {"_scalars"},
    "exact": {"functional"},
    "gpt": set(),
    "_keys": set(),
    "_live": set(),
    "_placement": set(),
    "_transform": {"_keys", "_placement"},
    "_charge": {"_keys", "_transform"},
    "_actors": {"_keys"},
    "_moving": {"_scalars"},
    "reference": {"_actors", "_keys", "_moving"},
    "_switched": {"_live", "reference"},
    "trajectories": {"_keys"},
    "_distributions": {"_actors"},
    "top_k": {"_keys", "_distributions"},
    "_estimates": {"_keys", "_transform", "_distributions", "functional"},
    "_policy": {"_actors", "_keys", "_live"},
    "transforms": {
        *("_keys", "_placement", "_policy", "_transform", "_estimates", "_switched"),
        *("functional", "reference"),
    },
    "objectives": {
        "_keys",
        "_switched",
        "_transform",
        "controllers",
        "functional",
        "statistics",
        "trajectories",
    },
    "reward_transforms": {
        *("_keys", "_placement", "_transform", "_charge"),
        *("controllers", "statistics", "trajectories"),
    },
    "_sampling": set(),
    "_scorer": {"_keys", "_sampling", "_transform", "functional", "reference"},
    "monitor": {
        "_keys",
        "_sampling",
        "_scorer",
        "_transform",
        "controllers",
        "reference",
        "statistics",
        "trajectories",
    },
    "stacks": {
        *("_keys", "_transform", "_charge", "_estimates", "_switched", "controllers", "functional"),
        *("reference", "transforms", "reward_transforms"),
    },
    "_watched": set(),
    "_workers": {"_keys", "_moving", "_switched", "controllers", "stacks"},
    "collectors": {"_moving", "_switched", "_watched", "_workers", "stacks"},
    "trainers": {"_keys", "_transform", "stacks"},
}

# What a module may import of others' packages, beside the standard library.
TENSORDICT = {"torch", "tensordict", "torchrl"}
LIBRARIES = {
    **dict.fromkeys(ARROWS, TENSORDICT),
    **{
        module: {"torch"}
        for module in (
            "_divergence",
            "functional",
            "_scalars",
            "statistics",
            "controllers",
            "budget",
            "exact",
            "_live",
            "_moving",
            "_sampling",
        )
    },
    "gpt": TENSORDICT | {"safetensors"},
    "_watched": TENSORDICT | {"ray"},
    "_workers": TENSORDICT | {"cloudpickle"},
}


def read_imports(source: str, package: str) -> set[str]:
    """Dotted names of all that a source imports, functions and conditions included: `package.module.name`."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = (
                package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            )
            origin = ".".join([*parents, *([node.module] if node.module else [])])
            names |= {f"{origin}.{alias.name}" for alias in node.names}
    return names


def imports_of(path: str, package: str = "torchrl_kl") -> tuple[set[str], set[str]]:
    """Modules of torchrl_kl that a file imports, and packages of others, without the standard library."""
    names = read_imports((ROOT / path).read_text(), package)
    own = {".".join(name.split(".")[1:]) for name in names if name.split(".")[0] == "torchrl_kl"}
    others = {name.split(".")[0] for name in names} - {"torchrl_kl"} - sys.stdlib_module_names
    return own, others


def modules_in(folder: str) -> set[str]:
    return {path.stem for path in (ROOT / folder).glob("*.py")} - {"__init__"}


class TestArrows:
    def test_the_reader_sees_every_kind_of_import(self):
        source = """
import a.b, c as d
from e.f import g
from . import h
from .i import j
from ..k import l
def later():
    if d:
        import m
"""
        expected = {"a.b", "c", "e.f.g", "p.q.h", "p.q.i.j", "p.k.l", "m"}
        assert read_imports(source, "p.q") == expected

    def test_every_module_has_its_place(self):
        assert modules_in("torchrl_kl") == set(ARROWS), "give the module a line in ARROWS"

    def test_the_table_points_one_way(self):
        order = list(ARROWS)
        for module, targets in ARROWS.items():
            assert all(order.index(target) < order.index(module) for target in targets)

    @pytest.mark.parametrize("module", ARROWS)
    def test_nothing_imports_upward(self, module):
        own, others = imports_of(f"torchrl_kl/{module}.py")
        assert {name.split(".")[0] for name in own} <= ARROWS[module]
        assert others
        assert others <= LIBRARIES[module]

    @pytest.mark.parametrize("module", sorted(modules_in("envs") | {"__init__"}))
    def test_envs_and_transforms_meet_only_in_keys(self, module):
        own, others = imports_of(f"envs/{module}.py", "torchrl_kl.envs")
        assert {name.split(".")[0] for name in own} <= {"envs"}
        assert others <= TENSORDICT

    def test_the_front_door_only_opens(self):
        own, others = imports_of("torchrl_kl/__init__.py")
        assert {name.split(".")[0] for name in own} <= set(ARROWS)
        assert others == set()

    @pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
    def test_examples_and_benchmarks_use_public_names_only(self, path):
        own, others = imports_of(f"{path.parent.name}/{path.name}", path.parent.name)
        public = {f"torchrl_kl.{name}" for name in PUBLIC_NAMES["torchrl_kl"]}
        public |= {f"torchrl_kl.envs.{name}" for name in PUBLIC_NAMES["torchrl_kl.envs"]}
        assert own or path.stem.endswith("_report")  # a report may know figures alone
        assert {f"torchrl_kl.{name}" for name in own} <= public
        foreign = {script.stem for script in SCRIPTS if script.parent != path.parent}
        assert not others & {"envs", "tests", "examples", "benchmarks", *foreign}


class TestPublicNames:
    @pytest.mark.parametrize("module", PUBLIC_NAMES)
    def test_they_are_the_committed_list(self, module):
        names = importlib.import_module(module).__all__
        assert sorted(names) == sorted(PUBLIC_NAMES[module])
        assert len(names) == len(set(names))

    @pytest.mark.parametrize("module", PUBLIC_NAMES)
    def test_all_of_them_are_there(self, module):
        namespace: dict[str, object] = {}
        exec(f"from {module} import *", namespace)
        assert namespace.keys() - {"__builtins__"} == set(PUBLIC_NAMES[module])


class TestEnvsFolder:
    def test_it_is_imported_by_its_full_name(self):
        import torchrl_kl.envs as envs

        assert Path(str(envs.__file__)).resolve() == ROOT / "envs" / "__init__.py"

    def test_the_short_name_is_refused(self):
        result = subprocess.run(
            [sys.executable, "-c", "import envs"], cwd=ROOT, capture_output=True, text=True
        )
        assert result.returncode != 0
        sentence = "ImportError: this package was imported as `envs`: import it as `torchrl_kl.envs`, never as `envs`."
        assert result.stderr.splitlines()[-1] == sentence

    def test_the_link_for_editors_leads_there(self):
        assert (ROOT / "torchrl_kl" / "envs").resolve() == ROOT / "envs"
