"""The compilation cache: where it lies, that it is used, and that it is never a reason to fail."""

import os
import subprocess
import sys
from pathlib import Path

from prb_jax.commands.process import cache_folder, delete_unused, enable_compilation_cache
from tests.plain_process import ROOT

COMPILE = """
import sys
from prb_jax.commands.process import enable_compilation_cache
enable_compilation_cache()
import jax, jax.numpy as jnp
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
hits_so_far = lambda: sum(name.endswith("cache_hits") for name in hits)
print(jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((4, 4))).sum(), hits_so_far())
"""


def test_the_folder_names_jax_and_the_processor(monkeypatch, tmp_path):
    for name in ("JAX_COMPILATION_CACHE_DIR", "PRB_JAX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = cache_folder()
    assert isinstance(folder, Path)
    assert folder.parent == tmp_path / ".cache" / "prb_jax" / "programs"
    assert folder.name.startswith("jax-")
    monkeypatch.setenv("PRB_JAX_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own" / "programs" / folder.name
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "gs://bucket/cache")
    assert cache_folder() == "gs://bucket/cache"


def test_a_folder_that_cannot_be_made_is_no_reason_to_fail(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("PRB_JAX_CACHE", str(tmp_path / "file"))
    assert enable_compilation_cache() is None


def test_a_second_process_finds_the_compiled_program(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    environment |= {"PRB_JAX_CACHE": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    outputs = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", COMPILE],
            capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout.split())
    assert outputs[0][0] == outputs[1][0]
    assert int(outputs[0][1]) == 0
    assert int(outputs[1][1]) > 0
    assert list(tmp_path.rglob("*-cache"))


def test_what_was_not_used_for_longest_is_deleted_once_a_day(tmp_path):
    for age in range(5):
        path = tmp_path / f"{age}-cache"
        path.write_bytes(b"0123456789")
        os.utime(path, (1e9 - age, 1e9 - age))
    (tmp_path / "note").write_bytes(b"not a program")
    delete_unused(tmp_path, most=30)
    assert {path.name for path in tmp_path.glob("[0-9n]*")} == {"0-cache", "1-cache", "2-cache", "note"}
    delete_unused(tmp_path, most=0)
    assert (tmp_path / "0-cache").exists()
    os.utime(tmp_path / ".checked", (1e9, 1e9))
    delete_unused(tmp_path, most=0)
    assert not list(tmp_path.glob("*-cache"))
