"""Words, a config, a model or a record that cannot be are one line on the command line, and leave nothing behind."""

import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from prb_jax import cli
from tests.json_lines import read_lines, write_lines
from tests.scoring.records import write_model
from tests.tiny_tokenizer import NO_SYSTEM

ROWS = [
    {"id": "a", "user_id": "u", "question": "Tea?", "chosen": "Green tea.", "rejected": "No."},
    {"id": "b", "user_id": "u", "question": "Rain? " * 50, "chosen": "Yes.", "rejected": "No rain."},
]


Spoil = Callable[[Path], list[str] | None]
"""Changes something in a folder with a model, "pairs.jsonl" and perhaps a run; gives further words of the command."""

WEIGHTS = "model/model.safetensors"


def in_turn(*spoils: Spoil, words: str = "") -> Spoil:
    def spoil(folder: Path) -> list[str]:
        for one in spoils:
            one(folder)
        return words.split()

    return spoil


def written(name: str, content: bytes) -> Spoil:
    def write(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)

    return write


def edited(name: str, change: Callable[[bytes], bytes]) -> Spoil:
    return lambda folder: written(name, change((folder / name).read_bytes()))(folder)


def removed(name: str) -> Spoil:
    return lambda folder: (folder / name).unlink()


def piped(name: str) -> Spoil:
    return in_turn(removed(name), lambda folder: os.mkfifo(folder / name))


def configured(**changes: object) -> Spoil:
    return edited("model/config.json", lambda text: json.dumps(json.loads(text) | changes).encode())


def header(change: Callable[[dict[str, Any]], object]) -> Spoil:
    """Changes the header of the weights; a change that returns bytes replaces it by them."""

    def changed(whole: bytes) -> bytes:
        length = int.from_bytes(whole[:8], "little")
        entries = json.loads(whole[8 : 8 + length])
        made = change(entries)
        new = made if isinstance(made, bytes) else json.dumps(entries).encode()
        return len(new).to_bytes(8, "little") + new + whole[8 + length :]

    return edited(WEIGHTS, changed)


def zip_bomb(*, data: int, order: int) -> Spoil:
    """Members of so many times 16 MiB, which take a thousandth of that in the file."""

    def write(folder: Path) -> None:
        path = folder / "model/pytorch_model.bin"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            archive.writestr("archive/data.pkl", bytes(data << 24))
            if order:
                archive.writestr("archive/byteorder", bytes(order << 24))

    return in_turn(removed(WEIGHTS), write)


def templated(template: str) -> Spoil:
    return lambda folder: ["--chat-template", template + NO_SYSTEM]


def dated(folder: Path) -> list[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    when = pa.array([2**60], pa.timestamp("ms"))
    path = folder / "pairs.parquet"
    pq.write_table(pa.table({"id": ["a"], "question": when, "chosen": ["b"], "rejected": ["c"]}), path)
    return ["--data", str(path)]


def rows(*changed: Mapping[str, object]) -> Spoil:
    return written("pairs.jsonl", "".join(json.dumps(row) + "\n" for row in changed).encode())


def scored(line: str, run: bytes = b'{"kind": "prb_jax evaluation", "inputs": {"model": {}}}') -> Spoil:
    """A run folder with one row."""
    return in_turn(written("run/run.json", run), written("run/scores.jsonl", line.encode() + b"\n"))


@pytest.fixture(scope="module")
def intact(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return write_model(folder, "llama", template=NO_SYSTEM, num_hidden_layers=1)


@pytest.fixture
def model(intact: Path, tmp_path: Path) -> Path:
    """A copy to spoil, beside "pairs.jsonl"."""
    write_lines(tmp_path / "pairs.jsonl", ROWS)
    return shutil.copytree(intact, tmp_path / "model")


DEEP = b'{"kind": ' + b"[" * 900 + b"]" * 900 + b"}"
MANY = b'{"a": 1, ' + b", ".join(b'"k%d": 1' % number for number in range(40_000)) + b', "a": 2}'
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
ROW = {
    "id": "a", "subset": None, "user_id": "u", "scores": [1.0, 0.0], "labels": [1.0, 0.0], "tokens": 1, "truncated": 0,
}  # fmt: skip
SYSTEM = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tea?"}]
REFUSED: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    "architecture": (configured(model_type="mamba"), ("config.json", "unknown architecture", "'mamba'")),
    "causal model": (configured(architectures=["LlamaForCausalLM"]), ("causal language model",)),
    "rope": (configured(rope_parameters={"rope_type": "longrope"}), ("config.json", "rope_type", "longrope")),
    "truncated weights": (edited(WEIGHTS, lambda whole: whole[:-1000]), ("model.safetensors", "truncated")),
    "pickled weights": (
        in_turn(removed(WEIGHTS), written("model/pytorch_model.bin", pickle.dumps({}))),
        ("pytorch_model.bin", "safetensors"),
    ),
    "no weights": (removed(WEIGHTS), ("safetensors",)),
    "wrong shape": (configured(vocab_size=401), ("embed_tokens.weight", "[401, 64]", "[400, 64]")),
    "labels": (
        in_turn(configured(num_labels=3, id2label=None, label2id=None), words="--readout first-logit"),
        ("score.weight", "[3, 64]", "[1, 64]"),
    ),
    "mesh axis": (in_turn(words="--mesh model=2"), ("mesh 'model=2'", "unknown axis 'model'")),
    "mesh size": (in_turn(words="--mesh tensor=3"), ("takes 3 devices, but 1 are present",)),
    "length": (in_turn(words="--max-length 5000"), ("max_length 5000", "4096")),
    "readout": (in_turn(words="--readout last-softmax"), ("needs several labels",)),
    "response beyond the limit": (in_turn(words="--max-length 8"), ("comparison 'a'", "responses are never cut")),
    "refused by the template": (
        rows(ROWS[0], {"id": "s", "prompt": SYSTEM, "chosen": "Tea.", "rejected": "No."}),
        ("comparison 's'", "System role not supported"),
    ),
    "one response": (
        rows({"id": "x", "question": "?", "responses": ["a"], "labels": [1]}),
        ("pairs.jsonl:1:", "'responses'"),
    ),
    "duplicate ids": (rows(ROWS[0], ROWS[0]), ("pairs.jsonl:2", "'a'", "already used at", "pairs.jsonl:1")),
    "empty response": (rows(ROWS[0] | {"rejected": ""}), ("pairs.jsonl:1:", "'rejected'", "empty")),
    "no data": (removed("pairs.jsonl"), ("pairs.jsonl",)),
    "too many layers": (configured(num_hidden_layers=10**9), ("config.json", "num_hidden_layers", "4096")),
    "layers that the weights lack": (configured(num_hidden_layers=4000), ("layers.1.", "missing")),
    "a number without end": (configured(hidden_size=10**4000), ("config.json", "hidden_size", "at most")),
    "a float without end": (configured(rms_norm_eps=10**4000), ("config.json", "rms_norm_eps")),
    "deep config": (written("model/config.json", DEEP), ("config.json", "nested too deeply")),
    "very deep config": (written("model/config.json", DEEP.replace(b"[" * 900, b"[" * 90_000)), ("nested too deeply",)),
    "many fields": (written("model/config.json", MANY), ("config.json", "field 'a' is given twice")),
    "deep index": (
        in_turn(removed(WEIGHTS), written("model/model.safetensors.index.json", DEEP)),
        ("model.safetensors.index.json", "nested too deeply"),
    ),
    "deep header": (header(lambda entries: DEEP), ("model.safetensors", "nested too deeply")),
    "many tensors": (header(lambda entries: MANY), ("model.safetensors", "field 'a' is given twice")),
    "dtype that is a list": (
        header(lambda entries: entries["score.weight"].update(dtype=["F32"])),
        ("model.safetensors", "score.weight", "unknown dtype"),
    ),
    "endless shape": (
        header(lambda entries: entries["score.weight"].update(shape=[10**4000] * 9)),
        ("model.safetensors", "header", "more than 300 digits"),
    ),
    "pipe for weights": (piped(WEIGHTS), ("model.safetensors", "found a pipe")),
    "pipe for the tokenizer": (piped("model/tokenizer.json"), ("tokenizer.json", "found a pipe")),
    "pipe for data": (piped("pairs.jsonl"), ("pairs.jsonl", "found a pipe")),
    "large byteorder": (zip_bomb(data=1, order=5), ("pytorch_model.bin: archive/byteorder is too large",)),
    "large pickle": (zip_bomb(data=5, order=0), ("pytorch_model.bin: archive/data.pkl is too large",)),
    "template without end": (templated(LOOPS), ("the chat template", "takes more than 1,000,000 steps")),
    "template of a huge text": (templated("{{ 'a' * 10**10 }}"), ("the chat template", "makes a value of more")),
    "date": (dated, ("pairs.parquet: row 1", "'question'")),
    "many fields in a record": (
        written("pairs.jsonl", MANY + b"\n"),
        ("pairs.jsonl:1", "field 'a' is given twice"),
    ),
    "score that is a text": (scored(json.dumps(ROW | {"scores": ["1", "0"]})), ("scores.jsonl:1", "not a row")),
    "score that is not finite": (scored(json.dumps(ROW).replace("1.0", "NaN")), ("scores.jsonl:1", "not a row")),
    "deep row": (scored(DEEP.decode()), ("scores.jsonl:1", "nested too deeply")),
    "deep run": (scored("", DEEP), ("run.json", "nested too deeply")),
}  # fmt: skip


def spoiled_run(name: str) -> bool:
    return name.startswith(("score that", "deep r"))


@pytest.mark.parametrize("name", REFUSED)
def test_one_line_and_nothing_left_behind(name: str, model: Path, tmp_path: Path, capsys) -> None:
    data, out = tmp_path / "pairs.jsonl", tmp_path / "run"
    spoil, words = REFUSED[name]
    extra = spoil(tmp_path) or []
    capsys.readouterr()
    named = [] if "--data" in extra else ["--data", str(data)]
    assert cli.main(["evaluate", str(model), *named, "--out", str(out), "--no-progress", *extra]) == 2
    error = capsys.readouterr().err.strip()
    last = error.splitlines()[-1]
    assert last.startswith("prb: error: ")
    assert "Traceback" not in error
    for word in words:
        assert word in last
    # What a later attempt could not use is not there; an early refusal leaves no folder at all.
    assert spoiled_run(name) or not (out / "scores.jsonl").exists() or not (out / "scores.jsonl").read_bytes()
    assert not (out / "summary.json").exists()


def test_the_intact_model_is_scored(model: Path, tmp_path: Path, capsys) -> None:
    """So that each refusal above has its one cause; a prompt beyond the limit is cut and reported."""
    data, out = str(tmp_path / "pairs.jsonl"), tmp_path / "run"
    assert cli.main(["evaluate", str(model), "--data", data, "--out", str(out), "--max-length", "60"]) == 0
    assert json.loads((out / "summary.json").read_text())["n"] == 2
    assert [bool(row["truncated"]) for row in read_lines(out / "scores.jsonl")] == [False, True]


RUN = "evaluate baseline:length --data pairs.jsonl --out run"
PLAN = "plan qwen3-40m --topology v5e:2x2"
TRAIN = "train configs/bt_user_blind.py --out run"
WORDS: list[tuple[str, ...]] = [
    # The words of a command, and parts of its one line.
    ("", "the following arguments are required"),
    ("evalute m", "unknown verb 'evalute'; did you mean evaluate? (see `prb --help`)"),
    ("bench skore", "unknown verb 'skore'; did you mean score? (see `prb bench --help`)"),
    ("unknown", "unknown verb 'unknown'"),
    ("help", "unknown verb 'help'; did you mean --help?"),
    ("--halp", "unrecognized arguments: --halp; did you mean --help?"),
    (f"{RUN} --data poirs.jsonl", "poirs.jsonl: no such file; did you mean pairs.jsonl?"),
    ("version", "unknown verb 'version'; did you mean --version?"),
    ("quickstart --unknown", "--unknown"),
    (
        "evaluate --limit 3",
        "the following arguments are required: MODEL, --data, --out (see `prb evaluate --help`)",
    ),
    ("evaluate m --data d", "required: --out"),
    ("evaluate m --out o", "required: --data"),
    (
        "evaluate m --data d --profile-post 3",
        "unrecognized arguments: --profile-post 3; did you mean --profile-posts?",
    ),
    (
        "evaluate m --protocol papr",
        "invalid choice: 'papr'; did you mean paper? (choose from default, paper)",
    ),
    (f"{RUN} --protocol other", "--protocol"),
    (f"{RUN} --dtype int8", "--dtype"),
    (f"{RUN} --quantize int4", "--quantize"),
    (f"{RUN} --limit 0", "--limit"),
    (f"{RUN} --profile-posts -1", "--profile-posts"),
    (f"{RUN} --profile 3", "--profile"),
    (
        f"{RUN} extra",
        "unrecognized arguments: extra; expected only MODEL and flags (see `prb evaluate --help`)",
    ),
    (f"{RUN} --modle m", "unrecognized arguments: --modle m (see `prb evaluate --help`)"),
    (f"{RUN} --max-length 7", "max_length: baseline:length reads the whole text"),
    (f"{RUN} --profile-posts 3", "profile_posts: baseline:length reads the whole text"),
    (f"{RUN} --protocol paper", "protocol: baseline:length reads the whole text"),
    (f"{RUN} --dtype bfloat16 --mesh fsdp=2", "mesh, dtype: baseline:length reads the whole text"),
    (f"{RUN} --data missing.jsonl", "missing.jsonl"),
    (f"{RUN} --subset S", "no subset 'S': its records have no field 'subset'; leave it out"),
    (f"{RUN} --out pairs.jsonl", "pairs.jsonl: the output folder is a file"),
    (f"{RUN} --data pair.jsonl", "pair.jsonl: no such file; did you mean pairs.jsonl?"),
    ("compare pairs runs", "pairs: no such folder; expected the folder of a run"),
    ("leaderboard pair", "pair: expected a folder with runs, found nothing"),
    (
        "audit pairs.jsonl",
        "pairs.jsonl: the folder of the audit is a file; name a folder first, and pairs with --data",
    ),
    ("audit other --out page.html", "--out: is the page of a report; add --report"),
    (
        "best-of-n --samples none --rewards baseline:length --out run",
        "none: no such folder; expected a run of `prb sample`",
    ),
    (f"{RUN} --no-reference", "--quantize"),
    ("evaluate baseline:best --data pairs.jsonl --out run", "unknown baseline 'baseline:best'"),
    ("train configs/absent.py --out run", "configs/absent.py", "no such config file"),
    ("train bt_usr_blind --out run", "bt_usr_blind", "no such config file", "did you mean bt_user_blind?"),
    ("train bt_user_blind --out run", "'model'", "add model=PATH"),
    (TRAIN, "'model'", "add model=PATH"),
    (
        f"{TRAIN} --model x",
        "unrecognized arguments: --model",
        "a key of the config is written KEY=VALUE: model=VALUE",
    ),
    (f"{TRAIN} --data=y", "--data=y; a key of the config is written KEY=VALUE: data=VALUE"),
    (f"{TRAIN} model=x data=y stesp=3", "'stesp'", "'steps'"),
    (f"{TRAIN} model=x data=absent.jsonl", "absent.jsonl", "no such file"),
    (f"{PLAN} --tuning lora", "--tuning is only for training: it requires --train"),
    (f"{PLAN} --remat full", "--remat is only for training: it requires --train"),
    (f"{PLAN} --sweep --mesh fsdp=4", "--mesh does not work with --sweep, which tries meshes itself"),
    (f"{PLAN} --sample --train", "--train does not work with --sample, a separate plan"),
    (f"{PLAN} --sample --sweep", "--sweep does not work with --sample, a separate plan"),
    (f"{PLAN} --reward qwen3-40m", "--reward is for policies: it requires --ppo"),
    (f"{PLAN} --value-trunk own", "--value-trunk is for policies: it requires --ppo"),
    (f"{PLAN} --ppo --train", "--train does not work with --ppo"),
    (f"{PLAN} --ppo --sweep", "--sweep does not work with --ppo"),
    (f"{PLAN} --ppo --attention xla", "--attention does not work with --ppo"),
    (f"{PLAN} --ppo --questions-per-user 2", "--questions-per-user does not work with --ppo"),
    (f"{PLAN} --ppo --quantize int8", "--quantize does not work with --ppo"),
    (f"{PLAN} --ppo --tuning head", "--tuning: expected lora or full with --ppo, found head"),
]
CONFIGS: list[tuple[str, ...]] = [
    # The options in a file of `prb evaluate --config`, and parts of the line, which begins with its name.
    ("{'profil_posts': 3}", "unknown config key 'profil_posts'", "did you mean 'profile_posts'?"),
    ("{'limit': 0}", "'limit'", "expected a number above 0, found 0"),
    ("{'limit': 'many'}", "'limit'", "expected a whole number, found 'many'"),
    ("{'limit': True}", "'limit'", "expected a whole number, found True"),
    ("{'protocol': 'other'}", "'protocol'", "expected default or paper, found 'other'"),
    ("{'mesh': 4}", "'mesh'", "expected a text, found 4"),
    ("{'no_progress': 1}", "'no_progress'", "expected true or false, found 1"),
    ("{'data': {'a': 1}}", "'data'", "expected a text or a list of texts"),
    ("{'max-length': 1, 'max_length': 2}", "'max_length' is given twice"),
    ("{'config': 'other.py'}", "unknown config key 'config'"),
]


@pytest.mark.parametrize(("words", "parts"), [(words, parts) for words, *parts in WORDS + CONFIGS])
def test_words_that_cannot_be_are_one_line(
    words: str, parts: list[str], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the configs of the package are found from any folder
    if words.startswith("{"):
        (tmp_path / "options.py").write_text(f"def get_config():\n    return {words}\n")
        words, parts = f"{RUN} --config options.py", ["options.py: ", *parts]
    before = set(tmp_path.iterdir())
    try:
        status: Any = cli.main(words.split())
    except SystemExit as ended:
        status = ended.code
    said = capsys.readouterr()
    assert (status, said.out, said.err.count("\n")) == (2, "", 1)
    assert said.err.startswith("prb: error: ")
    for part in parts:
        assert part in said.err
    assert set(tmp_path.iterdir()) == before


def test_names_and_letters_that_a_shell_or_an_editor_changed(tmp_path: Path, capsys, monkeypatch) -> None:
    """The remedy is in the line: quotation marks for a name with blanks, UTF-8, and names of data files."""
    monkeypatch.chdir(tmp_path)
    Path("my pairs.jsonl").write_text("{}\n")
    Path("latin.jsonl").write_bytes('{"question": "café?"}\n'.encode("latin-1"))
    Path("latin.csv").write_bytes("question,chosen\ncafé,x\n".encode("latin-1"))
    Path("empty.jsonl").touch()
    Path("empty").mkdir()
    Path("null.jsonl").write_text('{"question": "a", "chosen": "b", "rejected": null}\n')
    for words, part in {
        "my pairs.jsonl": "no such file, folder or data set; did you mean 'my pairs.jsonl'? A name with",
        "latin.jsonl": "1: invalid UTF-8: byte 0xe9 at column 18 (invalid continuation byte); save the file as UTF-8",
        "latin.csv": "latin.csv:2: invalid UTF-8: byte 0xe9 (invalid continuation byte); save the file as UTF-8",
        "null.jsonl": "null.jsonl:1: field 'rejected': null; expected a response",
        "other.jsonl": "other.jsonl: no such file\n",
        "empty.jsonl": "empty.jsonl: no comparisons in it; expected at least one",
        "empty": "no data files in it; expected .jsonl, .jsonl.gz, .json,",
    }.items():
        command = ["evaluate", "baseline:length", "--out", "run", "--data", *words.split()]
        assert cli.main(command) == 2
        assert part in capsys.readouterr().err
