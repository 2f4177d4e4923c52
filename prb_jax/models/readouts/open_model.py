"""Opening of a model: its configuration, its read-out and everything else that is known before weights are read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh

from prb_jax.errors import CheckpointError
from prb_jax.models.checkpoints.locate import ModelFolder, describe, locate
from prb_jax.models.config.decoder import DecoderConfig, parse_config, read_raw_config, refuse_language_model
from prb_jax.models.config.family import is_encoder, refuse_encoder
from prb_jax.models.config.fields import FieldReader, choose_dtype
from prb_jax.models.head import PAPER_READOUT, READOUTS, Linear, choose_readout
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.platform.sharding import as_mesh
from prb_jax.seams import get
from prb_jax.text.open_tokenizer import load_tokenizer
from prb_jax.text.template import TextRules
from prb_jax.text.tokenizer import ChatTokenizer

if TYPE_CHECKING:
    from prb_jax.models.checkpoints.encoder_folder import EncoderFolder
    from prb_jax.models.model import Config
    from prb_jax.models.readouts.row import ModelRow
    from prb_jax.text.pair_tokenizer import PairTokenizer


@dataclass(frozen=True)
class ResolvedModel:
    """Model in a folder."""

    config: DecoderConfig  # decoder with its head and tensor names
    row: ModelRow  # matching row of the table
    # rule for the reward, if the user named one of :data:`prb_jax.models.head.READOUTS`
    rule: str | None = None
    # True if the checkpoint's head is ignored and the head of the configuration must be initialised
    new_head: bool = False

    @property
    def readout(self) -> str | None:
        """Name of a non-linear read-out, in the form of ``--readout``; None for a linear one, which has rules
        instead."""
        head = self.config.head
        if together := getattr(head, "together", None):
            return f"{self.row.name}:{together}"
        return None if isinstance(head, Linear) else self.row.name

    @property
    def text(self) -> TextRules:
        """Text rules in addition to the chat template."""
        if self.row.append_field is None:
            return self.row.text
        fields = FieldReader(self.config.original, f"{self.row.name}: config.json")
        if not fields.has(self.row.append_field):
            return self.row.text
        given = fields.integer(self.row.append_field, minimum=0, maximum=2**31 - 1)
        return replace(self.row.text, append_id=given)


def resolve_model(
    folder: str | Path, *, name: str = "", readout: str | None = None, new_head: bool = False
) -> ResolvedModel:
    """Return the configuration of a model folder with its read-out.

    Candidates are, in this order: the row named by ``readout``; a row recognised only by the model's name; the first
    row with classes, tensors and fields of the folder; a ``*ForSequenceClassification``.

    Args:
      folder: Folder with ``config.json`` and weights.
      name: Name given by the user: a hub id, or the folder.
      readout: Row of the table; row of a process model with the reduction of steps, e.g. ``qwen2-prm:min``;
        ``steps:ID`` or ``steps:ID:min`` for two labels at every token with this id;
        ``vocabulary:ID``, ``vocabulary:ID,ID``, ``vocabulary:ID=NUMBER,ID=NUMBER,...``; or a rule for several labels.
      new_head: If True, open a model without a linear head of one output with such a head, to be initialised later.

    Raises:
      CheckpointError: The read-out or architecture is unknown, or the head is missing or does not fit; the message
        names the tensor or field and the remedy.
    """
    where = str(Path(folder) / "config.json")
    raw = read_raw_config(folder)
    refuse_encoder(raw, where=where)
    rule = readout if readout in READOUTS else None
    asked = None if readout == rule else get("models", "named readout").value(readout)
    found = get("models", "recognised").value(Path(folder), raw, name=name or str(folder), asked=asked)
    try:
        if found.as_written:
            config = parse_config(raw, where=where)
            refuse_language_model(config, where=where)
        else:
            config = found.configured()
    except CheckpointError as error:
        if new_head:
            return found.with_new_head(None)
        raise found.explained(error) from None
    if new_head and not (config.num_labels == 1 and found.has_one_row(config)):
        return found.with_new_head(config.head)
    return ResolvedModel(config, found.row, rule)


@dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """A model before its weights are read. Build with :func:`open_model`."""

    folder: ModelFolder  # location of the files
    options: LoadOptions  # options of the user
    body: ResolvedModel | EncoderFolder  # decoder, or encoder with its tensors
    row: ModelRow  # row of the table of reward models
    # rule that reduces the outputs of the head to one reward; see
    # :func:`prb_jax.models.head.choose_readout`
    labels: str
    # False for a head with several labels without a named rule: ``labels`` is then the rule of the paper protocol
    labels_named: bool

    @property
    def name(self) -> str:
        """Name given by the user."""
        return self.folder.name

    @property
    def config(self) -> Config:
        """Architecture of the model."""
        return self.body.config

    @property
    def decoder(self) -> ResolvedModel:
        """Body of a decoder; CheckpointError for an encoder."""
        if not isinstance(self.body, ResolvedModel):
            refuse_encoder(self.config.original, where=str(self.folder.path / "config.json"))
        assert isinstance(self.body, ResolvedModel)
        return self.body

    @property
    def encoder(self) -> EncoderFolder:
        """Body of an encoder."""
        assert not isinstance(self.body, ResolvedModel)
        return self.body

    @property
    def readout(self) -> str:
        """Name of the read-out, in the form of ``--readout``."""
        if isinstance(self.body, ResolvedModel):
            return self.body.readout or self.labels
        return self.row.name if self.labels == "logit" else self.labels

    @cached_property
    def dtype(self) -> str:
        """Dtype of weights and activations: the requested one, or the dtype of the checkpoint."""
        return choose_dtype(self.options.dtype, self.config.torch_dtype, where=self.name)

    @cached_property
    def mesh(self) -> Mesh:
        """Mesh of devices."""
        return as_mesh(self.options.mesh)

    @cached_property
    def tokenizer_folder(self) -> ModelFolder:
        """Folder of the tokenizer: the model's folder, or the one named by the user."""
        return self.folder if self.options.tokenizer is None else locate(self.options.tokenizer)

    @cached_property
    def source(self) -> dict[str, Any]:
        """Revision, file fingerprints (also of a separate tokenizer) and packages of plug-ins, for ``run.json``."""
        named = self.options.tokenizer is not None
        origins = {
            "backbone": get("models", "origin of family").value(self.config.model_type),
            "readout": self.row.origin,
        }
        plugins = {kind: origin for kind, origin in origins.items() if origin}
        return (
            describe(self.folder)
            | ({"tokenizer": describe(self.tokenizer_folder)} if named else {})
            | ({"plugins": plugins} if plugins else {})
        )

    def tokenizer(self) -> ChatTokenizer | PairTokenizer:
        """Load the tokenizer with the text rules of the model's read-out.

        Raises:
          CheckpointError: The tokenizer cannot be loaded, or belongs to another model.
        """
        return self.chat() if isinstance(self.body, ResolvedModel) else self.pairs()

    def chat(self) -> ChatTokenizer:
        """Load the tokenizer of a decoder; for errors see :meth:`tokenizer`.

        Added tokens, often a padding token, may have ids beyond the embeddings. A conversation that contains such a
        token is refused when it is read.
        """
        decoder, options = self.decoder, self.options
        chat = load_tokenizer(
            self.tokenizer_folder.path,
            chat_template=options.chat_template,
            template_variables=options.template_variables,
            rules=decoder.text,
        )
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
    """Open a reward model; may read headers of weight files but no weights.

    Args:
      model: Model as for :func:`prb_jax.load`, except baselines; or a located folder.
      options: Options of the user.
      new_head: If True, a decoder without a usable linear head gets a new one; see
        :func:`prb_jax.models.readouts.open_model.resolve_model`.

    Raises:
      CheckpointError: The model cannot be used; the message names file, tensor or field.
    """
    folder = located(model, options)
    if is_encoder(read_raw_config(folder.path)):
        body, row, rule = get("encoder", "open").value(folder, options)
        named = True  # the paper protocol does not support pairs
    else:
        body = resolve_model(folder.path, name=folder.name, readout=options.readout, new_head=new_head)
        row, rule = body.row, body.rule
        named = rule is not None or body.config.num_labels == 1
    rule = rule if named else PAPER_READOUT
    labels = choose_readout(rule, num_labels=body.config.num_labels, where=folder.name)
    return OpenedModel(folder=folder, options=options, body=body, row=row, labels=labels, labels_named=named)


def located(model: str | Path | ModelFolder, options: LoadOptions) -> ModelFolder:
    """Return the folder of a model, located if it is a name."""
    if isinstance(model, ModelFolder):
        return model
    return locate(model, revision=options.revision, base=options.base)
