"""One way to open a model: everything that is known of it before a weight is read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh

from prb_jax.errors import CheckpointError
from prb_jax.models.checkpoints.locate import ModelFolder, describe, locate
from prb_jax.models.config.decoder import read_raw_config
from prb_jax.models.config.families import is_encoder, refuse_encoder
from prb_jax.models.config.fields import choose_dtype
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.models.readouts.resolve import ResolvedModel, resolve_model
from prb_jax.models.readouts.row import ModelRow
from prb_jax.models.readouts.rules import PAPER_READOUT, choose_readout
from prb_jax.platform.sharding import as_mesh
from prb_jax.seams import get
from prb_jax.text.tokenizer import ChatTokenizer, load_tokenizer

if TYPE_CHECKING:
    from prb_jax.models.checkpoints.encoder_folder import EncoderFolder
    from prb_jax.models.model import Config
    from prb_jax.text.pair_tokenizer import PairTokenizer


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
        return as_mesh(self.options.mesh)

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
    """Open a reward model; headers of weights may be read, and no weights.

    Args:
      model: what :func:`prb_jax.load` takes, but for the baselines; or a folder that was located.
      options: the user's choices.
      new_head: a decoder without a usable linear head gets a new one, see
        :func:`prb_jax.models.readouts.resolve.resolve_model`.

    Raises:
      CheckpointError: what is there cannot be used as it is; the message names file, tensor or field.
    """
    folder = located(model, options)
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


def located(model: str | Path | ModelFolder, options: LoadOptions) -> ModelFolder:
    """Return the folder of a model, located if it is a name."""
    if isinstance(model, ModelFolder):
        return model
    return locate(model, revision=options.revision, base=options.base)
