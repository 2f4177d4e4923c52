"""Lists on the command line: commas and blanks separate values alike, and an empty value is an error."""

import pytest

from prb_jax import cli


@pytest.fixture(scope="module")
def parser():
    return cli.parser()


@pytest.mark.parametrize(
    ("verb", "flag", "values"),
    [
        ("personalise --data d --backbone b --out o", "--methods", ["bayes", "lore", "offset"]),
        ("personalise --data d --backbone b --out o", "--shots", [0, 2, 8]),
        ("personalise --data d --backbone b --out o", "--people", [30, 60, 90]),
        ("best-of-n --samples s --out o", "--rewards", ["m", "judge:n", "baseline:length"]),
        ("policy-accuracy p --data d --out o", "--rewards", ["m", "n", "baseline:length"]),
        ("policy-accuracy p --data d --out o --rewards m", "--lambdas", [0.0, 0.5, 2.0]),
        ("evaluate m --data d --out o", "--profile-posts", [0, 5, 10]),
        ("correlate --behaviour b", "--scores", ["r", "s", "t"]),
        ("correlate --scores s", "--behaviour", ["r", "s", "t"]),
        ("correlate --scores s --behaviour b", "--figures", ["accuracy", "user_accuracy", "coverage"]),
        ("compare r s", "--cluster", ["user_id", "item_id", "topic"]),
        ("prepare --data d --out o", "--split", ["train", "validation", "test"]),
        ("bench score m", "--responses", [2, 4, 16]),
        ("bench score m", "--questions-per-user", [1, 5, 15]),
        ("bench score m", "--dtype", ["float32", "bfloat16", "float32"]),
    ],
)
def test_commas_and_blanks_separate_values_alike(verb, flag, values, parser):
    first, second, third = map(str, values)
    for words in (f"{first},{second},{third}", f"{first} {second} {third}", f"{first},{second} {third}"):
        options = parser.parse_args([*verb.split(), flag, *words.split()])
        assert list(getattr(options, flag[2:].replace("-", "_"))) == values


def test_a_path_with_a_comma_is_one_value(parser, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a,b").mkdir()
    words = ["best-of-n", "--samples", "s", "--out", "o", "--rewards", "a,b", "c,d"]
    assert parser.parse_args(words).rewards == ["a,b", "c", "d"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "best-of-n --samples s --out o --rewards a,,b",
            "--rewards: a value is empty; several values: a,b or a b",
        ),
        ("evaluate m --data d --out o --profile-posts 1,-1", "--profile-posts: expected 0 or more, found -1"),
        (
            "personalise --data d --backbone b --out o --shots 0;1",
            "found '0;1'; several values: 1,5,15 or 1 5 15",
        ),
        ("bench score m --dtype float32,int3", "invalid choice: 'int3'"),
    ],
)
def test_a_wrong_value_in_a_list_is_named(words, message, parser, capsys):
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(words.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
