"""The hub as a folder, and real data that lie beside the checkout."""

from collections.abc import Callable
from pathlib import Path

import datasets
import pytest


@pytest.fixture
def real() -> Callable[[str], Path]:
    """Gives the file of a real data set by its name; where there is none, the test is skipped."""

    def path(name: str) -> Path:
        file = Path(__file__).resolve().parents[4] / "shared" / "data" / f"{name}.jsonl.gz"
        if not file.exists():
            pytest.skip(f"{file} is not there")
        return file

    return path


@pytest.fixture
def hub_of(monkeypatch, tmp_path) -> Callable[[Path], list[tuple[str, str, str]]]:
    """Replaces the hub by a folder; gives the list of the names, configs and splits that it is asked for."""
    load_dataset = datasets.load_dataset

    def replaced(folder: Path) -> list[tuple[str, str, str]]:
        asked = []

        def load_from_folder(path, name=None, **options):
            asked.append((path, name, options["split"]))
            return load_dataset(str(folder), name, **(options | {"cache_dir": str(tmp_path / "cache")}))

        monkeypatch.setattr(datasets, "load_dataset", load_from_folder)
        return asked

    return replaced
