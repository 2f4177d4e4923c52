"""Configs: files, overrides, types, and errors that name the key."""

import re
import warnings
from pathlib import Path

import pytest

from prb_jax.behaviour.rl.settings import PpoSettings
from prb_jax.building.settings import BuildSettings
from prb_jax.errors import DataError, RunError
from prb_jax.records.config_files import explained_settings, read_config
from prb_jax.records.options import flat_settings, options_of
from prb_jax.training.config import (
    LossSettings,
    OptimizerSettings,
    TrainSettings,
    default_config,
    load_settings,
)
from prb_jax.training.train import tell_unused

GIVEN = ["model=m", "data=d"]


def test_overrides_are_read_in_the_type_of_their_key():
    settings = load_settings(
        default_config(),
        [*GIVEN, "steps=7", "optimizer.learning_rate=3e-4", "log.tensorboard=false", "mesh=fsdp=4,tensor=2",
         "lora.targets=q,v", "optimizer.clip_norm=none", "max-length=64", "steps=8"],
    )  # fmt: skip
    assert (settings.model, settings.data, settings.steps, settings.max_length) == ("m", "d", 8, 64)
    assert settings.optimizer.learning_rate == 3e-4
    assert settings.optimizer.clip_norm is None
    assert settings.log.tensorboard is False
    assert settings.mesh == "fsdp=4,tensor=2"
    assert settings.lora.targets == ("q", "v")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "optimizer.learning_rat=1",
            "unknown config key 'optimizer.learning_rat'.*'optimizer.learning_rate'",
        ),
        ("learning_rate=1", "unknown config key 'learning_rate'.*'optimizer.learning_rate'"),
        ("optimizer.lr=1", "unknown config key 'optimizer.lr'.*did you mean 'optimizer.learning_rate'"),
        ("tunning=lora", "unknown config key 'tunning'.*'tuning'"),
        ("steps=1.5", "'steps'.*a whole number.*'1.5'"),
        ("steps=0", "steps: .*at least 1.*0"),
        ("optimizer=adam", "'optimizer' is a section"),
        ("tuning=all", "'tuning'.*head or lora or full.*'all'"),
        ("init_head=maybe", "'init_head'.*true or false"),
        ("optimizer.learning_rate=nan", "'optimizer.learning_rate'.*a number"),
        ("validation.fraction=1", "validation.fraction: .*less than 1"),
        ("steps", "expected key=value"),
        ("model=none", "'model'.*found none"),
        ("data=", "'data'.*add data=PATH"),
    ],
)
def test_what_cannot_be_is_an_error_that_names_the_key(override, message):
    with pytest.raises((RunError, DataError), match=message):
        load_settings(default_config(), [*GIVEN, override])


@pytest.mark.parametrize(
    ("section", "option", "value", "message"),
    [
        (OptimizerSettings, "learning_rate", 0.0, "learning_rate: expected more than 0, or None, found 0.0"),
        (OptimizerSettings, "schedule", "step", "one of constant, linear, cosine, wsd, found 'step'"),
        (OptimizerSettings, "warmup_share", 1.1, "optimizer.warmup_share: expected 0 to 1, found 1.1"),
        (OptimizerSettings, "clip_norm", 0.0, "clip_norm: expected more than 0, or None, found 0.0"),
        (OptimizerSettings, "b2", 1.0, "optimizer.b2: expected at least 0 and less than 1, found 1.0"),
        (OptimizerSettings, "decay_share", 1.5, "optimizer.decay_share: expected 0 to 1, found 1.5"),
        (LossSettings, "kind", "hinge", "loss.kind: expected one of bradley_terry, plackett_luce, found"),
        (LossSettings, "label_smoothing", 0.5, "loss.label_smoothing: expected at least 0 and less than 0.5"),
        (LossSettings, "center_rewards_coefficient", -1.0, "expected at least 0, or None, found -1.0"),
    ],
)
def test_a_section_refuses_what_is_out_of_its_range(section, option, value, message):
    with pytest.raises(DataError, match=re.escape(message)):
        section(**{option: value})


def test_a_config_refuses_unknown_keys_and_other_types():
    config = default_config()
    with pytest.raises(AttributeError):
        config.stepz = 3
    with pytest.raises(TypeError):
        config.steps = "many"
    config.optimizer.learning_rate = 1e-3  # a number may take the place of none
    config.data = "x.jsonl"
    config.model = "m"
    assert load_settings(config).optimizer.learning_rate == 1e-3


def test_mappings_and_settings_are_configs_too():
    settings = load_settings(
        {"model": "m", "data": "d", "optimizer": {"b2": 0.99}, "loss.label_smoothing": 0.1}
    )
    assert settings.optimizer.b2 == 0.99
    assert settings.loss.label_smoothing == 0.1
    assert load_settings(settings) == settings
    with pytest.raises(RunError, match=r"'optimizer.b2'.*a number"):
        load_settings({"model": "m", "data": "d", "optimizer": {"b2": "0.99"}})
    with pytest.raises(RunError, match=r"'steps'.*a whole number"):
        load_settings({"model": "m", "data": "d", "steps": True})


def test_a_config_file_is_run_and_its_faults_are_named(tmp_path):
    good = (
        "from prb_jax.training.config import default_config\n"
        "def get_config():\n    config = default_config()\n    config.steps = 5\n    return config\n"
    )
    file = tmp_path / "config.py"
    file.write_text(good)
    assert read_config(file).steps == 5
    for text, part in [
        ("def get_config(:", "SyntaxError"),
        ("x = 1", r"get_config\(\)"),
        ("def get_config(): return 3", "found int"),
        (good.replace("config.steps", "config.stepz"), "stepz"),
    ]:
        file.write_text(text)
        with pytest.raises(RunError, match=rf"{file}.*{part}"):
            read_config(file)
    with pytest.raises(RunError, match="no such config file"):
        read_config(tmp_path / "absent.py")


def test_the_learning_rate_goes_by_tuning_and_width_unless_it_is_given():
    full, lora, head = (
        load_settings(default_config(), [*GIVEN, f"tuning={tuning}"]) for tuning in ("full", "lora", "head")
    )
    assert full.learning_rate(hidden_size=1000) == pytest.approx(1e-4)
    assert lora.learning_rate(hidden_size=1000) == pytest.approx(1e-3)
    assert head.learning_rate(hidden_size=1000) == pytest.approx(4e-3)
    assert full.learning_rate(hidden_size=8) == 1e-3
    given = load_settings(full, ["optimizer.learning_rate=5e-5"])
    assert given.learning_rate(hidden_size=8) == 5e-5


def written(path: Path, text: str) -> Path:
    """A config file that returns what the text says."""
    path.write_text(f"def get_config():\n    return {text}\n")
    return path


def test_a_config_file_may_return_a_dict(tmp_path):
    keys = {"model": "m", "data": "d", "steps": 7, "optimizer": {"learning_rate": 1e-4, "clip_norm": None},
            "lora.targets": ["q", "v"], "log": {"tensorboard": False}}  # fmt: skip
    config = written(tmp_path / "a.py", repr(keys))
    assert load_settings(config, ["steps=9"]) == load_settings(keys | {"steps": 9})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{'optimizer': {'lr': 1}}", "unknown config key 'optimizer.lr'.*'optimizer.learning_rate'"),
        ("{'log': {'plot': True}, 'log.plot': False}", "'log.plot' is given twice"),
        ("{'steps': 'many'}", "'steps'.*a whole number.*'many'"),
        ("{'steps': 1.5}", "'steps'.*a whole number.*1.5"),
        ("{'optimizer': 1}", "'optimizer' is a section"),
        ("[1]", "expected a ConfigDict or a dict, found list"),
    ],
)
def test_a_fault_of_a_config_file_is_one_line_that_names_it(tmp_path, text, message):
    with pytest.raises(RunError, match=rf"^.*a[.]py.*{message}.*\Z"):
        load_settings(written(tmp_path / "a.py", text))


@pytest.mark.parametrize("name", ["a.yaml", "a.yml", "a.toml"])
def test_yaml_and_toml_are_refused_with_the_way_to_write_them(tmp_path, name):
    (tmp_path / name).write_text("steps: 7")
    with pytest.raises(RunError, match=rf"{name}: a config is a Python file: .*get_config.*key=value"):
        load_settings(tmp_path / name)


def test_every_option_is_shown_with_its_meaning_as_a_config(tmp_path):
    settings = load_settings(default_config(), [*GIVEN, "optimizer.b2=0.5", "lora.targets=q,k"])
    text = explained_settings(settings)
    assert max(map(len, text.splitlines())) <= 80
    assert "\n\n    # Decay of Adam's second moment.\n    config.optimizer.b2 = 0.5\n" in text
    assert "One of: head, lora, full.\n    config.tuning = " in text
    shown = re.findall(r"^    config[.](\S+) = ", text, re.MULTILINE)
    assert shown == list(flat_settings(settings))
    file = tmp_path / "shown.py"
    file.write_text(text)
    assert load_settings(file) == settings


@pytest.mark.parametrize("kind", [TrainSettings, PpoSettings, BuildSettings])
def test_every_option_is_documented(kind):
    known = options_of(kind)
    assert known.keys() == flat_settings(kind()).keys()
    assert [key for key, option in known.items() if not option.meaning] == []
    assert len(known) > 50


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["lora.rank=4"], "lora.rank=4 has no effect: it needs tuning=lora"),
        (["lora.rank=4", "tuning=lora"], None),
        (
            ["method=user_blind", "profile_posts=3"],
            "profile_posts=3 has no effect: it needs method=profile_context",
        ),
        (
            ["optimizer.decay_share=0.3"],
            "optimizer.decay_share=0.3 has no effect: it needs optimizer.schedule=wsd",
        ),
        (["validation.data=x", "validation.fraction=0.3"], "validation.fraction=0.3 has no effect"),
        ([], None),
    ],
)
def test_options_without_effect_are_told(given, told):
    settings = load_settings(None, ["model=m", "data=d", *given])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        tell_unused(settings)
    assert [str(one.message)[: len(told or "")] for one in warned] == ([told] if told else [])
