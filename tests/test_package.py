"""The public names: all there, lazily imported."""

import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import prb_jax
from prb_jax import PrbWarning, RunError, cli
from prb_jax.platform.extras import EXTRAS, has_extra, need_extra

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("jax", "flax", "transformers", "torch", "numpy", "datasets", "rich", "tensorflow")


def modules_after(code: str) -> set[str]:
    """Top-level packages that a fresh interpreter has imported after ``code``."""
    code += "\nimport sys; print(' '.join({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, timeout=300
    )
    return set(done.stdout.splitlines()[-1].split())


def test_every_public_name_is_where_it_is_said_to_be():
    assert set(prb_jax._HOMES) | {"__version__"} == set(prb_jax.__all__)
    for name, home in prb_jax._HOMES.items():
        value = getattr(prb_jax, name)
        assert inspect.unwrap(value) is getattr(importlib.import_module(home), name)
        assert value.__doc__
        assert name in dir(prb_jax)


def test_the_classes_in_public_signatures_are_public():
    """Options, settings and results: what a caller must build, or gets, can be imported from `prb_jax`."""
    for name in prb_jax.__all__:
        value = getattr(prb_jax, name)
        if inspect.isfunction(value):
            public = "command" not in inspect.signature(value).parameters
            assert public, f"{name}: the command line is no business of a caller"
            text = " ".join(map(str, inspect.get_annotations(value).values()))
            for word in re.findall(r"\b[A-Z]\w*(?:Options|Settings|Result|Run|Store|Model)\b", text):
                assert word in prb_jax.__all__, f"{name}: {word}"


def test_a_baseline_gives_the_reward_of_a_text():
    length = prb_jax.load("baseline:length")
    assert length.reward("Tea?", "Yes, with milk.") > length.reward("Tea?", "No.")
    by_name = prb_jax.load("baseline:profile-overlap").reward(
        "?", "green tea", profile=[{"text": "I like green tea."}]
    )
    assert by_name > 0
    assert len(repr(length)) < 200


def test_completion_offers_public_names_alone():
    assert dir(prb_jax) == sorted(prb_jax.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Comparision'"):
        _ = prb_jax.Comparision


def test_the_version_is_that_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == prb_jax.__version__
    assert f"\nversion: {prb_jax.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {prb_jax.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_that_is_missing_is_named(extra, monkeypatch):
    """The packages of `pyproject.toml` are those that the code asks for, and none of them is in the core."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = [re.match(r"[\w-]+", text)[0] for text in project["optional-dependencies"][extra]]
    assert [package.replace("-", "_") for package in packages] == list(EXTRAS[extra])
    assert not {re.match(r"[\w-]+", text)[0] for text in project["dependencies"]} & set(packages)
    for module in EXTRAS[extra]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        RunError, match=rf"the page: needs {EXTRAS[extra][0]}.*pip install 'prb-jax\[{extra}\]'"
    ):
        need_extra(extra, "the page")
    with pytest.warns(PrbWarning, match="left out: the page: needs"):
        assert not has_extra(extra, "the page")


def test_the_parser_of_all_verbs_needs_no_extra():
    loaded = modules_after("from prb_jax import cli; cli.parser()")
    assert not loaded & {module for modules in EXTRAS.values() for module in modules}


def test_a_server_without_its_extra_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    for verb, words in {"serve": ["baseline:length"], "audit": ["folder", "--data", "personas"]}.items():
        assert cli.main([verb, *words]) == 2
        expected = (
            f"prb: error: prb {verb}: needs uvicorn, which is not installed: pip install 'prb-jax[serve]'"
        )
        assert expected in capsys.readouterr().err


def test_import_is_light():
    assert not modules_after("import prb_jax") & set(HEAVY)


def test_records_and_baselines_start_no_jax():
    loaded = modules_after(
        "import prb_jax as prb\n"
        "c = prb.Comparison(id=1, question='?', chosen='a', rejected='b')\n"
        "from prb_jax.scoring.baselines import score_baseline\n"
        "score_baseline('baseline:length', [c])"
    )
    assert not loaded & {"jax", "flax", "transformers", "torch"}


def test_torch_is_only_what_the_bench_compares_with():
    for path in (ROOT / "prb_jax").rglob("*.py"):
        if path.is_relative_to(ROOT / "prb_jax" / "measure" / "bench"):
            continue
        for line in path.read_text(encoding="utf-8").splitlines():
            assert not line.strip().startswith(("import torch", "from torch")), path


def test_shells_complete_verbs_and_flags(tmp_path):
    """The script is bash's own, and completes as a user sees it: `prb ev<TAB>`, `prb evaluate --prof<TAB>`."""
    command = [sys.executable, "-m", "prb_jax", "completion"]
    for shell in ("zsh", "fish", "tcsh"):
        done = subprocess.run([*command, shell], capture_output=True, text=True, check=True, timeout=300)
        assert "rank-profiles" in done.stdout
    script = tmp_path / "prb.bash"
    with open(script, "w") as file:
        subprocess.run([*command, "bash"], stdout=file, check=True, timeout=300)
    ask = (
        f"source {script}; COMP_WORDS=(prb $1 $2); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 )); "
        "_shtab_prb; echo ${COMPREPLY[@]}"
    )
    for words, expected in ((["ev"], "evaluate"), (["evaluate", "--prof"], "--profile-posts")):
        done = subprocess.run(
            ["bash", "-c", ask, "bash", *words], capture_output=True, text=True, check=True, timeout=300
        )
        assert done.stdout.split() == [expected]
    refused = subprocess.run([*command, "sh"], capture_output=True, text=True, timeout=300)
    assert (refused.returncode, "choose from" in refused.stderr) == (2, True)


def test_transformers_is_not_heard_about_torch() -> None:
    """It says at its import that models need PyTorch; here they do not."""
    code = (
        "import logging, sys; sys.modules['torch'] = None; import prb_jax; import transformers; "
        "logging.getLogger('transformers').warning('something else')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "PyTorch" not in done.stderr + done.stdout
    assert "something else" in done.stderr
