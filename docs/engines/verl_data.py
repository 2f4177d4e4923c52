"""Comparisons as the parquet file of verl: the prompt as messages, and in `extra_info` the question and the person.

python docs/engines/verl_data.py people.jsonl train.parquet
"""

import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def main(source: str, target: str) -> None:
    rows = [json.loads(line) for line in Path(source).read_text(encoding="utf-8").splitlines()]
    table = [
        {
            "data_source": "people",
            "prompt": [{"role": "user", "content": row["question"]}],
            "reward_model": {"style": "model", "ground_truth": ""},
            "extra_info": {
                "index": number,
                "question": row["question"],
                "user_id": row["user_id"],
                "profile": [
                    {
                        "id": str(post.get("id", k)),
                        "category": post.get("category") or "",
                        "text": post["text"],
                    }
                    for k, post in enumerate(row.get("profile") or [])
                ],
            },
        }
        for number, row in enumerate(rows)
    ]
    pq.write_table(pa.Table.from_pylist(table), target)


if __name__ == "__main__":
    main(*sys.argv[1:])
