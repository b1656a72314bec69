"""What is installed: metadata, versions and files that the installation needs."""

import configparser
import re
from pathlib import Path

import torchrl_kl

ROOT = Path(__file__).parents[1]
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")


def lines(section: str, option: str) -> list[str]:
    return SETUP[section][option].split("\n")[1:]


class TestVersion:
    def test_it_is_the_same_everywhere(self):
        citation = (ROOT / "CITATION.cff").read_text()
        assert re.findall(r"^version: (.*)$", citation, re.M) == [torchrl_kl.__version__]
        assert SETUP["metadata"]["version"] == "attr: torchrl_kl.__version__"
        assert f"\n## {torchrl_kl.__version__}" in (ROOT / "CHANGELOG.md").read_text()


class TestPackages:
    def test_every_folder_of_the_package_is_listed(self):
        package = ROOT / "torchrl_kl"
        folders = {path.parent for path in package.rglob("*.py") if "envs" not in path.parts[-2:]}
        names = {".".join(path.relative_to(ROOT).parts) for path in folders}
        assert names | {"torchrl_kl.envs"} == set(lines("options", "packages"))

    def test_an_editable_installation_is_a_path(self):
        """Type checkers do not run import hooks."""
        assert SETUP["editable_wheel"]["mode"] == "compat"

    def test_classifiers_name_the_tested_versions(self):
        named = re.findall(r"Python :: (3\.\d+)", SETUP["metadata"]["classifiers"])
        workflow = (ROOT / ".github" / "workflows" / "checks.yml").read_text()
        tested = re.search(r"python: \[(.*)\]", workflow)
        assert tested is not None
        assert named == re.findall(r'"(.*?)"', tested[1])
        assert SETUP["options"]["python_requires"] == f">={named[0]}"

    def test_the_sdist_carries_what_its_tests_read(self):
        manifest = (ROOT / "MANIFEST.in").read_text()
        for folder in ("benchmarks", "docs", "examples", "tests", "envs"):
            assert f"graft {folder}\n" in manifest
