"""Configs: files, overrides, types, and errors that name the key."""

import pytest

from prb_jax.errors import RunError
from prb_jax.training.config import default_config, flat_settings, load_settings, read_config
from prb_jax.training.settings import TrainSettings

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
    ("override", "parts"),
    [
        (
            "optimizer.learning_rat=1",
            ["unknown config key 'optimizer.learning_rat'", "'optimizer.learning_rate'"],
        ),
        ("learning_rate=1", ["unknown config key 'learning_rate'", "'optimizer.learning_rate'"]),
        ("tunning=lora", ["unknown config key 'tunning'", "'tuning'"]),
        ("steps=1.5", ["'steps'", "a whole number", "'1.5'"]),
        ("steps=0", ["'steps'", "at least 1", "0"]),
        ("optimizer=adam", ["'optimizer' is a section"]),
        ("tuning=all", ["'tuning'", "head or lora or full", "'all'"]),
        ("init_head=maybe", ["'init_head'", "true or false"]),
        ("optimizer.learning_rate=nan", ["'optimizer.learning_rate'", "a number"]),
        ("validation.fraction=1", ["'validation.fraction'", "less than 1"]),
        ("steps", ["expected key=value"]),
        ("model=none", ["'model'", "found none"]),
        ("data=", ["'data'", "add data=PATH"]),
    ],
)
def test_what_cannot_be_is_an_error_that_names_the_key(override, parts):
    with pytest.raises(RunError) as caught:
        load_settings(default_config(), [*GIVEN, override])
    for part in parts:
        assert part in str(caught.value)


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
    good = tmp_path / "good.py"
    good.write_text(
        "from prb_jax.training.config import default_config\n"
        "def get_config():\n    config = default_config()\n    config.steps = 5\n    return config\n"
    )
    assert read_config(good).steps == 5
    for name, text, part in [
        ("syntax", "def get_config(:", "SyntaxError"),
        ("empty", "x = 1", "get_config()"),
        ("other", "def get_config(): return 3", "found int"),
        ("key", good.read_text().replace("config.steps", "config.stepz"), "stepz"),
    ]:
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        with pytest.raises(RunError) as caught:
            read_config(path)
        assert str(path) in str(caught.value)
        assert part in str(caught.value)
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


def test_every_option_is_documented():
    def undocumented(section: type) -> list[str]:
        import dataclasses

        missing = []
        for field in dataclasses.fields(section):
            value = getattr(section(), field.name)
            if dataclasses.is_dataclass(value):
                missing += undocumented(type(value))
            elif field.name not in (section.__doc__ or ""):
                missing.append(field.name)
        return missing

    assert undocumented(TrainSettings) == []
    assert len(flat_settings(TrainSettings())) > 50
