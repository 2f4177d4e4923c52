"""Read prompts before sampling: pack them into streams, ahead of the trees that will sample from them.

A stream contains as many of the waiting prompts as fit. A shared beginning, e.g. the profile of a person, is computed
once. The keys and values stay on the devices. When a tree becomes free, the cache of its next prompt is gathered from
them. The next stream is read when a prompt is needed that the current stream does not hold. Streams are therefore full
for any prompt lengths, and one program reads all of them.

On a mesh each part of the batch has a separate stream, which fills only trees of this part: nothing moves across parts.

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
from prb_jax.seams import get
from prb_jax.trees.in_order import choose_length, fitting, full_streams, length_step
from prb_jax.trees.packing import packed_stream, sort_trees
from prb_jax.trees.streams import StreamBatch, StreamOptions, StreamShape, make_stream_batch
from prb_jax.trees.tree import Tree

READ_TOKENS = {"cpu": 8_192, "gpu": 16_384, "tpu": 16_384}
"""Maximum tokens of a stream of prompts, if the longest prompt fits into half of it."""

_LOOKED_AT = 256  # approximate number of prompts that determine the stream length

Held = TypeVar("Held")


def model_streams(program: Program, *, longest: int, response: int = 1) -> StreamOptions:
    """Return the stream options of a model that runs token by token.

    Args:
      program: Static settings of the model.
      longest: Maximum tokens of a conversation.
      response: Maximum tokens of a response.
    """
    config, mesh = program.config, program.mesh
    attention = choose_attention(mesh, program.dtype, program.attention, config=config)
    options = stream_options(config, mesh, attention)
    if options.keys is None:
        return options
    return get("kernel tables", "lengths").value(options, longest=longest, response=response)


def place_streams(batch: StreamBatch, mesh: Mesh, *, prompts: int = 0) -> StreamBatch:
    """Return a host batch on the devices, without read places: all streams of one length then share one program.

    Recurrent layers keep the states at the ends of at least ``prompts`` conversations of each stream.
    """
    none = np.zeros((len(batch.tokens), 0), np.int32)
    kept = 0 if batch.chunks is None or not prompts else 1 << (prompts - 1).bit_length()
    batch = replace(batch, reads=none, ends=batch.ends[:, :kept])
    return jax.tree.map(lambda x: to_global(np.asarray(x), batch_sharding(mesh, x.ndim)), batch)


def prompt_length(program: Program, prompts: Sequence[np.ndarray], *, together: int, columns: int) -> int:
    """Return the token count of the streams that read prompts.

    Args:
      program: Static settings of the model that reads them.
      prompts: Token ids to cache for each prompt.
      together: Number of consecutive prompts that share the streams of a unit.
      columns: P, maximum length of a prompt.
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
    end: int  # index among the prompts that end in the stream
    places: np.ndarray  # int64, positions of its tokens

    __repr__ = short_repr


class PromptPacker:
    """Packs the prompts of one unit into streams, and records their positions.

    Args:
      program: Static settings of the model that reads them.
      prompts: Token ids to cache, by number; must contain every prompt that will be requested.
      tokens: N, maximum length of a prompt.
      columns: P.
      trees: B.

    Attributes:
      order: Numbers of all prompts, stream by stream; prompts with a common beginning are neighbours.
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
        """Return a stream for each part, with as many of the prompts as fit; replaces the streams held before.

        Args:
          trees: Maps each tree that needs a prompt to the prompt's number; these prompts come first.
          ahead: Numbers of the prompts that each part needs next.
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
                # Exactly the prompt's tokens are visible to its last token.
                end = ends[row, number] if self._trees[member].responses else -1
                places = np.flatnonzero(until[row, : end + 1] > end)
                self._found[self._numbers[member]] = _Found(row, number, places)
                number += len(self._trees[member].responses)
            most = max(most, number)
        return place_streams(batch, self._mesh, prompts=most)

    def ready(self, trees: Mapping[int, int]) -> dict[int, int]:
        """Return, for each part, the first of these trees whose prompt is in the stream, and the prompt's number."""
        ready: dict[int, tuple[int, int]] = {}
        for tree, number in trees.items():
            part = tree // self._in_a_part
            if (found := self._found.get(number)) is not None and found.stream == part:
                ready.setdefault(part, (tree, number))
        return dict(ready.values())

    def moves(self, trees: Mapping[int, int]) -> tuple[Moves, np.ndarray]:
        """Return the moves of held prompts to these trees, and the prompts' numbers [S, F]; -1 for empty slots."""
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
    """Reads the prompts of one unit for free trees.

    Args:
      program, params: Static settings and weights of the model that reads them.
      packer: Packer of the prompts.
      put: (held, keys and values, moves, numbers [S, F]) -> held, with these prompts replacing others.
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
        """Return the caches, with these prompts replacing others.

        Args:
          held: Caches of all trees.
          trees, ahead: Same as for :meth:`PromptPacker.pack`.
        """
        left = dict(trees)
        while left:
            if not (now := self.packer.ready(left)):
                batch, self._streams = self.packer.pack(left, ahead), None  # frees memory: both may not fit
                with compiling(self._read, *(x.shape for x in jax.tree.leaves(batch))):
                    self._streams = self._read(self._params, batch)
                if not (now := self.packer.ready(left)):
                    raise ValueError(f"the prompts {list(left.values())} fit no stream")
            assert self._streams is not None
            # One tree of each part at a time: a program for several would move the maximum number on every call.
            held = self._put(held, self._streams, *self.packer.moves(now))
            left = {tree: number for tree, number in left.items() if tree not in now}
        return held


def _tree(ids: np.ndarray) -> Tree:
    """A prompt as a tree whose only response is its last token; an empty prompt has no response."""
    return Tree(ids[:-1], (ids[-1:],), (0,)) if len(ids) else Tree(ids, (), ())


@dataclass(frozen=True)
class Reader:
    """Reads the prompts of one unit for a policy, and for a guiding reward model if any."""

    policy: PromptReader[Prompts]
    reward: PromptReader[PrefixCache] | None = None

    __repr__ = short_repr

    def fill(self, held: Prompts, trees: Mapping[int, int], ahead: Sequence[Sequence[int]] = ()) -> Prompts:
        """Return the prompts with new ones replacing others; see :meth:`PromptReader.fill`."""
        held = self.policy.fill(held, trees, ahead)
        if self.reward is None or held.reward is None:
            return held
        return replace(held, reward=self.reward.fill(held.reward, trees, ahead))


@functools.lru_cache(maxsize=16)
def reading_program(program: Program) -> Any:
    """Return the jitted :func:`prb_jax.models.cache.read_stream` of a model; equal programs share one function."""
    split: Any = NamedSharding(program.mesh, partition_spec((None, "batch", "tokens", "heads")))
    states: Any = None
    if program.config.recurrence is not None:
        states = NamedSharding(program.mesh, partition_spec((None, "batch", None, "heads")))
    return jax.jit(program.read, out_shardings=StreamCache(split, split, states))


def new_prompts(
    moves: Moves, numbers: np.ndarray, prompts: Sequence[np.ndarray], keys: Sequence[int]
) -> NewPrompts:
    """Return prompts of a policy; the caches of all tokens except the last come from the moves.

    Args:
      moves, numbers: Results of :meth:`PromptPacker.moves`.
      prompts: Token ids by number.
      keys: Number of each prompt for the random keys.
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
    """Return prompts for a caller's own compiled program: one stream for each part, and the moves to trees.

    The trees correspond to the prompts, in the same order; the mesh must divide their number.

    Args:
      program: Static settings of the policy.
      prompts: Token ids of each prompt, at least one.
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
