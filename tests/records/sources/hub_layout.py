"""A data set written to disk in the layout that the paper's has on the hub."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

CONFIGS = ("Lifestyle_and_Personal_Development", "Art_and_Entertainment", "Society_and_Culture")


def prb_row(id: str) -> dict[str, Any]:
    """A row with the fields of the published data set."""
    return {
        "id": id,
        "question": f"What should I do about {id}?",
        "profile": [{"id": f"{id}-p{i}", "category": "c", "text": f"post {i} of {id}"} for i in range(2)],
        "rubric_aspects": [{"aspect": "a", "evidence": "e", "reason": "r"}],
        "narrative": "private",
        "category": "k",
        "chosen": f"good {id}",
        "rejected": f"bad {id}",
    }


def prb_tables(rows: int = 3) -> dict[str, list[dict[str, Any]]]:
    """Rows for each of the three configs, with ids that are distinct over all."""
    return {config: [prb_row(f"{config[0]}{i}") for i in range(rows)] for config in CONFIGS}


def write_layout(
    folder: Path,
    tables: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    readme: bool,
    splits: Sequence[str] = ("test",),
) -> Path:
    """One parquet file for each config and split, declared in the README.md or not."""
    declared = ["---", "configs:"]
    for config, rows in tables.items():
        (folder / config).mkdir(parents=True)
        declared += [f"- config_name: {config}", "  data_files:"]
        for split in splits:
            path = folder / config / f"{split}-00000-of-00001.parquet"
            pq.write_table(pa.Table.from_pylist(list(rows)), path)
            declared += [f"  - split: {split}", f"    path: {config}/{split}-*"]
    if readme:
        (folder / "README.md").write_text("\n".join([*declared, "---", ""]))
    return folder
