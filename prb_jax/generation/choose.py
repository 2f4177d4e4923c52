"""Choose the next token from logits: rules that are arrays, so that a change of a number compiles nothing.

The rules work in the order of transformers: repetition penalty, temperature, top-k, top-p, min-p. The token is drawn by
the Gumbel-max trick with a key of its own for each row and step.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from prb_jax.data.options import Options, option
from prb_jax.errors import DataError, quote

_REMOVED = -jnp.inf


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Rules:
    """How tokens are drawn: numbers, or arrays [B, S] with a number for each row.

    Attributes:
      temperature: divides the logits; 0 takes the most probable token (greedy).
      top_k: keeps this many most probable tokens, and those that tie with the last of them; 0 keeps all.
      top_p: keeps the most probable tokens until their probabilities sum up to this; 1 keeps all.
      min_p: keeps tokens of at least this share of the largest probability; 0 keeps all.
      repetition_penalty: divides positive and multiplies negative logits of tokens that occurred before, in the
        prompt too; 1 changes nothing.
    """

    temperature: jax.Array | np.ndarray | float = 1.0
    top_k: jax.Array | np.ndarray | int = 0
    top_p: jax.Array | np.ndarray | float = 1.0
    min_p: jax.Array | np.ndarray | float = 0.0
    repetition_penalty: jax.Array | np.ndarray | float = 1.0

    def checked(self) -> Rules:
        """Return the rules as arrays of their types.

        Raises:
          DataError: a number that is out of its range; names the rule.
        """
        ranges = {
            "temperature": (self.temperature, 0.0, np.inf, "0 or more"),
            "top_k": (self.top_k, 0, np.inf, "0 or more"),
            "top_p": (self.top_p, np.nextafter(0.0, 1.0), 1.0, "more than 0 and at most 1"),
            "min_p": (self.min_p, 0.0, 1.0, "0 to 1"),
            "repetition_penalty": (
                self.repetition_penalty,
                np.nextafter(0.0, 1.0),
                np.inf,
                "a finite number above 0",
            ),
        }
        for name, (value, low, high, expected) in ranges.items():
            numbers = np.asarray(value, np.float64)
            if not (np.isfinite(numbers) & (numbers >= low) & (numbers <= high)).all():
                raise DataError(f"{name}: expected {expected}, found {quote(value)}")
        if (np.asarray(self.top_k) != np.asarray(self.top_k, np.int32)).any():
            raise DataError(f"top_k: expected a whole number, found {quote(self.top_k)}")
        floats = ("temperature", "top_p", "min_p", "repetition_penalty")
        return replace(
            self,
            top_k=np.asarray(self.top_k, np.int32),
            **{name: np.asarray(getattr(self, name), np.float32) for name in floats},
        )


@dataclass(frozen=True, kw_only=True)
class SampleOptions(Options):
    """How samples are drawn; :meth:`prb_jax.generation.policy.Policy.sample` says what each one means.

    Raises:
      DataError: a number that is out of its range.
    """

    n: int = option(1, "texts of each prompt", "N", least=1, below=2**31)
    temperature: float = option(1.0, "0 takes the most probable token", "T")
    top_k: int = option(0, "0 for all tokens (default)", "K", least=0, below=2**31)
    top_p: float = option(1.0, "1 for all tokens (default)", "P")
    min_p: float = option(0.0, "0 for all tokens (default)", "P")
    repetition_penalty: float = option(1.0, "1 changes nothing (default)", "R")
    max_new_tokens: int = option(256, "of a text", "M", least=1, below=2**31)
    stop: tuple[str, ...] = option((), "texts that end a text", "TEXT ...")
    stop_ids: tuple[int, ...] | None = option(
        None, "tokens that end a text (default: the model's)", "ID ...", least=0, flag="stop-id"
    )
    seed: int = option(0, "of the draws", "N", least=0, below=2**31)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(isinstance(text, str) and text for text in self.stop):
            raise DataError(f"stop: expected texts, none of them empty, found {quote(self.stop)}")
        if self.temperature == 0 and self.n > 1:
            raise DataError(
                f"n: expected 1 at temperature 0, found {self.n}: greedy samples of a prompt are all the same"
            )
        self.rules.checked()

    @property
    def rules(self) -> Rules:
        """The rules by which a token is drawn."""
        return Rules(**{rule.name: getattr(self, rule.name) for rule in fields(Rules)})

    def to_json(self, *, stop_ids: tuple[int, ...]) -> dict[str, Any]:
        """Return what decides the samples, JSON-ready, with the stop ids in use."""
        return asdict(self) | {"stop": list(self.stop), "stop_ids": list(stop_ids)}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Chosen:
    """The next token of each row.

    Attributes:
      token: int32 [B, S].
      logprob: float32 [B, S], its log-probability under the model as it is (temperature 1, no other rule).
      sampled_logprob: the same under the distribution that it was drawn from; 0 for a greedy choice.
    """

    token: jax.Array
    logprob: jax.Array
    sampled_logprob: jax.Array


def choose(logits: jax.Array, keys: jax.Array, seen: jax.Array, rules: Rules) -> Chosen:
    """Draw one token a row.

    Args:
      logits: float32 [B, S, V], of the model.
      keys: random keys [B, S].
      seen: bool [B, S, V], the tokens that occurred before.
      rules: how.
    """
    greedy = jnp.broadcast_to(rules.temperature, logits.shape[:-1]) == 0
    model = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    kept = filtered(logits, seen, rules)

    def draw(x: jax.Array) -> jax.Array:
        noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:], jnp.float32))(keys.reshape(-1))
        return jnp.where(greedy[..., None], x, x + noise.reshape(x.shape))

    token = jnp.argmax(lax.cond(greedy.all(), lambda x: x, draw, kept), axis=-1).astype(jnp.int32)

    def at_token(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, token[..., None], axis=-1)[..., 0]

    drawn = at_token(kept) - jax.nn.logsumexp(kept, axis=-1)
    return Chosen(token, at_token(model), jnp.where(greedy, 0.0, drawn))


def filtered(logits: jax.Array, seen: jax.Array, rules: Rules) -> jax.Array:
    """Return the logits [B, S, V] that tokens are drawn by: minus infinity where a rule leaves one out.

    At temperature 0 they are not divided. Arguments as of :func:`choose`.
    """
    shape, vocab = logits.shape[:-1], logits.shape[-1]
    wide = {name: jnp.broadcast_to(value, shape) for name, value in vars(rules).items()}
    penalty = wide["repetition_penalty"][..., None]
    punished = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    greedy = wide["temperature"] == 0
    heated = punished / jnp.where(greedy, 1.0, wide["temperature"])[..., None]
    top_k = jnp.where(wide["top_k"] == 0, vocab, wide["top_k"])
    some_tokens = (top_k < vocab).any()
    kept = lax.cond(some_tokens, lambda x: _keep(x, jnp.ones_like(x), top_k), lambda x: x, heated)
    some_mass = (wide["top_p"] < 1).any()
    kept = lax.cond(
        some_mass,
        lambda x: jnp.where(wide["top_p"][..., None] < 1, _keep(x, jax.nn.softmax(x), wide["top_p"]), x),
        lambda x: x,
        kept,
    )
    # exp(x - max) >= min_p, where the largest probability is that of the largest logit.
    floor = kept.max(axis=-1, keepdims=True) + jnp.log(wide["min_p"])[..., None]
    return jnp.where(kept >= floor, kept, _REMOVED)


def _keep(logits: jax.Array, weights: jax.Array, limit: jax.Array) -> jax.Array:
    """Logits [..., V] of the tokens that have less than ``limit`` [...] of ``weights`` above them; the others removed.

    With weights of one that is top-k, with probabilities top-p; the most probable token always stays. The threshold
    is found by bisection over the bits of float32, in 32 passes: a sort of the vocabulary takes longer.
    """
    ordered = _in_order(logits)

    def above(threshold: jax.Array) -> jax.Array:
        return jnp.where(ordered > threshold[..., None], weights, 0).sum(axis=-1)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # the smallest threshold that holds is in (low, high]
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        holds = above(middle) < limit
        return jnp.where(holds, low, middle), jnp.where(holds, middle, high)

    shape = logits.shape[:-1]
    low = jnp.full(shape, jnp.iinfo(jnp.int32).min, jnp.int32)
    _, threshold = lax.fori_loop(0, 33, halve, (low, ordered.max(axis=-1)))
    return jnp.where(ordered >= threshold[..., None], logits, _REMOVED)


def _in_order(x: jax.Array) -> jax.Array:
    """int32 with the order of float32."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)
