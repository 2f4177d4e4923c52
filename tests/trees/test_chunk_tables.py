"""The chunks of streams, for recurrent layers: every token once, and behind the tokens of its own conversation."""

import numpy as np
import pytest

from prb_jax.trees.packing import pack_together
from prb_jax.trees.streams import StreamBatch, StreamOptions, make_stream_batch
from prb_jax.trees.tree import CHUNK, build_tree

TAPS = 4


def laid_out(streams: int) -> StreamBatch:
    """Persons with a profile, two questions each, and responses of 1 to 150 tokens, one of which begins another."""
    rng = np.random.default_rng(0)
    trees = []
    for person in range(3):
        profile = [2 + person, *rng.integers(9, 99, 60 + 70 * person)]
        for question in range(2):
            asked = [*profile, 2 + question, *rng.integers(9, 99, 2 + 50 * question)]
            responses = [[*asked, 3 + k, *rng.integers(9, 99, n)] for k, n in enumerate((0, 1, 149))]
            trees.append(build_tree([*responses, responses[-1][: len(asked) + 90]]))
    options = StreamOptions(tokens=2048, streams=streams, taps=TAPS)
    return make_stream_batch(trees, pack_together(trees, options), options)


@pytest.mark.parametrize("streams", [1, 2])
def test_each_token_stands_behind_the_state_and_the_tokens_of_its_conversation(streams: int) -> None:
    batch = laid_out(streams)
    table = batch.chunks
    assert table is not None
    used = 0
    for row in range(streams):
        previous, tokens = np.asarray(batch.previous)[row], batch.tokens.shape[1]
        slot_of_token = np.asarray(table.slots)[row]
        last_of_slot = {0: -1}  # the token whose state a slot holds
        ends_at = set()
        for number, (places, history) in enumerate(zip(table.places[row], table.history[row], strict=True)):
            ids = places[places < tokens]
            np.testing.assert_array_equal(places[len(ids) :], tokens)
            np.testing.assert_array_equal(slot_of_token[ids], number * CHUNK + np.arange(len(ids)))
            if not len(ids):
                assert table.write[row][number] == table.slot_count - 1
                continue
            used += len(ids)
            np.testing.assert_array_equal(previous[ids[1:]], ids[:-1])
            assert last_of_slot[int(table.read[row][number])] == previous[ids[0]]
            assert 0 < table.write[row][number] < table.slot_count - 1
            last_of_slot[int(table.write[row][number])] = ids[-1]
            before, place = [], ids[0]
            for _ in range(TAPS - 1):
                place = previous[place] if 0 <= place < tokens else -1
                before.insert(0, place if place >= 0 else tokens)
            np.testing.assert_array_equal(history, before)
            ends_at.add(int(ids[-1]))
        assert set(np.asarray(batch.ends)[row].tolist()) - {0} <= ends_at
    assert used == int((np.asarray(table.slots) < table.places.shape[1] * CHUNK).sum())
    # Profiles are computed once, of 61, 131 and 201 tokens; of questions of 3 and 53 tokens each response has its own.
    assert used == (61 + 131 + 201) + 3 * (3 + 53) + 6 * (1 + 2 + 150 + 90)


def test_padding_has_no_chunk_and_a_full_stream_has_as_few_as_can_be() -> None:
    (tree,) = [build_tree([np.arange(1, 257)])]
    options = StreamOptions(tokens=256, taps=TAPS)
    batch = make_stream_batch([tree], pack_together([tree], options), options)
    assert batch.chunks is not None
    assert batch.chunks.places.shape == (1, 256 // CHUNK, CHUNK)
    assert batch.chunks.slot_count == 4
