"""One process of a job that scores with a tokenizer of its own; started by ``test_tokenising.py``.

python -m tests.scoring.tokenising_process COUNT [BROKEN]

Prints how many comparisons this process tokenised and a digest of all scores; ``BROKEN`` names a comparison that
cannot be tokenised.
"""

import hashlib
import sys
from collections.abc import Sequence

import jax
import numpy as np

from prb_jax import Comparison
from prb_jax.errors import DataError
from prb_jax.platform.processes.job import start_job
from prb_jax.scoring.batching import stream_scores
from prb_jax.scoring.encode_together import encode_by_processes
from prb_jax.trees.streams import StreamBatch, StreamOptions
from prb_jax.trees.tree import Tree, Truncation, build_tree
from tests.scoring.slow_scorer import comparisons


class Counting:
    """Bytes as tokens; counts what it was given."""

    def __init__(self, broken: str = "") -> None:
        self.broken, self.seen = broken, 0

    def __call__(self, part: Sequence[Comparison]) -> list[Tree]:
        self.seen += len(part)
        for comparison in part:
            if comparison.id == self.broken:
                raise DataError(f"comparison {comparison.id!r} cannot be tokenised")
        return [
            build_tree(
                [list(f"{c.id} {text}!".encode()) for text in c.responses],
                read=[len(c.id) + k for k in range(len(c.responses))],
                truncation=Truncation(posts_dropped=len(c.id), response_tokens_dropped=len(c.responses)),
            )
            for c in part
        ]


def digest(count: int, encode: Counting) -> str:
    """Of the scores, tokens and cuts of all comparisons, in order."""

    def score(batch: StreamBatch) -> jax.Array:
        # every id, length and read position counts
        place, end = np.arange(batch.tokens.shape[1]), batch.ends[:, :, None]
        seen = (place <= end) & (end < batch.until[:, None])
        total = (batch.tokens[:, None] * seen).sum(axis=2) + 7 * (batch.ends - batch.reads)
        return jax.numpy.asarray(total + 1000 * seen.sum(axis=2), np.float32)

    lines: dict[int, str] = {}
    for batch in stream_scores(
        comparisons(count), encode=encode, dispatch=score, options=StreamOptions(tokens=4096)
    ):
        for row, index in enumerate(batch.indices):
            lines[index] = f"{batch.scores[row].tolist()} {batch.tokens[row]} {batch.truncation[row]}"
    text = "\n".join(lines[index] for index in range(count))
    return hashlib.sha256(text.encode()).hexdigest()


def main(count: int, broken: str = "") -> None:
    start_job()
    encode = Counting(broken)
    try:
        scored = digest(count, encode)
    except DataError as error:
        print(f"refused {error}")
        return
    together = Counting()
    trees = encode_by_processes(comparisons(count), together)
    print(encode.seen, scored, together.seen, len(trees))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
