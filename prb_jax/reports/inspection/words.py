"""Describe the parts of a checkpoint in words, and the effect of a length limit on comparisons before scoring."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prb_jax.errors import counted, listed, quote
from prb_jax.models.checkpoints.adapter_folder import describe_adapter
from prb_jax.models.checkpoints.load import LoadReport
from prb_jax.models.checkpoints.locate import ModelFolder
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.config.encoder import EncoderConfig
from prb_jax.models.config.family import RECURRENT
from prb_jax.models.head import Linear
from prb_jax.models.layers import RopeConfig
from prb_jax.models.readouts.gated import Gated
from prb_jax.models.readouts.heads import Mlp, Steps
from prb_jax.models.readouts.open_model import ResolvedModel
from prb_jax.models.readouts.text_encoder import Pooling
from prb_jax.models.vocabulary_heads import LanguageHead, Vocabulary
from prb_jax.records.comparison import Comparison
from prb_jax.scoring.reader import Reader
from prb_jax.text.trained_view import read_trained_view
from prb_jax.text.view import TRAINED_VIEW, TextProtocol, View, choose_view
from prb_jax.trees.tree import TooLongError, Tree

_NO_LIMIT = 2**31 - 1


def model_facts(
    folder: ModelFolder, config: DecoderConfig | EncoderConfig, weights: LoadReport
) -> dict[str, str]:
    """Return name, architecture and parameter count."""
    return {
        "model": folder.name + (f" at {folder.revision}" if folder.revision else ""),
        **({"adapter": adapter} if (adapter := describe_adapter(folder.path)) else {}),
        "architecture": ", ".join(config.architectures) or config.model_type,
        "parameters": f"{weights.parameters:,}",
    }


def view_fact(folder: ModelFolder) -> dict[str, str]:
    """Return the default view of a comparison for a model."""
    trained = read_trained_view(folder.path)
    why = f"general defaults: there is no {TRAINED_VIEW} of a training run"
    if trained is not None:
        why = f"as it was trained: method {trained.method}, posts {trained.profile_order}"
    return {"scored with": f"{choose_view(trained).view} ({why})"}


def language_facts(head: LanguageHead, stop_ids: tuple[int, ...]) -> dict[str, str]:
    """Return the uses of a language model, and how its texts end."""
    ids = f"ids {', '.join(map(str, stop_ids))}"
    return {
        "kind": "a language model: prb sample, judge, guide and ppo take it",
        "logits": "from the input embeddings" if head.tied else "from a separate matrix (lm_head)",
        "a text ends at": ids if stop_ids else "the longest length: no id ends it",
    }


def files_fact(weights: LoadReport) -> dict[str, str]:
    """Return its files, and the tensors in use."""
    dtypes = [f"{count} {dtype}" for dtype, count in sorted(weights.dtypes.items())]
    told = {"read otherwise": "\n".join(weights.told)} if weights.told else {}
    return {"weights": f"{counted(len(weights.files), 'file')}; tensors used: {', '.join(dtypes)}", **told}


def ignored_facts(config: DecoderConfig | EncoderConfig, weights: LoadReport) -> dict[str, str]:
    """Return the unused tensors and config keys."""
    ignored = [f"{key}: {reason}" for key, reason in weights.ignored_keys.items()]
    return {
        "tensors ignored": "\n".join(ignored) or "none",
        "config ignored": ", ".join(config.ignored_keys) or "none",
    }


def memory(weights: LoadReport, dtype: str) -> str:
    """Return the bytes of all parameters, before and after quantising."""
    before = f"{weights.bytes_unquantized:,} bytes in {dtype}"
    return before if weights.quantize is None else f"{before}, {weights.bytes_held:,} in {weights.quantize}"


def reading(resolved: ResolvedModel, rule: str) -> str:
    """Describe the head in words."""
    head = resolved.config.head
    if isinstance(head, Linear):
        return f"linear, at the last token, {rule}"
    if isinstance(head, Mlp):
        return f"{len(head.stack.layers)} linear layers, {head.stack.activation} between, at the last token"
    if isinstance(head, Vocabulary):
        cap = "" if head.softcap is None else f", logits capped at {head.softcap:g}"
        if head.numbers:
            of = ", ".join(f"{number:g}" for number in head.numbers)
            return f"expectation over the tokens {list(head.tokens)} for {of} at the last token{cap}"
        if len(head.tokens) == 1:
            return f"logit of token {head.tokens[0]} at the last token{cap}"
        return f"probability of token {head.tokens[0]} against {head.tokens[1]} at the last token{cap}"
    if isinstance(head, Steps):
        others = ", ".join(f"{resolved.row.name}:{way}" for way in head.ways if way != head.together)
        marker = repr(head.marker_text) if head.marker_text else f"token {head.marker}"
        step = f"probability of a good step at every {marker}, the {head.together} of them"
        return f"{step} (others by --readout {others})"
    assert isinstance(head, Gated)
    count = head.objectives.outputs // int(head.per_objective)
    values = {
        "one": "",
        "mean": f", each the mean of {head.per_objective} quantiles",
        "first": ", each the mean of a normal distribution",
        "bins": f", each the expectation over {head.per_objective} bins",
    }[head.value]
    if head.gate is None:
        return f"{count} objectives{values}, at the last token, mixed by fixed weights"
    place = f"at the last ids {list(head.needs)}" if head.needs else "at the last token"
    return f"{count} objectives{values}, at the last token, mixed by a gate read {place}"


def shape(config: DecoderConfig) -> str:
    experts, mlp = config.experts, f"mlp {config.intermediate_size:,}"
    if experts is not None:
        mlp = f"{experts.count} experts of {experts.size:,}, {experts.chosen} a token"
        mlp += f" and one of {experts.shared:,} for all" if experts.shared else ""
        if experts.dense:
            mlp += f"; {len(experts.dense)} layers with one mlp of {config.intermediate_size:,}"
    return (
        f"{counted(config.num_hidden_layers, 'layer')}, width {config.hidden_size:,}, "
        f"{config.num_attention_heads} heads and {config.num_key_value_heads} key-value heads of "
        f"{config.head_dim}, {mlp} ({config.hidden_activation})"
    )


def attention(config: DecoderConfig) -> str:
    sliding, layers, window = sum(config.layer_windows), config.num_hidden_layers, config.sliding_window
    text = "full"
    if sliding and window is not None and window < config.max_position_embeddings:
        text = f"every layer sees {window:,} tokens"
        if sliding < layers:
            text = f"{sliding} of {layers} layers see {window:,} tokens, the others all"
    if config.qk_norm:
        text += "; q and k normalised" + (" over all heads" if config.qk_norm == "width" else "")
    if config.attention_gate:
        text += "; its output is gated"
    if (sizes := config.recurrence) is not None:
        text += (
            f"; {config.layer_mixers.count(RECURRENT)} of {layers} layers recurrent (gated delta rule): "
            f"{sizes.key_heads} heads of queries and keys of {sizes.key_dim}, {sizes.value_heads} of values of "
            f"{sizes.value_dim}"
        )
    if config.attn_logit_softcapping:
        text += f"; logits capped at {config.attn_logit_softcapping:g}"
    return text


def rope(config: DecoderConfig) -> str:
    def told(rope: RopeConfig) -> str:
        text = f"{rope.rope_type}, theta {rope.theta:,.0f}" + (
            f", factor {rope.factor:g}" if rope.factor != 1 else ""
        )
        if rope.rotary_dim != config.head_dim:
            text += f", {rope.rotary_dim} of {config.head_dim} channels"
        if rope.long_factor and config.rope_switch is not None:
            text += f", other factors for conversations of more than {config.rope_switch:,} tokens"
        if rope.query_growth:
            text += f", queries grow every {rope.original_max_position_embeddings:,} tokens"
        return text

    full, sliding = config.rope
    text = told(full) + (f"; sliding layers {told(sliding)}" if sliding is not None else "")
    if unrotated := config.layer_rotates.count(False):
        text += f"; {unrotated} of {config.num_hidden_layers} layers without"
    return text


def encoder_attention(config: EncoderConfig) -> str:
    said = ["in both directions"]
    if config.absolute_positions:
        said.append("learned positions")
    if (modern := config.modern) is not None:
        near = f"{sum(modern.slides)} of {config.num_hidden_layers} layers see {modern.reach:,} tokens on each side"
        full, sliding = (f"{rope.theta:,.0f}" for rope in modern.rope)
        said += [near, f"rope, theta {full} (near layers {sliding})"]
    relative = config.relative
    if relative is not None:
        terms = {
            "content to position": relative.content_to_position,
            "position to content": relative.position_to_content,
        }
        kinds = " and ".join(name for name, present in terms.items() if present) or "no term"
        said.append(
            f"distances up to {relative.max_distance:,} in {2 * relative.span:,} embeddings ({kinds})"
        )
    return "; ".join(said)


def pooled_state(config: EncoderConfig) -> str:
    """Return the state that the head of an encoder reads."""
    mean = config.modern is not None and config.modern.mean_pooled
    return "the mean of all states" if mean else "the first token's state"


def pooling_rule(pooling: Pooling) -> str:
    what = "mean of the last states" if pooling.mode == "mean" else "last state of the first token"
    return f"{what}, {'of length one' if pooling.normalised else 'not normalised'}, compared by dot product"


def length_facts(comparisons: Sequence[Comparison], reader: Reader, *, view: View) -> dict[str, str]:
    """Return how long comparisons are for a model, and the effect of the limit; encodes them exactly like scoring.

    Raises:
      DataError: same as in scoring, except for responses that are too long.
    """
    limit = reader.limit(view)
    whole = sorted(
        len(tree.prefix) + max(len(response) for response in tree.responses)
        for tree in reader.encode_each(comparisons, view=view, limit=_NO_LIMIT)
        if isinstance(tree, Tree)
    )
    cuts, refused = [], []
    for comparison, tree in zip(comparisons, reader.encode_each(comparisons, view=view), strict=True):
        if isinstance(tree, TooLongError):
            refused.append(comparison.id)
        else:
            reader.check_readable(f"comparison {quote(comparison.id)}", tree)
            cuts.append(tree.truncation)
    middle, high = (int(np.percentile(whole, q, method="higher")) for q in (50, 95))
    side = "the prompt's end" if view.protocol.cuts_responses else "the start of the prompt"
    effects = []
    for name, text, unit in (
        ("posts_dropped", "lose posts of the profile ({})", "post"),
        ("prompt_tokens_dropped", f"lose {side} ({{}})", "token"),
        ("response_tokens_dropped", "lose the end of a response and its end of turn ({})", "token"),
    ):
        lost = [getattr(cut, name) for cut in cuts if getattr(cut, name)]
        if lost:
            effects.append(f"{len(lost):,} " + text.format(counted(sum(lost), unit)))
    if refused:
        effects.append(
            f"{len(refused):,} are refused (--too-long skip leaves them out), as a response leaves no room "
            f"for the prompt: {listed(list(map(repr, refused)), most=5)}"
        )
    return {
        f"lengths, {view.protocol}": f"{len(whole):,} comparisons, {counted(view.profile_posts, 'post')}; "
        f"median {middle:,} tokens, 95 % up to {high:,}, longest {whole[-1]:,} "
        "(prompt and longest response, nothing cut)",
        f"at {limit:,} tokens, {view.protocol}": "\n".join(effects) or "nothing is cut",
    }


def length_rule(protocol: TextProtocol, *, limit: int) -> str:
    """Describe how the protocol handles a conversation longer than the limit."""
    if protocol.cuts_responses:
        return f"more than {limit:,} tokens: the end is cut, response and end of turn first"
    return (
        f"more than {limit:,} tokens: posts of the profile go, last first, then the start of the prompt; a response "
        "that leaves no room for the prompt is refused (--too-long skip)"
    )
