"""The feature store: the state of a model at every response and every post of a data set, memory-mapped.

A store is a folder that `prb features` writes. ``features.json`` is written last: a folder with this file is complete,
and the digests of its files are in ``run.json``. Each
distinct response (with its prompt, without any profile) and each distinct post has one row, in parts of `.npy` files;
``answers.keys.npy`` and ``posts.keys.npy`` contain the digest of the text of each row, to find a row by its text. For
a reward model, ``rewards-*.npy`` contains its own reward of each response. On request, ``shown-*.npy`` contains the
reward of each response with its prompt and a profile. Both have one float32 number per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, NotRequired, TypedDict

import numpy as np

from prb_jax.errors import DataError, RunError, quote, short_repr
from prb_jax.platform.processes.agreement import differences
from prb_jax.records.arrays import load_array
from prb_jax.records.comparison import Comparison, Message, Post
from prb_jax.records.reading import read_object
from prb_jax.records.schema import check_schema
from prb_jax.runs.kind import RunKind

FEATURES: Final = "features.json"
KIND: Final = "prb_jax features"
FORMAT: Final = 1
FEATURE_RUNS: Final = RunKind(KIND, "prb features", finished=FEATURES, sealed=("*.npy",))
KEY_BYTES: Final = 16
JUDGED: Final[Mapping[str, int]] = {"Agrees with: ": 1, "Disagrees with: ": -1}
JUDGED_CATEGORIES: Final[Mapping[str, int]] = {"agreed_with": 1, "disagreed_with": -1}
TABLES: Final = ("answers", "posts")
REWARDS: Final = "rewards"  # has the same rows as ``answers``

SHOWN: Final = "shown"


class FeatureFacts(TypedDict):
    """The contents of ``features.json``."""

    kind: Literal["prb_jax features"]
    format: Literal[1]
    model: str
    opened_with: dict[str, str | int | bool]
    width: int
    dtype: Literal["bfloat16", "float32"]
    part: int
    answers: int
    posts: int
    shown: NotRequired[int]
    rewards: NotRequired[bool]
    profile_posts: NotRequired[int]
    inputs: dict[str, Any]


def answer_key(prompt: Sequence[Message], response: str) -> bytes:
    """Return the digest that identifies a response to a prompt."""
    digest = blake2b(digest_size=KEY_BYTES)
    context = [message.context for message in prompt if message.context]
    for text in (
        *context,
        *(part for message in prompt for part in (message.role, message.content)),
        response,
    ):
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def shown_key(posts: Sequence[Post], prompt: Sequence[Message], response: str) -> bytes:
    """Return the digest that identifies a response to a prompt after some posts of a profile."""
    profile = [Message(post.category, post.text) for post in posts]
    return answer_key([*profile, *prompt], f"{len(profile)} posts\n{response}")


class JudgedText(NamedTuple):
    """A post in the form that methods of personalisation read: its text, or the text that it judges, and a sign.
    The sign is 1 if the user agrees with the text, -1 if the user disagrees, 0 for the user's own words."""

    text: str
    sign: int


def read_post(post: Post) -> JudgedText:
    """Return a post's text and whether the user agrees with it.

    A post of the category "agreed_with" or "disagreed_with" is a text by somebody else. So is the rest of a post that
    begins with "Agrees with: " or "Disagrees with: ". All other posts are the user's own words.
    """
    for mark, sign in JUDGED.items():
        if post.text.startswith(mark) and len(post.text) > len(mark):
            return JudgedText(post.text.removeprefix(mark), sign)
    return JudgedText(post.text, JUDGED_CATEGORIES.get(post.category, 0))


def post_key(text: str) -> bytes:
    """Return the digest that identifies a post."""
    return answer_key((), text)


@dataclass(frozen=True)
class FeatureTable:
    """Rows of features by the digests of their texts."""

    # consecutive memory-mapped arrays [n, D]; all except the last have the same length
    parts: Sequence[np.ndarray]
    rows: Mapping[bytes, int] = field(repr=False)  # the row of each digest

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, rows: Iterable[int]) -> np.ndarray:
        """Return the features of these rows, float32 [n, D]."""
        wanted = np.fromiter(rows, np.int64)
        features = np.empty((len(wanted), self.parts[0].shape[1] if self.parts else 0), np.float32)
        part_of, row_of = np.divmod(wanted, max(1, len(self.parts[0]))) if self.parts else (wanted, wanted)
        for number in np.unique(part_of):
            here = part_of == number
            features[here] = self.parts[number][row_of[here]]
        return features

    def find(self, keys: Iterable[bytes], lacking: Callable[[int], str]) -> list[int]:
        """Return the rows of digests.

        Raises:
          DataError: If a digest has no row; ``lacking`` makes the message from the index of the digest.
        """
        rows = [self.rows.get(key) for key in keys]
        if None in rows:
            raise DataError(lacking(rows.index(None)))
        return [row for row in rows if row is not None]


@dataclass(frozen=True)
class FeatureStore:
    """An open store of features.

    Attributes:
      path: Folder of the store.
      facts: Contents of ``features.json``.
      answers: Features of the responses, each with its prompt.
      posts: Features of the posts.
      rewards: The model's own reward of each row of ``answers``, width 1; None if it is not a reward model.
      shown: Rewards of responses shown with a profile, width 1; None if the store has none.
    """

    path: Path
    facts: Mapping[str, Any] = field(repr=False)
    answers: FeatureTable
    posts: FeatureTable
    rewards: FeatureTable | None = None
    shown: FeatureTable | None = None

    __repr__ = short_repr

    @property
    def width(self) -> int:
        """D, the length of a row."""
        return self.facts["width"]

    def check_inputs(self, wanted: Mapping[str, Any]) -> None:
        """Refuse a store that was written from another model or other data, or with other options.

        Args:
          wanted: Some of the inputs that ``features.json`` records, e.g. {"data": ...}.

        Raises:
          RunError: If an input differs; the message names the first such field, with both values.
        """
        recorded = {name: self.facts["inputs"].get(name) for name in wanted}
        changed = differences(recorded, dict(wanted))
        if changed:
            name, (stored, expected) = next(iter(changed.items()))
            raise RunError(
                f"{self.path}: these features are of another {name.split('.')[0]}: {name}: expected "
                f"{quote(expected)}, found {quote(stored)}; `prb features` writes features of this one"
            )

    def answer_rows(self, comparison: Comparison) -> list[int]:
        """Return the row of each response of a comparison.

        Raises:
          DataError: If a response has no features; the message names the comparison.
        """
        keys = [answer_key(comparison.prompt, text) for text in comparison.responses]
        named = f"comparison {quote(comparison.id)}: response"
        return self.answers.find(keys, lambda place: f"{named} {place} has no features in {self.path}")

    def shown_rewards(self, comparison: Comparison) -> np.ndarray | None:
        """Return the reward of each response with the profile shown, float32 [K]; None if the store has none.

        Raises:
          DataError: If a response has no such reward; the message names the comparison.
        """
        if self.shown is None:
            return None
        posts = comparison.profile[: self.facts["profile_posts"]]
        keys = [shown_key(posts, comparison.prompt, text) for text in comparison.responses]
        named = f"comparison {quote(comparison.id)}: response"
        rows = self.shown.find(
            keys, lambda place: f"{named} {place} has no reward with this profile in {self.path}"
        )
        return self.shown.read(rows)[:, 0]

    def post_rows(self, posts: Sequence[Post]) -> list[int]:
        """Return the row of each post of a profile.

        Raises:
          DataError: If a post has no features.
        """
        keys = [post_key(read_post(post).text) for post in posts]
        lacking = f"a post of a profile has no features in {self.path}"
        return self.posts.find(keys, lambda place: f"{lacking}: {quote(posts[place].text)}")


def part_name(table: str, number: int) -> str:
    """Return the name of the file of a part."""
    return f"{table}-{number:06}.npy"


def as_stored(features: np.ndarray, dtype: str) -> np.ndarray:
    """Return features in the format of the files: float32, or bfloat16 as the 16 bits of each number, uint16."""
    if dtype == "float32":
        return np.ascontiguousarray(features, np.float32)
    import ml_dtypes  # NumPy files have no bfloat16

    return np.ascontiguousarray(features.astype(ml_dtypes.bfloat16)).view(np.uint16)


def open_features(path: str | Path) -> FeatureStore:
    """Open a store of features; rows are read on demand.

    Raises:
      RunError: If the folder contains no store or an unfinished one, or if a file is missing, was changed, or has
        another shape.
    """
    folder = Path(path)
    if not (folder / FEATURES).is_file():
        raise RunError(
            f"{folder}: no {FEATURES} in it: it is unfinished, or not a folder of `prb features`; the same command "
            "finishes one that was stopped"
        )
    path, facts = folder / FEATURES, read_object(folder / FEATURES, error=RunError)
    check_schema(facts, FeatureFacts, where=str(path), error=RunError)
    for name, least in {
        "width": 1,
        "part": 1,
        "answers": 1,
        "posts": 0,
        "shown": 0,
        "profile_posts": 0,
    }.items():
        if facts.get(name, least) < least:
            raise RunError(f"{path}: field '{name}': expected {least} or more, found {facts[name]}")
    FEATURE_RUNS.read_finished(folder)
    of_rewards = facts | {"width": 1, "dtype": "float32"}
    return FeatureStore(
        folder,
        facts,
        *(_open_table(folder, name, facts) for name in TABLES),
        rewards=_open_table(folder, REWARDS, of_rewards, beside="answers") if facts.get(REWARDS) else None,
        shown=_open_table(folder, SHOWN, of_rewards) if facts.get(SHOWN) else None,
    )


def _open_table(
    folder: Path, name: str, facts: Mapping[str, Any], *, beside: str | None = None
) -> FeatureTable:
    count, dtype = facts[beside or name], facts["dtype"]
    keys = _load(folder / f"{beside or name}.keys.npy", "uint8", (count, KEY_BYTES))
    parts = []
    for number, start in enumerate(range(0, count, facts["part"])):
        shape = (min(facts["part"], count - start), facts["width"])
        part = _load(folder / part_name(name, number), "float32" if dtype == "float32" else "uint16", shape)
        if dtype != "float32":
            import ml_dtypes

            part = part.view(ml_dtypes.bfloat16)
        parts.append(part)
    return FeatureTable(parts, {row.tobytes(): place for place, row in enumerate(np.asarray(keys))})


def _load(path: Path, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    array = load_array(
        path, mapped=bool(shape[0]), error=RunError, hint="`prb features` writes it again where it is removed"
    )
    if array.dtype != dtype or array.shape != shape:
        raise RunError(
            f"{path}: expected {dtype} {list(shape)}, found {array.dtype} {list(array.shape)}; remove it, and the same "
            "`prb features` command writes it again"
        )
    return array
