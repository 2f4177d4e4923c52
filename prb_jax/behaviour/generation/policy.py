"""A policy: a language model ready to sample, with its tokenizer and its weights on a mesh; and how to load it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpy.typing import DTypeLike

from prb_jax.behaviour.generation.programs import (
    Cut,
    Shape,
    Task,
    choose_shape,
    decoding_mesh,
    make_program,
    make_programs,
)
from prb_jax.behaviour.generation.prompts import Prompt, comparison_prompts, given_prompts
from prb_jax.behaviour.generation.rules import SampleOptions
from prb_jax.behaviour.generation.schedule import Drawn, collect, draw
from prb_jax.behaviour.generation.steps import Program
from prb_jax.errors import CheckpointError, DataError, quote, short_repr
from prb_jax.models.checkpoints.load import LoadReport, abstract_params, load_params
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.decoder import Params
from prb_jax.models.model import parameter_shardings
from prb_jax.models.quantization import quantization_form
from prb_jax.models.readouts.language_model import open_language_model
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.models.readouts.open_model import OpenedModel
from prb_jax.platform.sharding import check_heads
from prb_jax.records.comparison import Comparison
from prb_jax.records.options import from_flat
from prb_jax.records.reading import read_object
from prb_jax.text.tokenizer import ChatTokenizer


@dataclass(frozen=True, eq=False)
class Sample:
    """One continuation of a prompt.

    Attributes:
      text: The tokens as text, without special tokens and without the stop text.
      prompt_token_ids, token_ids: int32; the last of the token ids is the token that ended the sample.
      logprobs: float32, log-probability of each token under the unmodified model.
      sampled_logprobs: float32, log-probability of each token under the distribution it was drawn from (temperature,
        top-k, top-p, min-p, penalty).
      finish: "stop" (a stop id), "text" (a stop text) or "length".
    """

    text: str
    prompt_token_ids: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray
    sampled_logprobs: np.ndarray
    finish: str

    __repr__ = short_repr

    @property
    def logprob(self) -> float:
        """The log-probability of the whole continuation under the model."""
        return float(self.logprobs.astype(np.float64).sum())

    @property
    def sampled_logprob(self) -> float:
        """The log-probability of the whole continuation under the distribution it was drawn from."""
        return float(self.sampled_logprobs.astype(np.float64).sum())


@dataclass(frozen=True, eq=False, kw_only=True)
class Policy:
    """A causal language model. Build with :func:`prb_jax.load_policy`.

    Attributes:
      name: Folder or hub id that the policy was loaded from.
      program: Architecture, dtype and devices: everything except parameters that
        :mod:`prb_jax.behaviour.generation.steps` needs. Its functions are pure.
      params: Weights, a nested dict of arrays sharded over the mesh; layers stacked on axis 0, matrices [in, out].
      tokenizer: Tokenizer and chat template.
      stop_ids: Tokens that end a text, from the model's files.
      mesh: Devices.
      dtype: Type of weights, activations and caches; logits and log-probabilities are float32.
      quantize: Storage form of the layers' matrices, if they are quantised.
      report: Report on the checkpoint's tensors.
      source: Revision and file fingerprints.
    """

    name: str
    program: Program = field(repr=False)
    params: Params = field(repr=False)
    tokenizer: ChatTokenizer
    stop_ids: tuple[int, ...]
    mesh: Mesh
    dtype: str
    quantize: str | None = None
    report: LoadReport | None = field(default=None, repr=False)
    source: Mapping[str, Any] = field(default_factory=dict, repr=False)

    __repr__ = short_repr

    @property
    def config(self) -> DecoderConfig:
        """The architecture."""
        return self.program.config

    @property
    def context(self) -> int:
        """Maximum number of tokens that the model was made for, and for which keys in a cache keep their angles."""
        return self.config.rope_switch or self.config.max_position_embeddings

    def sample(
        self,
        prompts: str | Comparison | Sequence[Any],
        *,
        n: int = 1,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        max_new_tokens: int = 256,
        stop: Sequence[str] = (),
        stop_ids: Sequence[int] | None = None,
        seed: int = 0,
        profile_posts: int = 10,
        rows: int | None = None,
        numbers: Sequence[int] | None = None,
    ) -> list[list[Sample]]:
        """Return ``n`` samples of every prompt, in the order given.

        A sample depends on the prompt, its number, the number of the sample and the seed. It does not depend on other
        prompts, on ``rows`` or on the devices (except for ties that rounding decides).

        Args:
          prompts: Texts (a user's message each), conversations (lists of {role, content}), comparisons, or token
            ids; or a single text or comparison.
          n: Samples of each prompt.
          temperature: Divides the logits; 0 is greedy, for one sample a prompt.
          top_k, top_p, min_p: Remove improbable tokens, in this order; 0, 1 and 0 remove none.
          repetition_penalty: Makes tokens that occurred before less probable; 1 changes nothing.
          max_new_tokens: Maximum tokens of a sample.
          stop: Texts that end a sample; the sample does not include them.
          stop_ids: Tokens that end a sample, instead of the ids in the model's files.
          seed: Seed of the draws.
          profile_posts: Maximum number of posts to show from a comparison's profile.
          rows: Number of samples to draw at a time; chosen for the machine by default.
          numbers: Numbers of the prompts, each 0 to 2**31 - 1; their positions by default.

        Raises:
          DataError: a prompt is too long or cannot be read, a number is out of range, or no stop is defined.
        """
        ids = None if stop_ids is None else tuple(map(int, stop_ids))
        options = from_flat(SampleOptions, {**locals(), "stop": tuple(stop), "stop_ids": ids})
        single = isinstance(prompts, str | Comparison)
        read = given_prompts(
            [prompts] if single else prompts,
            self.tokenizer,
            profile_posts=profile_posts,
            limit=self.limit(options),
            vocab_size=self.config.vocab_size,
        )
        drawn = collect(self.draw(read, options, rows=rows, numbers=numbers))
        return [
            [self.as_sample(prompt, one, options) for one in samples]
            for prompt, samples in zip(read, drawn, strict=True)
        ]

    def limit(self, options: SampleOptions, max_length: int | None = None) -> int:
        """Return the maximum tokens of a prompt that leave room in the context for the new tokens.

        Args:
          options: How samples are drawn.
          max_length: Limit on prompt and sample together, if below the model's context.

        Raises:
          DataError: ``max_length`` exceeds the context, or leaves no room for a prompt.
        """
        length = self.context if max_length is None else max_length
        if length > self.context:
            raise DataError(
                f"max_length: expected at most the {self.context} tokens (max_position_embeddings) that {self.name} "
                f"was made for, found {length}"
            )
        if options.max_new_tokens >= length:
            raise DataError(
                f"max_new_tokens: expected less than the {length} tokens of {self.name}'s context, found "
                f"{options.max_new_tokens}: there is no room for a prompt"
            )
        return length - options.max_new_tokens

    def encode(self, comparisons: Sequence[Comparison], *, profile_posts: int, limit: int) -> list[Prompt]:
        """Return the prompts of comparisons; see :func:`prb_jax.behaviour.generation.prompts.comparison_prompts`."""
        return comparison_prompts(comparisons, self.tokenizer, profile_posts=profile_posts, limit=limit)

    def stops(self, options: SampleOptions) -> tuple[int, ...]:
        """Return the stop ids in use.

        Raises:
          DataError: an id is outside the vocabulary, or nothing could end a sample.
        """
        ids = self.stop_ids if options.stop_ids is None else options.stop_ids
        if bad := [number for number in ids if not 0 <= number < self.config.vocab_size]:
            raise DataError(f"stop_ids: expected ids of 0 to {self.config.vocab_size - 1}, found {bad[0]}")
        if not ids and not options.stop and options.stop_ids is None:
            raise DataError(
                f"{self.name}: no stop token: neither generation_config.json, config.json nor the tokenizer names one; "
                "name one with --stop-id ID, or a text with --stop TEXT (stop_ids=[] draws all tokens)"
            )
        return ids

    def draw(
        self,
        prompts: Sequence[Prompt],
        options: SampleOptions,
        *,
        rows: int | None = None,
        skip: Callable[[range], bool] = lambda unit: False,
        numbers: Sequence[int] | None = None,
    ) -> Iterator[list[Drawn]]:
        """Draw samples of prompts, some at a time; see :func:`prb_jax.behaviour.generation.schedule.draw`."""
        if prompts:
            programs = make_programs(self.program, self.shape(prompts, options, rows))
            yield from draw(programs, self.params, self.task(prompts, options, numbers=numbers), skip=skip)

    def task(self, prompts: Sequence[Prompt], options: SampleOptions, **more: Any) -> Task:
        """Return the task that :meth:`draw` draws; ``more`` sets further fields of the task."""
        ids = [prompt.ids for prompt in prompts]
        return Task(
            prompts=ids, options=options, stop_ids=self.stops(options), cut=self._cut(options.stop), **more
        )

    def shape(self, prompts: Sequence[Prompt], options: SampleOptions, rows: int | None = None) -> Shape:
        """Return the static sizes with which :meth:`draw` draws these samples."""
        longest = max(len(prompt.ids) for prompt in prompts)
        return choose_shape(self.program, options, longest=longest, prompts=len(prompts), rows=rows)

    def as_sample(self, prompt: Prompt, drawn: Drawn, options: SampleOptions) -> Sample:
        """Return drawn tokens with their text."""
        text = self.decode(drawn.tokens)
        if drawn.finish == "text":
            text = text[: min(place for stop in options.stop if (place := text.find(stop)) >= 0)]
        return Sample(text, prompt.ids, drawn.tokens, drawn.logprobs, drawn.sampled_logprobs, drawn.finish)

    def decode(self, ids: np.ndarray, *, special_tokens: bool = False) -> str:
        """Return token ids as text, by default without special tokens."""
        return self.tokenizer.tokenizer.decode(
            ids.tolist(), skip_special_tokens=not special_tokens, clean_up_tokenization_spaces=False
        )

    def _cut(self, texts: Sequence[str]) -> Cut | None:
        if not texts:
            return None

        def holds(ids: np.ndarray) -> bool:
            text = self.decode(ids)
            return any(stop in text for stop in texts)

        def cut(ids: np.ndarray) -> int | None:
            return next(size for size in range(1, len(ids) + 1) if holds(ids[:size])) if holds(ids) else None

        return cut

    def identity(self) -> dict[str, Any]:
        """Return everything about the policy that determines its samples, JSON-ready."""
        return {
            "name": self.name,
            **self.source,
            "architecture": self.config.architectures[0],
            "dtype": self.dtype,
            **({} if self.quantize is None else {"quantize": self.quantize}),
            "template": self.tokenizer.template_hash,
        }


def load_policy(
    model: str | Path,
    *,
    mesh: str | Mesh | None = None,
    dtype: DTypeLike | None = None,
    revision: str | None = None,
    base: str | Path | None = None,
    chat_template: str | None = None,
    tokenizer: str | Path | None = None,
    quantize: str | None = None,
    attention: str = "auto",
) -> Policy:
    """Load a causal language model from a Hugging Face folder or hub id, to sample texts from it.

    Args:
      model: Folder with ``config.json`` of a ``*ForCausalLM``, safetensors and tokenizer files; or a hub id.
      mesh: Same as for :func:`prb_jax.load`; None splits heads and widths over as many devices as divide the model.
      dtype, revision, base, chat_template, tokenizer, quantize, attention: Same as for :func:`prb_jax.load`.

    Raises:
      CheckpointError: the model is not a causal language model, or is not usable as it is; names the file, tensor or
        field.
      MeshError: the mesh does not fit the devices or the model.
    """
    return open_policy(model, from_flat(LoadOptions, locals()))


def open_policy(model: str | Path | Policy, options: LoadOptions) -> Policy:
    """Return the policy, loaded if given by name; raises the errors of :func:`load_policy`."""
    if isinstance(model, Policy):
        return model
    opened = open_language_model(model, options)
    config, quantize, dtype = opened.decoder.config, options.quantize, jnp.dtype(opened.dtype)
    mesh = opened.mesh if options.mesh is not None else decoding_mesh(config, opened.mesh)
    if quantize is not None:
        quantization_form(quantize, mesh=mesh)
    bare = bare_policy(opened, mesh=mesh, draws_on=mesh)
    shardings = parameter_shardings(abstract_params(config, quantize=quantize), mesh, config=config)
    loaded = load_params(opened.folder.path, config, dtype=dtype, shardings=shardings, quantize=quantize)
    return replace(bare, params=loaded.params, quantize=quantize, report=loaded.report)


def bare_policy(opened: OpenedModel, *, mesh: Mesh, draws_on: Mesh, lora_scale: float = 1.0) -> Policy:
    """Return the policy of an opened language model, without weights.

    Args:
      opened: The model.
      mesh: Mesh of its weights.
      draws_on: Mesh of the program.
      lora_scale: Scale of the adapters among its weights.

    Raises:
      CheckpointError: the stop tokens cannot be read, or these devices do not support the chosen attention.
      MeshError: the mesh does not divide the heads.
    """
    config, chat = opened.decoder.config, opened.chat()
    check_heads(mesh, heads=config.head_counts)
    return Policy(
        name=opened.name,
        stop_ids=read_stop_ids(opened.folder.path, chat, raw=config.original),
        program=make_program(
            config,
            mesh=draws_on,
            dtype=jnp.dtype(opened.dtype),
            attention=opened.options.attention,
            lora_scale=lora_scale,
        ),
        params={},
        tokenizer=chat,
        mesh=mesh,
        dtype=opened.dtype,
        source=opened.source,
    )


def read_stop_ids(folder: Path, tokenizer: ChatTokenizer, *, raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tokens that end a text: from ``generation_config.json``, else ``config.json``, else the tokenizer.

    Raises:
      CheckpointError: the file cannot be read, or the field is neither an id nor a list of ids.
    """
    path = folder / "generation_config.json"
    generation = read_object(path, error=CheckpointError) if path.exists() else {}
    for where, fields in ((path, generation), (folder / "config.json", raw)):
        value = fields.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(number, int) and not isinstance(number, bool) for number in ids):
            raise CheckpointError(f"{where}: field 'eos_token_id': expected ids, found {quote(value)}")
        return tuple(ids)
    return () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
