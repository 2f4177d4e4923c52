"""One way to open a model: everything that is known of a reward model or a language model before a weight is read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh

from prb_jax.errors import CheckpointError, quote
from prb_jax.models.checkpoints.locate import ModelFolder, describe, locate
from prb_jax.models.checkpoints.weight_index import index_folder
from prb_jax.models.config.decoder import parse_config, read_raw_config
from prb_jax.models.config.families import FAMILIES, is_encoder, refuse_encoder
from prb_jax.models.config.fields import choose_dtype
from prb_jax.models.head import LanguageHead
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.models.readouts.resolve import ResolvedModel, resolve_model
from prb_jax.models.readouts.row import ModelRow
from prb_jax.models.readouts.rules import PAPER_READOUT, choose_readout
from prb_jax.platform.sharding import make_mesh
from prb_jax.seams import get
from prb_jax.text.tokenizer import ChatTokenizer, load_tokenizer

if TYPE_CHECKING:
    from prb_jax.models.checkpoints.encoder_folder import EncoderFolder
    from prb_jax.models.model import Config
    from prb_jax.text.pair_tokenizer import PairTokenizer

LANGUAGE_MODEL = ModelRow(name="language-model", models=(), head=LanguageHead())
"""The row of a ``*ForCausalLM``; it is in no table, for it gives no reward."""


@dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """A model before its weights are read. Build with :func:`open_model`."""

    folder: ModelFolder  # where it lies
    options: LoadOptions  # how it was asked for
    body: ResolvedModel | EncoderFolder  # the decoder, or the encoder with its tensors
    row: ModelRow  # of the table of reward models
    # the rule that turns the outputs of the head into one reward, see
    # :func:`prb_jax.models.readouts.rules.choose_readout`
    labels: str
    # False for a head with several labels where nobody named the one that is the reward: ``labels`` is then the
    # rule of the paper protocol
    labels_named: bool

    @property
    def name(self) -> str:
        """What the user calls it."""
        return self.folder.name

    @property
    def config(self) -> Config:
        """The architecture."""
        return self.body.config

    @property
    def decoder(self) -> ResolvedModel:
        """The body of a model that has to be a decoder; CheckpointError for an encoder."""
        if not isinstance(self.body, ResolvedModel):
            refuse_encoder(self.config.original, where=str(self.folder.path / "config.json"))
        assert isinstance(self.body, ResolvedModel)
        return self.body

    @property
    def encoder(self) -> EncoderFolder:
        """The body of a model that is an encoder."""
        assert not isinstance(self.body, ResolvedModel)
        return self.body

    @property
    def readout(self) -> str:
        """The read-out by name, as ``--readout`` takes it."""
        if isinstance(self.body, ResolvedModel):
            return self.body.readout or self.labels
        return self.row.name if self.labels == "logit" else self.labels

    @cached_property
    def dtype(self) -> str:
        """The dtype of weights and activations: as asked for, or that of the checkpoint."""
        return choose_dtype(self.options.dtype, self.config.torch_dtype, where=self.name)

    @cached_property
    def mesh(self) -> Mesh:
        """The devices."""
        return self.options.mesh if isinstance(self.options.mesh, Mesh) else make_mesh(self.options.mesh)

    @cached_property
    def tokenizer_folder(self) -> ModelFolder:
        """The folder of the tokenizer: the model's own, or the one that the user named."""
        return self.folder if self.options.tokenizer is None else locate(self.options.tokenizer)

    @cached_property
    def source(self) -> dict[str, Any]:
        """Revision and file fingerprints, of another tokenizer too, for ``run.json``."""
        named = self.options.tokenizer is not None
        return describe(self.folder) | ({"tokenizer": describe(self.tokenizer_folder)} if named else {})

    def tokenizer(self) -> ChatTokenizer | PairTokenizer:
        """Load the tokenizer, under the rules of the model's read-out.

        Raises:
          CheckpointError: it cannot be loaded, or is another model's.
        """
        return self.chat() if isinstance(self.body, ResolvedModel) else self.pairs()

    def chat(self) -> ChatTokenizer:
        """Load the tokenizer of a decoder; errors as of :meth:`tokenizer`.

        Tokens added to it may lie beyond the embeddings (a padding token often does): a conversation that holds one is
        refused where it occurs.
        """
        decoder, template = self.decoder, self.options.chat_template
        chat = load_tokenizer(self.tokenizer_folder.path, chat_template=template, rules=decoder.text)
        rows, top = decoder.config.vocab_size, chat.largest_plain_id
        if top >= rows:
            raise CheckpointError(
                f"{chat.name}: the vocabulary has ids up to {top}, but {self.name} has only {rows} embeddings: this is "
                "not the tokenizer of this model; name its own with --tokenizer"
            )
        return chat

    def pairs(self) -> PairTokenizer:
        """Load the tokenizer of an encoder."""
        return get("encoder", "tokenizer").value(self.tokenizer_folder.path)


def open_model(
    model: str | Path | ModelFolder, options: LoadOptions, *, new_head: bool = False
) -> OpenedModel:
    """Open a reward model; headers of weights may be read, and no weights.

    Args:
      model: what :func:`prb_jax.load` takes, but for the baselines; or a folder that was located.
      options: the user's choices.
      new_head: a decoder without a usable linear head gets a new one, see
        :func:`prb_jax.models.readouts.resolve.resolve_model`.

    Raises:
      CheckpointError: what is there cannot be used as it is; the message names file, tensor or field.
    """
    folder = _located(model, options)
    if is_encoder(read_raw_config(folder.path)):
        body, row, rule = get("encoder", "open").value(folder, options)
        named = True  # the paper protocol reads no pairs
    else:
        body = resolve_model(folder.path, name=folder.name, readout=options.readout, new_head=new_head)
        row, rule = body.row, body.rule
        named = rule is not None or body.config.num_labels == 1
    rule = rule if named else PAPER_READOUT
    labels = choose_readout(rule, num_labels=body.config.num_labels, where=folder.name)
    return OpenedModel(folder=folder, options=options, body=body, row=row, labels=labels, labels_named=named)


def _located(model: str | Path | ModelFolder, options: LoadOptions) -> ModelFolder:
    return (
        model
        if isinstance(model, ModelFolder)
        else locate(model, revision=options.revision, base=options.base)
    )


def open_language_model(model: str | Path | ModelFolder, options: LoadOptions) -> OpenedModel:
    """Open a ``*ForCausalLM``; headers of weights are read, and no weights.

    Args:
      model: a folder or hub id.
      options: the user's choices; ``readout`` has no meaning here.

    Raises:
      CheckpointError: it is no causal language model, or cannot be used as it is.
    """
    folder = _located(model, options)
    where, raw = str(folder.path / "config.json"), read_raw_config(folder.path)
    if is_encoder(raw):
        raise CheckpointError(
            f"{where}: expected a causal language model, found the encoder {raw['model_type']}"
        )
    config = parse_config(raw, where=where)
    expected, found = FAMILIES[config.model_type].language_model, config.architectures[:1]
    if found != (expected,):
        raise CheckpointError(
            f"{where}: architectures: expected {quote(expected)}, found {quote(found[0] if found else None)}: a policy "
            "needs a causal head, which gives logits of the whole vocabulary"
        )
    stored = {name: tensor.shape for name, tensor in index_folder(folder.path).tensors.items()}
    facts = {
        "tie_word_embeddings": config.tie_word_embeddings,
        "final_logit_softcapping": config.final_logit_softcapping,
    }
    head = LanguageHead().bound(stored, facts, where=str(folder.path), what=LANGUAGE_MODEL.name)
    body = ResolvedModel(replace(config, head=head), LANGUAGE_MODEL)
    return OpenedModel(
        folder=folder, options=options, body=body, row=LANGUAGE_MODEL, labels="logit", labels_named=True
    )


def open_reward_or_language_model(
    model: str | Path | ModelFolder, options: LoadOptions
) -> tuple[OpenedModel, str]:
    """Open a reward model; or, where the model is only a ``*ForCausalLM``, the language model with the reason why it is
    not a reward model.

    Raises:
      CheckpointError: it is neither, or cannot be used as it is.
    """
    folder = _located(model, options)
    raw = read_raw_config(folder.path)
    family = FAMILIES.get(str(raw.get("model_type")))
    causal = family is not None and (raw.get("architectures") or [None])[0] == family.language_model
    try:
        return open_model(folder, options), ""
    except CheckpointError as error:
        if not causal or options.readout is not None:
            raise
        return open_language_model(folder, options), str(error)
