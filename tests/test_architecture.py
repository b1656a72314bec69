"""What may import what, and which names are promised to users. The imports are read, not run."""

import ast
import importlib
import os
import shutil
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "torchrl_kl"
SCRIPTS = sorted(ROOT.glob("examples/*.py")) + sorted(ROOT.glob("benchmarks/*.py"))

# The promise to users: a name that is added, renamed or removed must be so here too.
PUBLIC = """
    KLConstrainedTransform KLRewardTransform KLKeys KLMonitor KLPenaltyLoss KLControlHook
    ReferenceModelLogProbTransform KLDivergenceTransform RewardAdjustmentTransform kl_collector
    KLController ConstantKLController TargetKLController AdaptiveKLController PIDKLController
    ExponentialKLController PlannedKLController coeff_for_budget KLStatistics
    FrozenActor TopKActor kl_k1 kl_k2 kl_k3 kl_exact kl_top_k
    masked_mean masked_sum rescore
    Enumeration ExactValues PolicyValues exact_kl
    GPT CausalLMActor CausalLMCritic CausalLMRewardModel
    sample_responses as_steps ResponseKLTransform
"""
PUBLIC_NAMES = {
    "torchrl_kl": set(PUBLIC.split()),
    "torchrl_kl.envs": {"DigitLanguage", "DigitLanguageEnv", "DigitLanguageGymEnv"},
}

# Private names of PyTorch, for which it has no public ones, and where they are used.
TORCH_NAMES = {
    ("_C", "gpt.py"),
    ("_functorch", "gpt.py"),
    ("_compiled_call_impl", "blocks.py"),
    ("_forward_hooks", "blocks.py"),
    ("_forward_pre_hooks", "blocks.py"),
}

# The rooms of torchrl_kl (files and folders), lowest first: what each imports of the others. All
# arrows point to an earlier line, and an arrow that no import uses any more must go.
_DATA = {"batches", "keys"}
ARROWS: dict[str, set[str]] = {
    "functional": set(),
    "exact": {"functional"},
    "controllers": {"functional"},
    "keys": set(),
    "batches": {"functional", "keys"},
    "_torchrl": {"functional"},
    "feeding": {"batches", "controllers"},
    "actors": {*_DATA, "_torchrl", "functional"},
    "transforms": {*_DATA, "_torchrl", "actors", "controllers", "feeding", "functional"},
    "language": {*_DATA, "actors", "controllers", "functional", "transforms"},
    "objectives": {*_DATA, "actors", "controllers", "feeding", "functional"},
    "monitor": {*_DATA, "actors", "controllers", "functional", "language"},
    "collectors": {"batches", "controllers", "transforms"},
    "trainers": {*_DATA, "transforms"},
}

# What a room may import of others' packages, in addition to the standard library.
TENSORDICT = {"torch", "tensordict", "torchrl"}
LIBRARIES = {
    **dict.fromkeys(ARROWS, TENSORDICT),
    **{room: {"torch"} for room in ("functional", "controllers", "exact")},
    "transforms": TENSORDICT | {"typing_extensions"},  # which torch needs
    "language": TENSORDICT | {"safetensors"},
    "collectors": TENSORDICT | {"cloudpickle"},
}


def read_imports(source: str) -> set[str]:
    """Dotted names of all that a source imports, inside functions too: `package.module.name`."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "import by full names"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def files_of(room: str) -> list[Path]:
    """The files of a room: one, or all of a folder."""
    path = PACKAGE / room
    return sorted(path.rglob("*.py")) if path.is_dir() else [PACKAGE / f"{room}.py"]


def imports_of(path: Path) -> tuple[set[str], set[str]]:
    """Names of torchrl_kl that a file imports, and packages of others but the standard library."""
    names = read_imports(path.read_text())
    own = {name.partition(".")[2] for name in names if name.split(".")[0] == "torchrl_kl"}
    others = {name.split(".")[0] for name in names} - {"torchrl_kl"} - sys.stdlib_module_names
    return own, others


class TestArrows:
    def test_the_reader_sees_every_kind_of_import(self):
        source = "import a.b, c as d\nfrom e.f import g as h\ndef later():\n    import m"
        assert read_imports(source) == {"a.b", "c", "e.f.g", "m"}
        with pytest.raises(AssertionError, match="by full names"):
            read_imports("from .i import j")

    def test_the_table_has_all_rooms_and_points_one_way(self):
        rooms = {path.stem for path in PACKAGE.glob("*.py")}
        rooms |= {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
        assert rooms - {"__init__", "envs"} == set(ARROWS), "give the room a line in ARROWS"
        order = list(ARROWS)
        for room, targets in ARROWS.items():
            assert targets <= {*order[: order.index(room)]}

    @pytest.mark.parametrize("room", ARROWS)
    def test_a_room_imports_what_the_table_says(self, room):
        imports = [imports_of(path) for path in files_of(room)]
        own = {name.split(".")[0] for names, _ in imports for name in names}
        others = {name for _, names in imports for name in names}
        assert own - {room} == ARROWS[room]
        assert others <= LIBRARIES[room]

    def test_no_circle_of_files(self):
        imports = {}
        for path in (path for room in ARROWS for path in files_of(room)):
            name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
            imports[name.removesuffix(".__init__")], _ = imports_of(path)

        def file_of(target: str) -> str:
            return max((name for name in imports if f"{target}.".startswith(f"{name}.")), key=len)

        arrows = {name: set(map(file_of, own)) for name, own in imports.items()}
        TopologicalSorter(arrows).prepare()  # raises CycleError

    @pytest.mark.parametrize(
        "path", sorted((ROOT / "envs").glob("*.py")), ids=lambda path: path.stem
    )
    def test_envs_and_transforms_meet_only_in_keys(self, path):
        own, others = imports_of(path)
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


class TestPrivateNames:
    def test_no_stack_frame_is_walked(self):
        words = ("_getframe", "currentframe", "inspect.stack")
        assert not [path for path in SOURCES if any(word in path.read_text() for word in words)]

    def test_those_of_others_are_in_one_place(self):
        """A private attribute of an object other than `self` is one that this package defines."""
        defined, used = {"_apply", "_buffers", "_exit", "_modules", "_replace"}, []
        for path in SOURCES:
            for node in ast.walk(ast.parse(path.read_text())):
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
        assert {each for each in foreign if each[1] != "_torchrl.py"} == TORCH_NAMES


@pytest.mark.parametrize("module", PUBLIC_NAMES)
def test_public_names_are_the_committed_list(module):
    names = importlib.import_module(module).__all__
    namespace: dict[str, object] = {}
    exec(f"from {module} import *", namespace)
    assert sorted(names) == sorted(PUBLIC_NAMES[module])
    assert namespace.keys() - {"__builtins__"} == PUBLIC_NAMES[module]


class TestEnvsFolder:
    def test_it_is_imported_by_its_full_name(self):
        import torchrl_kl.envs as envs

        assert Path(str(envs.__file__)).resolve() == ROOT / "envs" / "__init__.py"

    def test_the_short_name_is_refused(self):
        command = [sys.executable, "-c", "import envs"]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert result.returncode != 0
        assert result.stderr.splitlines()[-1] == (
            "ImportError: this package was imported as `envs`: import it as `torchrl_kl.envs`, "
            "never as `envs`."
        )

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
