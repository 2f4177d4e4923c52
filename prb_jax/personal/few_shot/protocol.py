"""What every few-shot method is, its settings, the functions that run one over many users, and its controls.

A method is fitted on people who are seen; every choice (such as the strength of a penalty) is made on people of a
validation part. It is adapted to a new person from k comparisons without any change of the fitted arrays. The state of
a person is a small tree of arrays, so thousands of people are adapted at once by ``vmap``, split over the devices of a
mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args, get_origin

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from prb_jax.errors import DataError
from prb_jax.personal.few_shot.choices import Array, Choices, Context, Posts, Responses, UserRows
from prb_jax.platform.sharding import batch_sharding, mesh_shape, replicated, to_global
from prb_jax.records.options import Options, choices_of, option, options_of

Floats = tuple[float, ...]
Ints = tuple[int, ...]  # types of settings with several values; the validation part chooses one

State = Any  # a method's data on one user: a tree of arrays, with the same shapes for all users


class MethodSettings(Options):
    """Settings of a method of this package: a frozen dataclass, each field an ``option``.

    Raises:
      DataError: If a value, or an entry of a tuple, does not fit its field; the message names setting and value.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__(prefix=f"{cls.__name__}.")

    def __post_init__(self) -> None:
        for name, known in options_of(type(self)).items():
            value = getattr(self, name)
            if get_origin(known.type) is not tuple:
                expected = known.fault(value)
            elif not isinstance(value, tuple) or (known.default and not value):
                expected = "a tuple of one value or more"
            else:
                kind = get_args(known.type)[0]
                one = replace(known, type=kind, choices=choices_of(kind))
                expected = next((f"each to be {fault}" for entry in value if (fault := one.fault(entry))), "")
            self.check(name, not expected, expected)


@dataclass(frozen=True, kw_only=True)
class FewShotSettings(MethodSettings):
    """Settings of every method that chooses numbers on the validation part."""

    validation_shots: Ints = option(
        (),
        "comparisons of each person of the validation part that are adapted on while numbers are chosen; the losses of "
        "these counts are averaged. Not given: in a study its own numbers of shots, else 2 and 8",
        least=0,
    )


@partial(jax.tree_util.register_dataclass, data_fields=["arrays", "numbers"], meta_fields=["settings"])
@dataclass(frozen=True)
class Fitted:
    """A fitted method."""

    arrays: dict[str, Any]  # its arrays by name, float32 or int32
    # scalars by name: all that was chosen on the validation part (``l2``), and facts to be reported
    numbers: dict[str, Any]
    settings: Any  # the frozen settings with which it was fitted


@dataclass(frozen=True)
class Method:
    """A method of personalisation from few comparisons."""

    name: str  # as it is written on the command line
    settings: type  # the frozen dataclass of its settings; ``settings()`` are the defaults
    # ``(seen, validation, *, settings, key, mesh=None) -> Fitted``, from the choices of seen people, and of
    # other people to select numbers. The fit runs on one device and does not depend on the mesh; only the
    # people of the validation part are split over the mesh. A method that trains the backbone trains it on
    # the mesh, like `prb train`
    fit: Callable[..., Fitted]
    # ``(fitted, context, key) -> State``, pure; may be jitted and vmapped over contexts
    adapt: Callable[[Fitted, Context, jax.Array], State]
    # ``(fitted, state, responses) -> float32 [K]`` for the K responses of one comparison, pure
    score: Callable[[Fitted, State, Responses], jax.Array]
    # ``(fitted) -> State`` of a person without any data (k = 0, no posts)
    empty_state: Callable[[Fitted], State]
    # whether the score of a response depends only on that response; then responses of many comparisons may
    # be scored at once. False if it depends on the other responses of the comparison
    pointwise: bool = True
    holds_posts: bool = False  # whether the state has a place for each place of a post
    # whether ``fit`` takes ``shared``, a dictionary in which methods that are fitted on the same choices with the
    # same key keep results that others need too
    shares_fits: bool = False
    needs: tuple[str, ...] = ()  # names of the fields of `Choices` that it cannot do without
    # ``(fitted, choices) -> Choices`` with the features that adapt and score read, for a method that trains
    # the backbone and so knows them only after the fit. None leaves the features unchanged
    represent: Callable[[Fitted, Choices], Choices] | None = None
    # ``(fitted, choices, contexts, queries, key) -> figures``: the controls that this method must always
    # print beside its accuracy, such as its accuracy without adaptation
    controls: Callable[[Fitted, Choices, UserRows, UserRows, jax.Array], Mapping[str, float]] | None = None

    @property
    def trains_backbone(self) -> bool:
        """Whether it needs a backbone that can be trained."""
        return "backbone" in self.needs


USERS_AT_ONCE = 2048
"""Users that are adapted by one call of the compiled program: it bounds the memory of their gathered features."""

FEWEST_POSTS = 16  # places for the posts of a user, at least, where the data have so many

BATCH = 256  # rows of a compiled call for people who come one after another


def adapt_users(
    method: Method,
    fitted: Fitted,
    choices: Choices,
    contexts: UserRows,
    *,
    key: jax.Array,
    mesh: Mesh | None = None,
) -> State:
    """Adapt a method to many users, and return their states, each leaf with a leading axis U, on the host.

    Args:
      choices: Tables, and the choices that ``contexts`` indexes.
      contexts: The k comparisons of each of U users.
      key: Random key for methods that draw; each user's key is independent of the mesh.
      mesh: Devices that share the users.

    Raises:
      DataError: If the data lack a field that the method needs.
    """
    choices.require(method.name, method.needs)
    contexts = contexts.first(count := contexts.places.shape[1], width=few_sizes(max(1, count)))
    places, posts, users = contexts.places, choices.posts, contexts.users
    rows = (users, choices.chosen[places], choices.rejected[places], contexts.mask)
    run = partial(_adapt, method, fitted, _on_devices(choices.table, mesh), key)
    if posts is None:
        return _over_users(run, (*rows, None), mesh)
    # The time depends on padded posts, and few people have as many posts as the longest profile.
    fewest = posts.mask.shape[1] if method.holds_posts else FEWEST_POSTS
    widths, states, order = _widths_of_posts(posts, fewest)[users], list[State](), list[np.ndarray]()
    for width in np.unique(widths):
        group = np.flatnonzero(widths == width)
        of_group = jax.tree.map(lambda leaf, users=users[group], width=width: leaf[users, :width], posts)
        states.append(_over_users(run, (*(leaf[group] for leaf in rows), of_group), mesh))
        order.append(group)
    back = np.argsort(np.concatenate(order))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves)[back], *states)


def _widths_of_posts(posts: Posts, fewest: int) -> np.ndarray:
    """Return the padded number of posts of each user, [U]: powers of two, to compile few programs."""
    mask = np.asarray(posts.mask)
    most = mask.shape[1]
    count = (mask * (np.arange(most) + 1)).max(axis=1, initial=0)  # up to the last post
    widths = np.array([min(most, next_power(max(number, fewest))) for number in range(most + 1)])
    return widths[count]


def score_users(
    method: Method,
    fitted: Fitted,
    states: State,
    choices: Choices,
    queries: UserRows,
    *,
    mesh: Mesh | None = None,
) -> np.ndarray:
    """Score the comparisons ``queries`` of U users under their ``states`` from `adapt_users`.

    Returns:
      Scores of the chosen and of the rejected response, float32 [U, q, 2]; NaN for padding.
    """
    table, count = _on_devices(choices.table, mesh), queries.places.shape[1]
    queries = queries.first(count, width=few_sizes(max(1, count)))
    pairs = np.stack([choices.chosen, choices.rejected], -1)[queries.places]
    shown = None if choices.in_context is None else np.asarray(choices.in_context)[queries.places]
    scores = _over_users(partial(_score, method, fitted, table), (states, pairs, shown), mesh)
    return np.where(queries.mask[:, :, None], scores, np.nan)[:, :count]


def _on_devices(tables: Any, mesh: Mesh | None) -> Any:
    if mesh is None:
        return jax.tree.map(jnp.asarray, tables)
    return jax.tree.map(lambda leaf: to_global(np.asarray(leaf), replicated(mesh)), tables)


def _over_users(run: Callable[..., Any], rows: tuple[Any, ...], mesh: Mesh | None) -> Any:
    users = len(jax.tree.leaves(rows)[0])
    shards = 1 if mesh is None else mesh_shape(mesh).batch_shards
    calls = -(-users // USERS_AT_ONCE)
    size = min(USERS_AT_ONCE, few_sizes(-(-users // calls)))
    return _in_chunks(run, rows, size + -size % shards, mesh)


def in_batches(run: Callable[..., Any], rows: tuple[Any, ...]) -> Any:
    """Return the results of a compiled function over rows, in batches of few sizes."""
    return _in_chunks(run, rows, min(BATCH, next_power(len(jax.tree.leaves(rows)[0]))), None)


def few_sizes(number: int) -> int:
    """Return the next of few sizes, at most a quarter larger: programs of equal sizes are compiled once."""
    return -(-number // (step := max(1, next_power(number) // 8))) * step


def next_power(number: int) -> int:
    """Return the next power of two: few sizes, and so few programs."""
    return 1 << (number - 1).bit_length()


def _in_chunks(run: Callable[..., Any], rows: tuple[Any, ...], size: int, mesh: Mesh | None) -> Any:
    """The results of ``run`` over rows, ``size`` at a time; copies of the first row fill up the last chunk."""
    count, results = len(jax.tree.leaves(rows)[0]), []

    def chunk_of(leaf: Any, start: int) -> Any:
        chunk = np.asarray(leaf)[start : start + size]
        if len(chunk) < size:
            chunk = np.concatenate([chunk, np.repeat(chunk[:1], size - len(chunk), 0)])
        return chunk if mesh is None else to_global(chunk, batch_sharding(mesh, chunk.ndim))

    for start in range(0, count, size):
        chunk = jax.tree.map(lambda leaf, start=start: chunk_of(leaf, start), rows)
        results.append(jax.tree.map(np.asarray, run(*chunk)))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves)[:count], *results)


@partial(jax.jit, static_argnums=0)
def _adapt(
    method: Method,
    fitted: Fitted,
    table: Responses,
    key: jax.Array,
    users: Array,
    chosen: Array,
    rejected: Array,
    mask: Array,
    posts: Posts | None,
) -> State:
    def one(user: Array, chosen: Array, rejected: Array, mask: Array, posts: Posts | None) -> State:
        context = Context(table.take(chosen), table.take(rejected), mask, posts)
        return method.adapt(fitted, context, jax.random.fold_in(key, user))

    return jax.vmap(one)(users, chosen, rejected, mask, posts)


@partial(jax.jit, static_argnums=0)
def _score(
    method: Method, fitted: Fitted, table: Responses, states: State, pairs: Array, shown: Array | None
) -> Array:
    def one(state: State, pairs: Array, shown: Array | None) -> Array:
        return method.score(fitted, state, replace(table.take(pairs), in_context=shown))

    def of_user(state: State, pairs: Array, shown: Array | None) -> Array:
        if not method.pointwise:
            return jax.vmap(partial(one, state))(pairs, shown)
        flat = jax.tree.map(lambda leaf: leaf.reshape(-1), (pairs, shown))
        return one(state, *flat).reshape(pairs.shape)

    return jax.vmap(of_user)(states, pairs, shown)


@partial(jax.jit, static_argnums=0)
def adapt_rows(method: Method, fitted: Fitted, contexts: Context) -> State:
    """Return the states of people; each leaf has the leading axis of the contexts."""
    return jax.vmap(lambda context: method.adapt(fitted, context, jax.random.key(0)))(contexts)


@partial(jax.jit, static_argnums=0)
def score_rows(method: Method, fitted: Fitted, states: State, responses: Responses) -> jax.Array:
    """Return float32 [n, K]: the scores of each row of responses under its own state."""
    return jax.vmap(lambda state, row: method.score(fitted, state, row))(states, responses)


@partial(jax.jit, static_argnums=0)
def score_table(
    method: Method, fitted: Fitted, responses: Responses, states: State, people: jax.Array
) -> jax.Array:
    """Return float32 [people, n, K]: the scores of every row of responses under every state.

    ``people`` [people] may contain any numbers: it gives their count if the method's state is empty.
    """

    def of_person(state: State, person: jax.Array) -> jax.Array:
        return jax.vmap(lambda row: method.score(fitted, state, row))(responses)

    return jax.vmap(of_person)(states, people)


def repeated(state: State, users: int) -> State:
    """Repeat one state, e.g. the state of a person without data, for U users."""
    return jax.tree.map(lambda leaf: np.broadcast_to(np.asarray(leaf), (users, *np.shape(leaf))), state)


def bytes_per_user(states: State, users: int) -> int:
    """Return the bytes that the state of one of ``users`` users takes."""
    return sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(states)) // max(1, users)


def accuracy_of(method: Method, fitted: Fitted, states: State, choices: Choices, queries: UserRows) -> float:
    """Return the share of queries whose chosen response has the higher score under ``states``; a tie counts one half.

    Raises:
      DataError: If the queries are empty.
    """
    scores = score_users(method, fitted, states, choices, queries)[queries.mask]
    if not len(scores):
        raise DataError("accuracy: expected at least one comparison, found none")
    return float(np.mean((scores[:, 0] > scores[:, 1]) + 0.5 * (scores[:, 0] == scores[:, 1])))


def without_user(method: Method, fitted: Fitted, choices: Choices, queries: UserRows) -> float:
    """Return the accuracy when nothing is known of any user."""
    states = repeated(method.empty_state(fitted), len(queries.users))
    return accuracy_of(method, fitted, states, choices, queries)


def shuffled_users(
    method: Method, fitted: Fitted, choices: Choices, contexts: UserRows, queries: UserRows, key: jax.Array
) -> float:
    """Return the accuracy when every person has the comparisons and the profile of another person."""
    states = adapt_users(method, fitted, choices, contexts, key=key)
    other = jax.tree.map(lambda leaf: np.roll(leaf, 1, axis=0), states)
    return accuracy_of(method, fitted, other, choices, queries)


def swapped_labels(
    method: Method, fitted: Fitted, choices: Choices, contexts: UserRows, queries: UserRows, key: jax.Array
) -> float:
    """Return the accuracy after adapting to swapped labels: each rejected response counts as chosen."""
    states = adapt_users(method, fitted, choices.turned_round(), contexts, key=key)
    return accuracy_of(method, fitted, states, choices, queries)
