"""Without a network, a name of the hub is one warning and one error after one attempt to connect."""

import socket
import warnings

import datasets
import pytest
from huggingface_hub import constants

import prb_jax as prb
from prb_jax.platform import hub


@pytest.fixture
def attempts(monkeypatch) -> list[str]:
    """Hosts whose address was asked for; nothing has an address."""
    asked: list[str] = []

    def no_address(host, *_, **__):
        asked.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_connection", hub._Connection())
    return asked


def test_an_unreachable_hub_is_one_attempt_and_one_warning(attempts):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(
            prb.DataError, match=r"org/data: no such file or folder, .* the hub cannot be reached"
        ):
            prb.read_comparisons("org/data")
        with pytest.raises(prb.DataError, match="rewardbench2:FOLDER reads a copy"):
            prb.read_comparisons("rewardbench2")
        with pytest.raises(
            prb.CheckpointError, match=r"org/model: no such folder here, .* the hub cannot be reached"
        ):
            prb.load("org/model")
    assert len(attempts) == 1
    assert [str(one.message) for one in told] == [
        "the Hugging Face hub cannot be reached ([Errno -2] Name or service not known): only copies on this machine "
        "are used"
    ]
    assert not constants.HF_HUB_OFFLINE
    assert not datasets.config.HF_HUB_OFFLINE


@pytest.mark.parametrize("read", [prb.load, prb.read_comparisons])
def test_a_missing_run_is_an_error_without_a_request(read, attempts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(prb.PrbError, match=r"runs/nope: no such"):
        read("runs/nope")
    (tmp_path / "mine" / "first").mkdir(parents=True)
    (tmp_path / "mine" / "first" / "run.json").write_text("{}")
    with pytest.raises(prb.PrbError, match=r"mine/frist: no such .*did you mean mine/first\?"):
        read("mine/frist")
    assert attempts == []
