"""The example of a plug-in is installed as a user's would be, and each kind is used by its verb."""

import json
import subprocess
import sys
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

import prb_jax as prb
from prb_jax import cli, plugins
from prb_jax.building.settings import GATES
from prb_jax.models.checkpoints.hf_map import file_tensors, flatten
from prb_jax.models.checkpoints.load import load_params
from prb_jax.models.checkpoints.save import save_params
from prb_jax.models.config.decoder import load_config, parse_config
from prb_jax.models.config.families import FAMILIES
from prb_jax.personal.few_shot.registry import choose_methods, method_named, read_settings
from tests.behaviour.judges.stand_in import stand_in
from tests.building.engine import engine
from tests.building.test_build import config, write_records
from tests.packed import packed_batch, read_trees
from tests.parity.oracle import transformers_gradients, transformers_scores
from tests.parity.test_families import random_tree
from tests.personal.few_shot.planted import world
from tests.tiny_models import TINY_FAMILIES, randomise, tiny_config
from tests.tiny_policies import write_policy
from tests.tiny_tokenizer import write_tokenizer

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "plugin"
PAIRS = [
    {"query": "Tea?", "polite": "Yes, with pleasure.", "rude": "No."},
    {"query": "Cake?", "polite": "Please.", "rude": "Go away, you."},
    {"query": "Milk?", "polite": "Do.", "rude": "Go."},
]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder into which pip installs the example, from its source alone."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for path in EXAMPLE.rglob("*.*"):  # building leaves files beside the source
        if path.suffix in (".py", ".toml"):
            copy = source / path.relative_to(EXAMPLE)
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(path.read_bytes())
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    subprocess.run([*command, "--target", str(target), str(source)], check=True, timeout=120)
    return target


@pytest.fixture
def plugged(installed, monkeypatch):
    monkeypatch.syspath_prepend(str(installed))


def run_json(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_text())


def test_a_benchmark_and_a_reward(plugged, tmp_path, capsys):
    data = tmp_path / "data"
    data.mkdir()
    (data / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    words = ["evaluate", "plugin:brevity", "--data", f"politeness:{data}", "--out", str(tmp_path / "run")]
    assert cli.main(words) == 0, capsys.readouterr().err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["benchmarks"]["politeness"]["score"] == pytest.approx((0 + 1 + 0.5) / 3)
    text = json.dumps(run_json(tmp_path / "run"))
    assert text.count("prb-example 0.1") == 2  # of the data, and of the reward
    assert cli.main(words) == 0  # the same run again


def test_a_read_out(plugged, tmp_path):
    folder = tmp_path / "model"
    write_policy(folder, "qwen3")
    pairs = [prb.Comparison(id="1", question="Tea?", responses=["Yes, do.", "No."])]
    plugin, known = (prb.load(folder, readout=name) for name in ("last-logit", "vocabulary:7"))
    np.testing.assert_array_equal(plugin.score(pairs)[0], known.score(pairs)[0])
    assert plugin.identity()["plugins"] == {"readout": "prb-example 0.1"}
    assert "plugins" not in known.identity()
    with pytest.raises(prb.CheckpointError, match=r"unknown readout 'other'.* last-logit"):
        prb.load(folder, readout="other")


def write_arcee(folder: Path) -> Path:
    import transformers

    config = transformers.ArceeConfig(
        vocab_size=400, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_labels=1, pad_token_id=0, mlp_bias=True, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.ArceeForSequenceClassification(config)
    randomise(model, seed=0, unit_embedding=True)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def test_a_backbone(plugged, tmp_path):
    """Scores and all gradients are those of transformers; adapters, eight bits and export follow from the file."""
    folder = write_arcee(tmp_path / "model")
    config, tree = load_config(folder), random_tree(70, [17, 30], seed=1)
    params, factors = load_params(folder, config).params, np.asarray([1.0, -0.5], np.float32)
    assert config.hidden_activation == "relu2"
    assert "gate" not in params["layers"]
    run = partial(
        read_trees, batch=packed_batch([tree]), config=config, dtype=np.dtype("float32"), differentiated=True
    )

    @jax.jit
    def both(params):
        return jax.value_and_grad(lambda params: (run(params)[0, :, 0] * factors).sum())(params)

    sequences = [tree.sequence(k) for k in range(2)]
    total, gradients = both(params)
    expected = (transformers_scores(folder, sequences)[:, 0] * factors).sum()
    np.testing.assert_allclose(total, expected, atol=1e-5)
    ours = dict(file_tensors(flatten(jax.device_get(gradients)), config))
    theirs = transformers_gradients(folder, sequences, factors)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert np.linalg.norm(ours[name] - gradient) < 1e-5 * np.linalg.norm(gradient), name
    model = prb.load(folder, quantize="int8-weights")
    assert model.identity()["plugins"] == {"backbone": "prb-example 0.1"}
    pairs = [prb.Comparison(id="1", question="Tea?", responses=["Yes, do.", "No."])]
    np.testing.assert_allclose(model.score(pairs)[0], prb.load(folder).score(pairs)[0], atol=0.2)
    written = save_params(params, config, tmp_path / "written")
    np.testing.assert_allclose(
        transformers_scores(written, sequences), transformers_scores(folder, sequences), atol=0
    )
    raw = json.loads((folder / "config.json").read_text())
    with pytest.raises(prb.CheckpointError, match="'hidden_act': expected relu2, found 'silu'"):
        parse_config(raw | {"hidden_act": "silu"}, where="c")


def test_a_backbone_of_an_imported_file(tmp_path, capsys):
    folder, mine = write_arcee(tmp_path / "model"), tmp_path / "mine.py"
    assert cli.main(["inspect", str(folder)]) == 2
    assert "unknown architecture: model_type 'arcee'" in capsys.readouterr().err
    text = (EXAMPLE / "prb_example" / "arcee.py").read_text()
    mine.write_text(f"{text}\nimport prb_jax as prb\nprb.register_plugin('backbones', 'arcee', ARCEE)\n")
    try:
        assert cli.main(["inspect", str(folder), "--import", str(mine)]) == 0, capsys.readouterr().err
        assert "relu2" in capsys.readouterr().out
    finally:
        plugins._registered.pop(("backbones", "arcee"), None)


def test_fields_of_a_backbone_have_the_type_of_their_default():
    registered = replace(FAMILIES["llama"], fields={"sharpness": 1.5, "kind": "a"})
    prb.register_plugin("backbones", "own", registered)
    raw = json.loads(tiny_config(TINY_FAMILIES["llama"]).to_json_string(use_diff=False))
    raw |= {"model_type": "own", "architectures": None, "kind": "b"}
    try:
        assert parse_config(raw, where="c").fields == (("sharpness", 1.5), ("kind", "b"))
        assert parse_config(raw | {"sharpness": 2}, where="c").fields[0] == ("sharpness", 2.0)
        with pytest.raises(
            prb.CheckpointError, match=r"'sharpness': expected a value like 1\.5, found 'high'"
        ):
            parse_config(raw | {"sharpness": "high"}, where="c")
    finally:
        plugins._registered.pop(("backbones", "own"), None)


def test_a_gate(plugged, tmp_path):
    reply = engine()
    data = write_records(tmp_path, 8)
    with stand_in(lambda body, _: reply(body), whole=True) as server:
        made = config(server, data, gates={"plugins": ("shouting",)}, relax=GATES)
        summary = prb.build(made, out=tmp_path / "out", progress=False).summary
    (gate,) = [gate for gate in summary["gates"] if gate["gate"] == "shouting"]
    assert gate["verdict"] == "passed"
    assert gate["definition"].endswith(
        "prb-example 0.1 finds a fault: An answer ends with two exclamation marks."
    )
    assert run_json(tmp_path / "out")["inputs"]["plugins"] == {"shouting": "prb-example 0.1"}
    with pytest.raises(prb.RunError, match="a second gate 'length'"):
        prb.build(made | {"gates": {"plugins": ("length",)}}, out=tmp_path / "other", progress=False)
    with pytest.raises(
        prb.RunError, match=r"no plug-in 'quiet' among the entry points prb_jax.gates: .*: shouting"
    ):
        prb.build(made | {"gates": {"plugins": ("quiet",)}}, out=tmp_path / "other", progress=False)


def test_a_method_of_personalisation(plugged, capsys):
    assert cli.main(["methods"]) == 0
    assert "mean_choice" in capsys.readouterr().out
    assert [method.name for method in choose_methods("mean_choice").methods] == [
        "pooled",
        "offset",
        "mean_choice",
    ]
    rng = np.random.default_rng(1)
    features = rng.normal(size=(300, 6)).astype(np.float32)
    people = world(features, (rng.normal(size=(100, 6)) * 2) @ features.T)
    method = method_named("mean_choice")
    settings = read_settings(["mean_choice.shrink=2.0"])["mean_choice"]
    fitted = method.fit(people.seen, people.validation, settings=settings, key=jax.random.key(0))
    nobody, sixteen = (people.share(method, fitted, shots, width=16) for shots in (0, 16))
    assert nobody < 0.75 < 0.85 < sixteen


def test_a_python_file_gives_data_and_a_reward(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "def pairs():\n"
        "    for k in range(3):\n"
        "        yield {'id': k, 'question': 'Tea?', 'chosen': 'Yes' + '!' * k, 'rejected': 'No'}\n"
        "def calm(comparison):\n    return [-text.count('!') for text in comparison.responses]\n"
        "broken = 7\n"
    )
    assert cli.main(["evaluate", "mine.py:calm", "--data", "mine.py:pairs", "--out", "run"]) == 0
    rows = [json.loads(line) for line in Path("run/scores.jsonl").read_text().splitlines()]
    assert [row["scores"] for row in rows] == [[0, 0], [-1, 0], [-2, 0]]
    Path("mine.py").write_text(Path("mine.py").read_text().replace("Tea", "Coffee"))
    assert cli.main(["evaluate", "mine.py:calm", "--data", "mine.py:pairs", "--out", "run"]) == 2
    capsys.readouterr()
    for words, message in {
        ("baseline:length", "mine.py:tea"): "mine.py: expected 'tea' in it, found none",
        ("baseline:length", "none.py:tea"): "none.py: no such file; expected a Python file",
        ("baseline:length", "mine.py:broken"): "data: expected comparisons, or a table of records, found int",
        (
            "mine.py:broken",
            "mine.py:pairs",
        ): "mine.py: expected a function broken of a comparison, found 7",
        ("plugin:none", "mine.py:pairs"): "no plug-in 'none' among the entry points prb_jax.rewards",
    }.items():
        assert cli.main(["evaluate", words[0], "--data", words[1], "--out", "other"]) == 2
        assert message in capsys.readouterr().err


def test_a_module_registers_plug_ins(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plugins, "_registered", {})
    Path("calm_plugin.py").write_text(
        "import prb_jax as prb\n"
        "prb.register_plugin('rewards', 'calm', lambda c: [-text.count('!') for text in c.responses])\n"
    )
    Path("pairs.jsonl").write_text('{"id": 1, "question": "Tea?", "chosen": "Yes", "rejected": "No!"}\n')
    words = ["evaluate", "plugin:calm", "--data", "pairs.jsonl", "--out", "run"]
    assert cli.main(words) == 2
    assert cli.main([*words, "--import", "calm_plugin"]) == 0
    assert json.loads(Path("run/scores.jsonl").read_text())["scores"] == [0, -1]
    capsys.readouterr()
    Path("bad.py").write_text("import prb_jax as prb\nprb.register_plugin('models', 'x', 1)\n")
    for module, message in {
        "bad.py": "plug-in 'x': no kind 'models'; expected one of backbones, benchmarks",
        "no_such_module": "--import no_such_module: ModuleNotFoundError",
    }.items():
        assert cli.main([*words, "--import", module]) == 2
        assert message in capsys.readouterr().err
    prb.register_plugin("benchmarks", "odd", 7)
    assert cli.main(["evaluate", "baseline:length", "--data", "odd:pairs.jsonl", "--out", "other"]) == 2
    assert "benchmarks 'odd': expected a Benchmark, found int" in capsys.readouterr().err


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """A package whose plug-ins fail in every way: on import, by their types, and when they are called."""
    site = tmp_path / "site"
    facts = site / "broken_package-0.2.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-package\nVersion: 0.2\n")
    (facts / "entry_points.txt").write_text(
        "[prb_jax.readouts]\nraises = broken_import:ROW\nleaves = broken_exit:ROW\nnumber = broken_values:NUMBER\n"
        "untyped = broken_row:ROW\nhead = broken_values:HEAD\nnone = broken_values:NONE\n"
        "[prb_jax.benchmarks]\nodd = broken_import:BENCHMARK\n"
        "[prb_jax.few_shot]\nodd_method = broken_import:METHOD\n"
        "[prb_jax.rewards]\nzero = broken_values:reward\nends = broken_values:ends\n"
    )
    (site / "broken_import.py").write_text("import no_such_dependency\n")
    (site / "broken_exit.py").write_text("import sys\nsys.exit(0)\n")
    (site / "broken_row.py").write_text(
        "from prb_jax.models.head import LINEAR\nfrom prb_jax.models.readouts.registry import ModelRow\n"
        "ROW = ModelRow(name='untyped', models=None, head=LINEAR)\n"
    )
    (site / "broken_values.py").write_text(
        "from prb_jax.models.readouts.registry import ModelRow\nNUMBER = 7\n"
        "class Head:\n    def bound(self, *_, **__):\n        return 1 / 0\n"
        "HEAD = ModelRow(name='head', models=(), head=Head(), by_name=True)\n"
        "def reward(comparison):\n    return 1 / 0\n"
        "def ends(comparison):\n    raise SystemExit(0)\n"
    )
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(plugins, "_broken", set())


def test_a_broken_read_out_stops_no_other_model(broken, tmp_path):
    folder = tmp_path / "model"
    write_policy(folder, "qwen3")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        prb.load(folder, readout="vocabulary:7")
        prb.load(folder, readout="vocabulary:7")
    texts = sorted(str(one.message) for one in told if "broken-package" in str(one.message))
    names = ["leaves", "none", "number", "raises", "untyped"]
    assert [
        text.partition("prb_jax.readouts: ")[2].split()[0] for text in texts if "entry point" in text
    ] == [name for name in names if name != "number"]
    assert len(texts) == 5  # each once
    assert all(text.startswith("left out: broken-package 0.2: ") for text in texts)
    for name, message in {
        "raises": "fails: ModuleNotFoundError: No module named 'no_such_dependency'",
        "leaves": "fails: SystemExit: 0",
        "number": "readouts 'number': expected a ModelRow, found int",
        "untyped": "fails: RunError: read-out 'untyped': models: expected a tuple of texts, found None",
        "none": "fails: AttributeError: .* has no attribute 'NONE'",
        "head": "fails: ZeroDivisionError: division by zero",
    }.items():
        with pytest.raises(prb.RunError, match=f"broken-package 0.2: .*{message}"):
            prb.load(folder, readout=name)


def test_other_broken_plug_ins_are_left_out_and_named(broken, tmp_path):
    from prb_jax.records import benchmarks

    with pytest.warns(prb.PrbWarning, match="left out: broken-package 0.2: .*prb_jax.benchmarks: odd"):
        assert benchmarks.of_repository("nobody/nothing") is None
    with pytest.raises(prb.RunError, match=r"broken-package 0.2: .*no_such_dependency"):
        benchmarks.get_benchmark("odd")
    with pytest.warns(prb.PrbWarning, match="left out: broken-package 0.2: .*prb_jax.few_shot: odd_method"):
        assert "odd_method" not in [method.name for method in choose_methods("all").methods]
    with pytest.raises(prb.RunError, match=r"broken-package 0.2: .*no_such_dependency"):
        choose_methods("odd_method")
    pair = {"id": "1", "question": "q", "chosen": "a", "rejected": "b"}
    with pytest.raises(prb.RunError, match=r"broken-package 0.2: fails: ZeroDivisionError: division by zero"):
        prb.evaluate("plugin:zero", [pair], progress=False)
    with pytest.raises(prb.RunError, match=r"broken-package 0.2: fails: SystemExit: 0"):
        prb.evaluate("plugin:ends", [pair], progress=False)
    file = tmp_path / "leaves.py"
    file.write_text("import sys\nsys.exit(0)\n")
    for module in (str(file), "broken_exit"):  # the command would end with status 0
        with pytest.raises(prb.RunError, match=r"(leaves.py: the file|--import broken_exit).*SystemExit: 0"):
            plugins.import_plugins([module])
