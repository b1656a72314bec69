"""What may import what, and which names are promised to users. The imports are read, not run."""

import ast
import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributions import Categorical
from torchrl.envs import EnvBase, Transform

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "torchrl_kl"
SCRIPTS = sorted(ROOT.glob("examples/*.py")) + sorted(ROOT.glob("benchmarks/*.py"))

# The promise to users: a name that is added, renamed or removed must be so here too.
PUBLIC = {
    "torchrl_kl": """
        KLConstrainedTransform KLRewardTransform KLKeys KLMonitor KLPenaltyLoss KLControlHook
        ReferenceModelLogProbTransform KLDivergenceTransform RewardAdjustmentTransform kl_collector
        KLController ConstantKLController TargetKLController AdaptiveKLController PIDKLController
        ExponentialKLController PlannedKLController coeff_for_budget KLStatistics
        FrozenActor TopKActor rescore plot_frontier
    """,
    "torchrl_kl.functional": "kl_k1 kl_k2 kl_k3 kl_exact kl_top_k masked_mean masked_sum",
    "torchrl_kl.exact": "Enumeration ExactValues PolicyValues enumerate_kl",
    "torchrl_kl.language": """
        GPT CausalLMActor CausalLMCritic CausalLMRewardModel
        sample_responses minibatches as_steps ResponseKLTransform
    """,
    "torchrl_kl.envs": "DigitLanguage DigitLanguageEnv DigitLanguageGymEnv",
}
PUBLIC_NAMES = {module: set(names.split()) for module, names in PUBLIC.items()}

# Private names of PyTorch, and one of transformers, for which there are no public ones, and where
# they are used; those of TorchRL are in `_torchrl.py`, except for the entries that envs exchange.
PRIVATE_NAMES = {
    "_C": {"gpt.py"},
    "_functorch": {"gpt.py"},
    "_has_any_global_hook": {"blocks.py"},
    "_python_dispatch": {"cache.py"},
    "_orig_mod": {"parallel.py"},  # of torch.compile
    "_compiled_call_impl": {"blocks.py"},
    "_forward_hooks": {"blocks.py", "cache.py"},
    "_forward_pre_hooks": {"blocks.py", "cache.py"},
    "_modules": {"blocks.py", "cache.py"},
    "_parameters": {"cache.py"},
    "_buffers": {"cache.py", "moving.py", "numbers.py"},
    "_version": {"cache.py"},
    "_param": {"densities.py", "distributions.py"},
    "_event_shape": {"distributions.py"},
    "_unbroadcasted_": {"distributions.py"},  # a prefix
    "_capacitance_tril": {"distributions.py"},
    "_reset": {"base.py", "scorer.py"},
    "_step": {"batches.py", "digit_language_env.py"},
}

# The rooms of torchrl_kl (files and folders), lowest first: what each imports of the others. All
# arrows point to an earlier line, and an arrow that no import uses any more must go.
_DATA = {"batches", "keys"}
ARROWS: dict[str, set[str]] = {
    "functional": set(),
    "exact": {"functional"},
    "controllers": {"functional"},
    "keys": set(),
    "batches": {"keys"},
    "_torchrl": {"functional"},
    "trajectories": {"batches", "functional"},
    "feeding": {*_DATA, "controllers", "functional", "trajectories"},
    "actors": {*_DATA, "functional"},
    "transforms": {*_DATA, "_torchrl", "actors", "controllers", "feeding", "functional"},
    "language": {*_DATA, "actors", "controllers", "functional", "transforms"},
    "objectives": {*_DATA, "actors", "controllers", "feeding", "functional"},
    "monitor": {*_DATA, "actors", "controllers", "feeding", "functional"},
    "collectors": {"batches", "controllers", "transforms"},
    "trainers": {*_DATA, "transforms"},
    "plots": {"exact"},  # its types only
}

# What a room may import of others' packages, in addition to the standard library.
TENSORDICT = {"torch", "tensordict", "torchrl"}
LIBRARIES = {
    **dict.fromkeys(ARROWS, TENSORDICT),
    **{room: {"torch"} for room in ("functional", "controllers", "exact")},
    "transforms": TENSORDICT | {"typing_extensions"},  # which torch needs
    "language": TENSORDICT | {"safetensors"},
    "collectors": TENSORDICT | {"cloudpickle"},
    "plots": {"torch", "matplotlib"},  # which is imported when it is called
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

    def test_the_front_door_opens_the_rooms_of_its_names_only(self):
        own, others = imports_of(PACKAGE / "__init__.py")
        assert {name.split(".")[-1] for name in own} == {*PUBLIC_NAMES["torchrl_kl"], "language"}
        own = {name for name in own if "." in name}
        assert {name.split(".")[0] for name in own} <= set(ARROWS) - {"language", "exact"}
        assert others == set()

    @pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
    def test_examples_and_benchmarks_use_public_names_only(self, path):
        own, others = imports_of(path)
        public = {f"{module}.{name}" for module in PUBLIC_NAMES for name in PUBLIC_NAMES[module]}
        # What another script imports, such as its report, may need nothing of the package.
        assert own or any(path.stem in imports_of(script)[1] for script in SCRIPTS)
        assert {f"torchrl_kl.{name}" for name in own} <= public
        foreign = {script.stem for script in SCRIPTS if script.parent != path.parent}
        assert not others & {"envs", "tests", "examples", "benchmarks", *foreign}


SOURCES = sorted(
    {*(path for room in ARROWS for path in files_of(room)), *(ROOT / "envs").glob("*.py")}
)


# What objects of these libraries have: theirs, also where a class of this package sets it.
THEIRS = {
    name
    for each in (nn.Module(), Categorical(torch.ones(2)), torch.ones(2), Transform, EnvBase)
    for name in dir(each)
}
_PRIVATE = re.compile(r"_[a-zA-Z]\w*")
# Documented, of named tuples and `os`; and how TorchRL's keys of log-probs end.
_PUBLIC_IN_EFFECT = {"_replace", "_exit", "_log_prob"}


def defined_in(source: str) -> set[str]:
    """The names of functions and classes, and of variables and attributes that are set."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return names


def private_names_of(source: str) -> set[str]:
    """Private names in a source that are not its own: attributes, imports and strings."""
    names: set[str] = set()
    defined = defined_in(source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            paths = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            if paths[0].partition(".")[0] != "torchrl_kl":
                names.update(*(path.split(".") for path in paths))
        elif isinstance(node, ast.Attribute):
            holder = ast.unparse(node.value)
            # A method that replaces another one may call it.
            if holder != "super()" and not (holder == "self" and node.attr in defined):
                names.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value.partition(".")[0])
    own = (defined - THEIRS) | _PUBLIC_IN_EFFECT
    return {name for name in names - own if _PRIVATE.fullmatch(name)}


class TestPrivateNames:
    def test_no_stack_frame_is_walked(self):
        words = ("_getframe", "currentframe", "inspect.stack")
        assert not [path for path in SOURCES if any(word in path.read_text() for word in words)]

    def test_the_reader_sees_every_kind_of_use(self):
        source = """
            from a._b import _c, d
            import _e
            from torchrl_kl.x import _own
            from __future__ import annotations
            x = y._f + self._g + getattr(y, "_h.i") + vars(y)["_j"] + y.__k__ + super()._apply(1)
            self._own = y._own
            def _mine(): return x._mine + "_" + "__l" + "no _name" + y._param
            class A:
                def _apply(self): self._param = 1
        """
        expected = {"_b", "_c", "_e", "_f", "_g", "_h", "_j", "_param"}
        assert private_names_of(inspect.cleandoc(source)) == expected

    def test_those_of_others_are_in_the_table(self):
        found: dict[str, set[str]] = {}
        for path in SOURCES:
            for name in private_names_of(path.read_text()) if path.name != "_torchrl.py" else ():
                found.setdefault(name, set()).add(path.name)
        own = {name for path in SOURCES for name in defined_in(path.read_text())} - THEIRS
        assert {name: at for name, at in found.items() if name not in own} == PRIVATE_NAMES


def test_a_public_name_is_in_one_module_and_has_no_twin():
    names = [name for module in PUBLIC_NAMES for name in PUBLIC_NAMES[module]]
    words = ["_".join(sorted(name.split("_"))) for name in names]  # kl_exact, exact_kl
    assert len(set(words)) == len(names)
    assert len(PUBLIC_NAMES["torchrl_kl"]) <= 30


# What only a language model has, or is called.
_OF_LANGUAGE = re.compile(
    r"language|llm|gpt|causal_?lm|hugging|token|vocab|prompt|(?<![a-z])texts|responses(?![a-z])"
    r"|eos_|decoder|logits_to_keep|past_key|untruncated|kept_|top_p|min_p",
    re.IGNORECASE,
)
# What is imported by `language`, and all above; not `exact`, which enumerates the texts of a model.
_WITHOUT_LANGUAGE = [room for room in ARROWS if room not in ("language", "exact")]


def names_of_language(source: str) -> set[str]:
    """Names and strings of a source, without its docstrings, that are about language models."""
    found, docstrings = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            docstrings.add(ast.get_docstring(node, clean=False))
        for name in ("id", "attr", "arg", "name", "value"):
            value = getattr(node, name, None)
            if isinstance(value, str) and _OF_LANGUAGE.search(value):
                found.add(value)
    return found - docstrings


class TestNoRoomBelowKnowsLanguageModels:
    def test_the_reader_sees_every_kind_of_use(self):
        source = """
            '''CausalLMActor'''
            from torchrl_kl.language import x
            def prompts(vocab_size, a=1): return getattr(a, "untruncated") or a.kept_key
            class GPTActor: llm = f(min_p="no tokens") + context + text + response + kept
        """
        expected = {"prompts", "vocab_size", "untruncated", "kept_key", "GPTActor", "llm", "min_p"}
        assert names_of_language(inspect.cleandoc(source)) == expected | {"no tokens"}

    @pytest.mark.parametrize("room", _WITHOUT_LANGUAGE)
    def test_no_name_or_string_but_one(self, room):
        found = set().union(*(names_of_language(path.read_text()) for path in files_of(room)))
        # The monitor says what whole responses are to be made of.
        messages = {name for name in found if "as_steps(" in name} if room == "monitor" else set()
        assert found - messages == ({"tokens"} if room == "monitor" else set())


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
