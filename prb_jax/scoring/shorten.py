"""Cut conversations that are too long in the default protocol, as little as possible. In this order, until they fit:

1. whole posts from the end of the ranked profile;
2. whole earlier turns of the prompt, the oldest first;
3. the start of the question, or of the system message if that is longer, word by word, because a response answers the
   end of a prompt.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from prb_jax.records.comparison import Comparison
from prb_jax.records.conversation import Message, with_context
from prb_jax.scoring.reader import Encoder, longest
from prb_jax.text.view import Visible, render_profile
from prb_jax.trees.tree import TooLongError, Tree, Truncation

ESTIMATE_SLACK = 8  # maximum error in tokens of estimates from lengths of single texts

Fits = Callable[[Sequence[Message]], bool]

SHORT = "."  # replaces a long response while the lengths of prompts are measured

LONGEST_MEAN_WORD = 24
"""Text with longer blank-separated words on average (e.g. Chinese, base64) is cut between any characters."""


@dataclass(eq=False)
class _Row:
    """State of the search for the number of posts of a comparison that does not fit with all."""

    comparison: Comparison
    posts: int  # number of posts tried
    refused: int = 0  # smallest number known to be too large
    fitting: int = -1  # largest number known to fit; -1 if 0 is not known to fit
    sequences: list[np.ndarray] = field(default_factory=list)
    """Ids of the K conversations with `fitting` posts; without posts if `fitting` is -1."""
    block_tokens: list[int] = field(default_factory=list)  # length of each post by itself


def shortened(
    encoder: Encoder,
    comparisons: Sequence[Comparison],
    shown: Sequence[int],
    tried: Sequence[list[np.ndarray]],
) -> list[Tree | TooLongError]:
    """Return the trees of comparisons that are too long, with as many posts as fit, and a shorter prompt if none fits.

    Args:
      encoder: Encoder of the run.
      comparisons: Comparisons.
      shown: Number of posts that each comparison should show.
      tried: Ids of the K conversations of each comparison with all these posts.
    """
    rows = [_Row(comparison, posts) for comparison, posts in zip(comparisons, shown, strict=True)]
    _search(encoder, rows, tried)
    return [_shortened(encoder, row, posts) for row, posts in zip(rows, shown, strict=True)]


def _search(encoder: Encoder, rows: Sequence[_Row], tried: Sequence[list[np.ndarray]]) -> None:
    """Find the largest number of posts that fits, for each row; `tried` are the ids with `posts` posts."""
    while rows:
        refused: list[_Row] = []
        for row, sequences in zip(rows, tried, strict=True):
            if encoder.fits(sequences):
                row.fitting, row.sequences = row.posts, sequences
            else:
                row.refused = row.posts
                refused.append(row)
                if row.posts == 0:
                    row.sequences = sequences
        _count_blocks(encoder, refused)
        rows = [
            row
            for row, sequences in zip(rows, tried, strict=True)
            if _choose_posts(row, longest(sequences), encoder.limit)
        ]
        if rows:
            comparisons = [row.comparison for row in rows]
            tried = encoder.encode(comparisons, [encoder.visible(row.comparison, row.posts) for row in rows])


def _count_blocks(encoder: Encoder, rows: Sequence[_Row]) -> None:
    """Set the length of each post for rows without lengths."""
    rows = [row for row in rows if not row.block_tokens]
    texts = [
        render_profile([post], 1, protocol=encoder.view.protocol) + "\n"
        for row in rows
        for post in row.comparison.profile[: row.refused]
    ]
    lengths = iter([len(ids) for ids in encoder.tokenizer.tokenize(texts)])
    for row in rows:
        row.block_tokens = [next(lengths) for _ in row.comparison.profile[: row.refused]]


def _choose_posts(row: _Row, length: int, limit: int | None) -> bool:
    """Choose the next number of posts to try from the `length` of the last try; return False when done.

    Lengths of single posts predict the total length to within a few tokens, so two or three tries find the largest
    number that fits.
    """
    if limit is None or row.refused - row.fitting <= 1:
        return False
    guess = row.posts
    if row.fitting == row.posts:
        guess += 1
        if length + row.block_tokens[row.posts] > limit + ESTIMATE_SLACK:
            return False
    else:
        while guess > 0 and length > limit:
            guess -= 1
            length -= row.block_tokens[guess]
    row.posts = min(max(guess, row.fitting + 1), row.refused - 1)
    return True


def _shortened(encoder: Encoder, row: _Row, shown: int) -> Tree | TooLongError:
    """Return the tree of a comparison with fewer posts than `shown`, and with a shorter prompt if none fits."""
    dropped = 0
    if row.fitting < 0:
        assert encoder.limit is not None
        row.fitting = 0
        found = _with_shorter_prompt(encoder, row.comparison, row.sequences, encoder.limit)
        if isinstance(found, TooLongError):
            return found
        row.sequences, dropped = found
    truncation = Truncation(posts_dropped=shown - row.fitting, prompt_tokens_dropped=dropped)
    return encoder.tree(row.comparison, row.sequences, truncation)


def shorten_prompt(messages: Sequence[Message], *, fits: Fits) -> tuple[Message, ...] | None:
    """Return the longest version of `messages` that fits, or None if none does.

    Whole earlier turns are removed first, the oldest first, always up to a user turn, so roles still alternate. Then
    the start of the question or of the system message is cut, whichever is longer, and then the start of the other. The
    last word of the question always stays; a system message can be removed entirely. Tool calls after the question and
    their results are never cut.

    Args:
      messages: An optional system message, then turns that end with the user's question or with tool results.
      fits: Returns True if the conversation with this prompt is within the limit. It must be monotone: if a prompt
        fits, shorter ones fit too.
    """
    if not messages:
        return None
    context, bare = messages[0].context, with_context(tuple(messages), "")
    system = bare[:1] if bare[0].role == "system" else ()
    turns = bare[len(system) :]
    starts = [i for i, message in enumerate(turns) if message.role == "user"]

    def latest(i: int) -> tuple[Message, ...]:
        return with_context(system + turns[starts[i] :], context)

    kept = _first(len(starts), lambda i: fits(latest(i)))
    if kept is not None:
        return latest(kept)
    question, *after = turns[starts[-1] :]

    def whole(prompt: Sequence[Message]) -> tuple[Message, ...]:
        return with_context((*prompt, *after), context)

    cut_system_first = bool(system) and len(system[0].content) > len(question.content)
    steps = (_cut_system, _cut_question) if cut_system_first else (_cut_question, _cut_system)
    prompt = (*system, question)
    for step in steps:
        prompt, fitting = step(prompt, lambda messages: fits(whole(messages)))
        if fitting:
            return whole(prompt)
    return None


def shortest_prompts(messages: Sequence[Message]) -> list[tuple[Message, ...]]:
    """Return the shortest prompts that `shorten_prompt` tries: the last word of the question, without and with the
    last word of a system message. Some templates add a default system message if there is none."""

    def last_word(message: Message) -> Message:
        return message.with_content(message.content[cut_places(message.content)[-1] :])

    if not messages:
        return [()]
    start = max(i for i, message in enumerate(messages) if message.role == "user")
    asked = (last_word(messages[start]), *messages[start + 1 :])
    with_system = [(last_word(messages[0]), *asked)] if messages[0].role == "system" else []
    return [with_context(prompt, messages[0].context) for prompt in (asked, *with_system)]


def _cut_system(prompt: tuple[Message, ...], fits: Fits) -> tuple[tuple[Message, ...], bool]:
    """Return the prompt with the longest end of its system message that fits, or without it; and whether it fits."""
    *system, question = prompt
    if not system:
        return prompt, False
    text = system[0].content
    places = cut_places(text)

    def cut(place: int) -> tuple[Message, ...]:
        return (system[0].with_content(text[place:]), question)

    kept = _first(len(places), lambda i: fits(cut(places[i])))
    if kept is not None:
        return cut(places[kept]), True
    return (question,), fits((question,))


def _cut_question(prompt: tuple[Message, ...], fits: Fits) -> tuple[tuple[Message, ...], bool]:
    """Return the prompt with the longest end of its question that fits, or its last word; and whether it fits."""
    *system, question = prompt
    places = cut_places(question.content)

    def cut(place: int) -> tuple[Message, ...]:
        return (*system, question.with_content(question.content[place:]))

    kept = _first(len(places), lambda i: fits(cut(places[i])))
    return cut(places[-1 if kept is None else kept]), kept is not None


def cut_places(text: str) -> list[int]:
    """Return the indices at which `text` can begin after a cut: its words, or any character if it has few blanks."""
    words = [match.start() for match in re.finditer(r"\S+", text)]
    if not words or len(text) > LONGEST_MEAN_WORD * len(words):
        return list(range(len(text))) or [0]
    return words


def _first(count: int, holds: Callable[[int], bool]) -> int | None:
    """Return the first of 0..count-1 for which `holds` is true; `holds` must be monotone. None if there is none."""
    if count == 0 or not holds(count - 1):
        return None
    return bisect.bisect_left(range(count - 1), True, key=holds)


def _with_shorter_prompt(
    encoder: Encoder, comparison: Comparison, without_posts: list[np.ndarray], limit: int
) -> tuple[list[np.ndarray], int] | TooLongError:
    """Return the K conversations without posts and with a shortened prompt, and the number of tokens cut.

    Long responses are encoded only once: a short response in their place measures the length of the shortest prompt.
    """
    seen, whole = encoder.visible(comparison, 0), longest(without_posts)
    encoded = {seen.prefix_messages: without_posts}

    def encode(messages: tuple[Message, ...], responses: tuple[str, ...]) -> list[np.ndarray]:
        return encoder.encode([comparison], [Visible(messages, responses)])[0]

    def fits(messages: Sequence[Message]) -> bool:
        key = tuple(messages)
        if key not in encoded:
            encoded[key] = encode(key, seen.responses)
        return longest(encoded[key]) <= limit

    def too_long(responses: Sequence[int]) -> TooLongError:
        return TooLongError(comparison, tokens=whole, responses=responses, limit=limit)

    if all(
        message.role != "user" for message in seen.prefix_messages
    ):  # responses and rendered text are never cut
        return too_long(list(map(len, without_posts)))
    if max(len(text.encode()) for text in seen.responses) > limit:
        prompt = longest(encode(seen.prefix_messages, (SHORT,)))
        shortest = shortest_prompts(seen.prefix_messages)
        room = min(longest(encode(messages, (SHORT,))) for messages in shortest)
        if whole - prompt + room > limit + ESTIMATE_SLACK:
            short = len(encoder.tokenizer.tokenize([SHORT])[0])
            return too_long([len(ids) - prompt + short for ids in without_posts])
    short_prompt = shorten_prompt(seen.prefix_messages, fits=fits)
    if short_prompt is None:
        return too_long([len(ids) for ids in encoder.tokenizer.tokenize(list(seen.responses))])
    sequences = encoded[short_prompt]
    return sequences, whole - longest(sequences)
