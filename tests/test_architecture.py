"""What may import what, and which names are promised to users. The imports are read, not run."""

import ast
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "torchrl_kl"

SCRIPTS = sorted(ROOT.glob("examples/*.py")) + sorted(ROOT.glob("benchmarks/*.py"))

# The promise to users: a name that is added, renamed or removed must be so here too.
PUBLIC_NAMES = {
    "torchrl_kl": [
        "GPT",
        "AdaptiveKLController",
        "ConstantKLController",
        "Enumeration",
        "ExactValues",
        "ExponentialKLController",
        "FrozenActor",
        "CausalLMActor",
        "CausalLMCritic",
        "CausalLMRewardModel",
        "KLConstrainedTransform",
        "KLControlHook",
        "KLController",
        "KLDivergenceTransform",
        "KLKeys",
        "KLPenaltyLoss",
        "KLMonitor",
        "KLRewardTransform",
        "KLStatistics",
        "PIDKLController",
        "PlannedKLController",
        "PolicyValues",
        "ReferenceModelLogProbTransform",
        "RewardAdjustmentTransform",
        "RunCheckpoint",
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
        "sample_responses",
        "as_steps",
        "ResponseKLTransform",
        "sum_over_trajectories",
    ],
    "torchrl_kl.envs": ["DigitLanguage", "DigitLanguageEnv", "DigitLanguageGymEnv"],
}

# Private names of PyTorch and of Hugging Face, for which they have no public ones.
TORCH_NAMES = {
    ("_metadata", "checkpoint.py"),
    ("_version", "fingerprint.py"),
    ("_parameters", "fingerprint.py"),
    ("_forward_hooks", "fingerprint.py"),
    ("_forward_pre_hooks", "fingerprint.py"),
    ("_parameters", "bare.py"),
    ("_forward_hooks", "bare.py"),
    ("_forward_pre_hooks", "bare.py"),
    ("_backward_hooks", "bare.py"),
    ("_backward_pre_hooks", "bare.py"),
    ("_compiled_call_impl", "bare.py"),
}

# The rooms of torchrl_kl (files and folders), lowest first: what each imports of the others. All
# arrows point to an earlier line, and an arrow that no import uses any more must go.
ARROWS: dict[str, set[str]] = {
    "functional": set(),
    "_tensordict": set(),
    "_torchrl": {"functional"},
    "checkpoint": {"_torchrl"},
    "controllers": {"functional"},
    "exact": {"functional"},
    "actors": {"_tensordict", "_torchrl", "functional"},
    "_feeding": {"_tensordict", "controllers", "functional"},
    "transforms": {
        *("_feeding", "_tensordict", "_torchrl"),
        *("actors", "controllers", "functional"),
    },
    "language": {
        *("_tensordict", "actors", "checkpoint"),
        *("controllers", "functional", "transforms"),
    },
    "objectives": {"_feeding", "_tensordict", "actors", "controllers", "functional"},
    "monitor": {"_feeding", "_tensordict", "actors", "controllers", "functional"},
    "collectors": {"_tensordict", "_torchrl", "actors", "controllers", "transforms"},
    "trainers": {"_feeding", "_tensordict", "transforms"},
}
MOST_ROOMS, MOST_FLOORS = 16, 6  # `__init__` and `envs` count too
MOST_LINES, MOST_LINES_OF_A_FUNCTION = 400, 60

# What a room may import of others' packages, in addition to the standard library.
TENSORDICT = {"torch", "tensordict", "torchrl"}
LIBRARIES = {
    **dict.fromkeys(ARROWS, TENSORDICT),
    **{room: {"torch"} for room in ("functional", "controllers", "exact")},
    **{room: TENSORDICT | {"safetensors"} for room in ("checkpoint", "language")},
    "_torchrl": TENSORDICT | {"ray"},
    "transforms": TENSORDICT | {"typing_extensions"},  # which torch needs
    "collectors": TENSORDICT | {"cloudpickle", "ray"},
}


def read_imports(source: str, package: str) -> set[str]:
    """Dotted names of all that a source imports, inside functions too: `package.module.name`."""
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


def files_of(room: str) -> list[Path]:
    """The files of a room: one, or all of a folder."""
    path = PACKAGE / room
    return sorted(path.rglob("*.py")) if path.is_dir() else [PACKAGE / f"{room}.py"]


def package_of(path: Path) -> str:
    """The package in which a file lies, to resolve relative imports."""
    return ".".join(path.relative_to(ROOT).parent.parts)


def imports_of(path: Path, package: str | None = None) -> tuple[set[str], set[str]]:
    """Names of torchrl_kl that a file imports, and packages of others but the standard library."""
    names = read_imports(path.read_text(), package or package_of(path))
    own = {".".join(name.split(".")[1:]) for name in names if name.split(".")[0] == "torchrl_kl"}
    others = {name.split(".")[0] for name in names} - {"torchrl_kl"} - sys.stdlib_module_names
    return own, others


def module_of(name: str) -> str:
    """The module (file or package) that an imported name of torchrl_kl leads to."""
    parts = name.split(".")
    while parts:
        path = PACKAGE.joinpath(*parts)
        if path.with_suffix(".py").is_file() or (path / "__init__.py").is_file():
            return ".".join(parts)
        parts.pop()
    return ""


def depth(node: str, arrows: dict[str, set[str]], above: tuple[str, ...] = ()) -> int:
    """The floor of a node, counted from 1; fails on a circle."""
    assert node not in above, f"a circle: {above}"
    return 1 + max((depth(n, arrows, (*above, node)) for n in arrows.get(node, ())), default=0)


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

    def test_every_room_has_its_place(self):
        rooms = {path.stem for path in PACKAGE.glob("*.py")}
        rooms |= {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
        assert rooms - {"__init__", "envs"} == set(ARROWS), "give the room a line in ARROWS"
        assert len(rooms | {"envs"}) <= MOST_ROOMS

    def test_the_table_points_one_way(self):
        order = list(ARROWS)
        for room, targets in ARROWS.items():
            assert all(order.index(target) < order.index(room) for target in targets)
        assert max(depth(room, ARROWS) for room in ARROWS) < MOST_FLOORS  # the front door is above

    @pytest.mark.parametrize("room", ARROWS)
    def test_a_room_imports_what_the_table_says(self, room):
        imports = [imports_of(path) for path in files_of(room)]
        own = {name.split(".")[0] for names, _ in imports for name in names}
        others = {name for _, names in imports for name in names}
        assert own - {room} == ARROWS[room]
        assert others
        assert others <= LIBRARIES[room]

    def test_no_circle_of_files(self):
        arrows = {}
        for path in (path for room in ARROWS for path in files_of(room)):
            name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
            own, _ = imports_of(path)
            arrows[name.removesuffix(".__init__")] = {module_of(target) for target in own} - {""}
        assert all(depth(name, arrows) for name in arrows)

    @pytest.mark.parametrize(
        "path", sorted((ROOT / "envs").glob("*.py")), ids=lambda path: path.stem
    )
    def test_envs_and_transforms_meet_only_in_keys(self, path):
        own, others = imports_of(path, "torchrl_kl.envs")
        assert {name.split(".")[0] for name in own} <= {"envs"}
        assert others <= TENSORDICT | {"gymnasium", "numpy"}

    def test_the_front_door_only_opens(self):
        own, others = imports_of(PACKAGE / "__init__.py")
        assert {name.split(".")[0] for name in own} <= set(ARROWS)
        assert others == set()

    @pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
    def test_examples_and_benchmarks_use_public_names_only(self, path):
        own, others = imports_of(path)
        public = {f"torchrl_kl.{name}" for name in PUBLIC_NAMES["torchrl_kl"]}
        public |= {f"torchrl_kl.envs.{name}" for name in PUBLIC_NAMES["torchrl_kl.envs"]}
        # What another script imports, such as its report, may need nothing of the package.
        assert own or any(path.stem in imports_of(script)[1] for script in SCRIPTS)
        assert {f"torchrl_kl.{name}" for name in own} <= public
        foreign = {script.stem for script in SCRIPTS if script.parent != path.parent}
        assert not others & {"envs", "tests", "examples", "benchmarks", *foreign}


SOURCES = sorted(
    {*(path for room in ARROWS for path in files_of(room)), *(ROOT / "envs").glob("*.py")}
)


class TestSize:
    @pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}.{path.stem}")
    def test_files_and_functions_are_short(self, path):
        source = path.read_text()
        assert len(source.splitlines()) < MOST_LINES
        functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
        long = [f.name for f in functions if f.end_lineno - f.lineno >= MOST_LINES_OF_A_FUNCTION]  # type: ignore[operator]
        assert long == []


class TestPrivateNames:
    def test_no_stack_frame_is_walked(self):
        words = ("_getframe", "currentframe", "inspect.stack")
        assert not [path for path in SOURCES if any(word in path.read_text() for word in words)]

    def test_those_of_others_are_in_one_place(self):
        """A private attribute of an object other than `self` is one that this package defines."""
        trees = {path: ast.parse(path.read_text()) for path in SOURCES}
        defined, used = {"_apply", "_buffers", "_exit", "_modules", "_replace"}, []
        for path, tree in trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    defined.add(node.name)
                elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    defined.add(node.target.id)
                elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                    on_self = isinstance(node.value, ast.Name) and node.value.id == "self"
                    if on_self and isinstance(node.ctx, ast.Store):
                        defined.add(node.attr)
                    elif not on_self and not node.attr.startswith("__"):
                        used.append((node.attr, path))
        foreign = {(name, path.name) for name, path in used if name not in defined}
        assert {(name, file) for name, file in foreign if file != "_torchrl.py"} == TORCH_NAMES


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
        sentence = (
            "ImportError: this package was imported as `envs`: import it as `torchrl_kl.envs`, "
            "never as `envs`."
        )
        assert result.stderr.splitlines()[-1] == sentence

    @pytest.mark.skipif(
        not (PACKAGE / "envs").is_dir(), reason="sdists and some file systems have no such links"
    )
    def test_the_link_for_editors_leads_there(self):
        assert (ROOT / "torchrl_kl" / "envs").resolve() == ROOT / "envs"

    def test_a_checkout_without_symbolic_links(self, tmp_path):
        links = shutil.ignore_patterns("__pycache__", "envs")
        shutil.copytree(PACKAGE, tmp_path / "torchrl_kl", ignore=links)
        (tmp_path / "torchrl_kl" / "envs").write_text("../envs")  # as Git writes it there
        shutil.copytree(ROOT / "envs", tmp_path / "envs")
        code = "import torchrl_kl.envs as envs; print(envs.__file__, envs.DigitLanguage().n_tokens)"
        command = [sys.executable, "-W", "ignore", "-c", code]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        result = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert result.stdout.split() == [str(tmp_path / "envs" / "__init__.py"), "11"]
