"""Prompts are read before they are sampled from: packed into streams, ahead of the trees that they go to.

A stream takes as many of the waiting prompts as fit it, and the beginning that several of them share, as the profile of
a person, is computed once. Its keys and values stay on the devices. When a tree is free, the cache of its next prompt
is gathered from them; the next stream is read when a prompt is needed that this one does not hold. So streams are full,
whatever the lengths of prompts, and one program reads all of them.

On a mesh each part of the batch has a stream of its own, which fills its own trees: nothing goes from part to part.

Letters: B trees in S parts, S streams of N tokens that are read together, P columns of a cache, F prompts of a stream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from prb_jax.behaviour.generation.steps import NewPrompts, Program, Prompts
from prb_jax.errors import short_repr
from prb_jax.models.attention.choice import choose_attention
from prb_jax.models.cache import Moves, PrefixCache, StreamCache
from prb_jax.models.decoder import Params
from prb_jax.platform.sharding import batch_sharding, mesh_shape, partition_spec, to_global
from prb_jax.runs.progress import compiling
from prb_jax.scoring.batching import stream_options
from prb_jax.trees.in_order import choose_length, fitting, full_streams, length_step
from prb_jax.trees.kernel_tables import KeyLayout, with_key_layout
from prb_jax.trees.packing import StreamOptions, StreamShape, packed_stream, sort_trees
from prb_jax.trees.streams import StreamBatch, make_stream_batch
from prb_jax.trees.tree import Tree

READ_TOKENS = {"cpu": 8_192, "gpu": 16_384, "tpu": 16_384}
"""Most tokens of a stream of prompts, where the longest prompt fits the half of it."""

_LOOKED_AT = 256  # prompts, about, that decide how long streams are

Held = TypeVar("Held")


def model_streams(program: Program, *, longest: int, response: int = 1) -> StreamOptions:
    """Return how streams are shaped for a model that is run token by token.

    Args:
      program: of the model.
      longest: most tokens of a conversation.
      response: most tokens of a response.
    """
    config, mesh = program.config, program.mesh
    attention = choose_attention(mesh, program.dtype, program.attention, config=config)
    options = stream_options(config, mesh, attention)
    return options if options.keys is None else with_key_layout(options, KeyLayout.of(longest, response))


def place_streams(batch: StreamBatch, mesh: Mesh, *, prompts: int = 0) -> StreamBatch:
    """Return a batch of the host on the devices, without read places: streams of one length have one program.

    Recurrent layers keep the states at the ends of ``prompts`` conversations of each stream, or a few more.
    """
    none = np.zeros((len(batch.tokens), 0), np.int32)
    kept = 0 if batch.chunks is None or not prompts else 1 << (prompts - 1).bit_length()
    batch = replace(batch, reads=none, ends=batch.ends[:, :kept])
    return jax.tree.map(lambda x: to_global(np.asarray(x), batch_sharding(mesh, x.ndim)), batch)


def prompt_length(program: Program, prompts: Sequence[np.ndarray], *, together: int, columns: int) -> int:
    """Return the tokens of the streams in which prompts are read.

    Args:
      program: of the model that reads them.
      prompts: token ids of each, as far as they are cached.
      together: how many of them, side by side, are in the streams of one unit.
      columns: P, which none exceeds.
    """
    starts = range(0, min(len(prompts), _LOOKED_AT), together)
    options = model_streams(program, longest=columns)
    units = [sort_trees(list(map(_tree, prompts[start : start + together])), options) for start in starts]
    most = READ_TOKENS.get(program.mesh.devices.flat[0].platform, READ_TOKENS["cpu"])
    return choose_length(units, options, largest=columns, most=most)


@dataclass(frozen=True)
class _Found:
    """A prompt in the streams that were read last."""

    stream: int
    end: int  # its number among the prompts that end in the stream
    places: np.ndarray  # int64, of its tokens

    __repr__ = short_repr


class PromptPacker:
    """Packs the prompts of one unit into streams, and knows where they stand there.

    Args:
      program: of the model that reads them.
      prompts: token ids by number, as far as they are cached: all that will be asked for.
      tokens: N, which no prompt exceeds.
      columns: P.
      trees: B.

    Attributes:
      order: the numbers of all prompts, stream by stream, so that those are neighbours that begin alike.
    """

    def __init__(
        self, program: Program, prompts: Mapping[int, np.ndarray], *, tokens: int, columns: int, trees: int
    ) -> None:
        self._mesh, self._options = program.mesh, model_streams(program, longest=columns)
        self._shape, self._columns = StreamShape(tokens, tokens), columns
        self._in_a_part = trees // self._options.streams
        self._numbers, self._trees = list(prompts), [_tree(ids) for ids in prompts.values()]
        self._sorted = sort_trees(self._trees, self._options)
        numbers = [self._numbers[index] for index in self._sorted.order]
        self._place = {number: place for place, number in enumerate(numbers)}
        self.order = [numbers[place] for stream in full_streams(self._sorted, tokens) for place in stream]
        self._turn = {number: turn for turn, number in enumerate(self.order)}
        self._found: dict[int, _Found] = {}

    def pack(self, trees: Mapping[int, int], ahead: Sequence[Sequence[int]] = ()) -> StreamBatch:
        """Return a stream for each part, with as many of the prompts as fit it; it is these that are held now.

        Args:
          trees: the number of the prompt of each tree that needs one: these come first.
          ahead: the numbers of the prompts that each part is given next.
        """
        wanted: list[list[int]] = [[] for _ in range(self._options.streams)]
        for tree in sorted(trees, key=lambda tree: self._turn[trees[tree]]):
            wanted[tree // self._in_a_part].append(trees[tree])
        for numbers, following in zip(wanted, ahead, strict=False):
            numbers += following
        chosen = [
            fitting(self._sorted, map(self._place.__getitem__, numbers), self._shape.tokens)
            for numbers in wanted
        ]
        streams = tuple(packed_stream(self._sorted, places, self._shape) for places in chosen)
        batch = make_stream_batch(self._trees, streams, self._options)
        until, ends = np.asarray(batch.until), np.asarray(batch.ends)
        self._found = {}
        most = 0
        for row, stream in enumerate(streams):
            number = 0
            for member in stream.members:
                # What its last token sees is the prompt.
                end = ends[row, number] if self._trees[member].responses else -1
                places = np.flatnonzero(until[row, : end + 1] > end)
                self._found[self._numbers[member]] = _Found(row, number, places)
                number += len(self._trees[member].responses)
            most = max(most, number)
        return place_streams(batch, self._mesh, prompts=most)

    def ready(self, trees: Mapping[int, int]) -> dict[int, int]:
        """Return of each part the first of these trees whose prompt its stream holds, with the prompt's number."""
        ready: dict[int, tuple[int, int]] = {}
        for tree, number in trees.items():
            part = tree // self._in_a_part
            if (found := self._found.get(number)) is not None and found.stream == part:
                ready.setdefault(part, (tree, number))
        return dict(ready.values())

    def moves(self, trees: Mapping[int, int]) -> tuple[Moves, np.ndarray]:
        """Return the moves of held prompts to these trees, and the prompts' numbers [S, F]; -1 for none."""
        parts: list[list[tuple[int, int]]] = [[] for _ in range(self._options.streams)]
        for tree, number in trees.items():
            part, within = divmod(tree, self._in_a_part)
            parts[part].append((within, number))
        shape = len(parts), max(map(len, parts))
        places, lengths = np.zeros((*shape, self._columns), np.int32), np.zeros(shape, np.int32)
        to, numbers = np.full(shape, self._in_a_part, np.int32), np.full(shape, -1)
        ends = np.zeros(shape, np.int32)
        for row, part in enumerate(parts):
            for k, (within, number) in enumerate(part):
                found = self._found[number].places
                places[row, k, self._columns - len(found) :] = found
                lengths[row, k], to[row, k], numbers[row, k] = len(found), within, number
                ends[row, k] = self._found[number].end if len(found) else 0
        return Moves(places, lengths, to, ends), numbers


class PromptReader(Generic[Held]):
    """Reads the prompts of one unit for trees that are free.

    Args:
      program, params: of the model that reads them.
      packer: of the prompts.
      put: (held, keys and values, moves, numbers [S, F]) -> held, with these prompts in the place of others.
    """

    def __init__(
        self,
        program: Program,
        params: Params,
        packer: PromptPacker,
        *,
        put: Callable[[Held, StreamCache, Moves, np.ndarray], Held],
    ) -> None:
        self._read, self._params, self.packer, self._put = reading_program(program), params, packer, put
        self._streams: StreamCache | None = None

    def fill(self, held: Held, trees: Mapping[int, int], ahead: Sequence[Sequence[int]] = ()) -> Held:
        """Return the caches with these prompts in the place of others.

        Args:
          held: the caches of all trees.
          trees, ahead: as of :meth:`PromptPacker.pack`.
        """
        left = dict(trees)
        while left:
            if not (now := self.packer.ready(left)):
                batch, self._streams = self.packer.pack(left, ahead), None  # there need not be room for both
                with compiling(self._read, *(x.shape for x in jax.tree.leaves(batch))):
                    self._streams = self._read(self._params, batch)
                if not (now := self.packer.ready(left)):
                    raise ValueError(f"the prompts {list(left.values())} fit no stream")
            assert self._streams is not None
            # One tree of each part at a time: a program that fills several at a time would move all of them each time.
            held = self._put(held, self._streams, *self.packer.moves(now))
            left = {tree: number for tree, number in left.items() if tree not in now}
        return held


def _tree(ids: np.ndarray) -> Tree:
    """A prompt as a tree: its last token is the only response; one without a token has none."""
    return Tree(ids[:-1], (ids[-1:],), (0,)) if len(ids) else Tree(ids, (), ())


@dataclass(frozen=True)
class Reader:
    """Reads the prompts of one unit for a policy, and for the reward model that guides it."""

    policy: PromptReader[Prompts]
    reward: PromptReader[PrefixCache] | None = None

    __repr__ = short_repr

    def fill(self, held: Prompts, trees: Mapping[int, int], ahead: Sequence[Sequence[int]] = ()) -> Prompts:
        """Return the prompts with new ones in the place of others; see :meth:`PromptReader.fill`."""
        held = self.policy.fill(held, trees, ahead)
        if self.reward is None or held.reward is None:
            return held
        return replace(held, reward=self.reward.fill(held.reward, trees, ahead))


@functools.lru_cache(maxsize=16)
def reading_program(program: Program) -> Any:
    """Return the jitted :func:`prb_jax.models.cache.read_stream` of a model: the same one for equal programs."""
    split: Any = NamedSharding(program.mesh, partition_spec((None, "batch", "tokens", "heads")))
    states: Any = None
    if program.config.recurrence is not None:
        states = NamedSharding(program.mesh, partition_spec((None, "batch", None, "heads")))
    return jax.jit(program.read, out_shardings=StreamCache(split, split, states))


def new_prompts(
    moves: Moves, numbers: np.ndarray, prompts: Sequence[np.ndarray], keys: Sequence[int]
) -> NewPrompts:
    """Return prompts of a policy, of whose tokens all but the last one are moved.

    Args:
      moves, numbers: of :meth:`PromptReader.moves`.
      prompts: token ids by number.
      keys: the number of each for the random keys.
    """
    tokens = np.zeros((*numbers.shape, np.shape(moves.places)[2] + 1), np.int32)
    of_keys = np.zeros(numbers.shape, np.int32)
    for place, number in np.ndenumerate(numbers):
        if number >= 0:
            ids = prompts[int(number)]
            tokens[place][-len(ids) :] = ids
            of_keys[place] = keys[int(number)]
    return NewPrompts(moves=moves, tokens=tokens, numbers=of_keys)


def lay_out_prompts(program: Program, prompts: Sequence[np.ndarray]) -> tuple[StreamBatch, NewPrompts]:
    """Return prompts for a compiled program of the caller's own: in one stream of each part, and their way to trees.

    The trees are as many as the prompts, in the same order; the mesh divides their number.

    Args:
      program: of the policy.
      prompts: token ids of each, at least one.
    """
    count, parts = len(prompts), mesh_shape(program.mesh).batch_shards
    columns = length_step(max(map(len, prompts)), 16)
    most = max(
        sum(map(len, prompts[start : start + count // parts])) for start in range(0, count, count // parts)
    )
    sizes = {
        "tokens": length_step(most, model_streams(program, longest=columns).multiple),
        "columns": columns,
    }
    cached = dict(enumerate(ids[:-1] for ids in prompts))
    packer, places = PromptPacker(program, cached, trees=count, **sizes), {place: place for place in cached}
    batch = packer.pack(places)
    return batch, new_prompts(*packer.moves(places), prompts, range(count))
