"""Request formats of common clients: JSON requests to items, and scores to JSON answers. HTTP is elsewhere.

Sources: the reward server of Personalised RewardBench (`/score`), the pooling API of vLLM (`/classify`, `/pooling`,
`/score`, `/rerank`) and SGLang, the embedding route that verl reads, OpenRLHF's `/get_reward`, slime's remote reward,
NeMo Gym's `/compare` and `/verify`.
"""

from __future__ import annotations

import base64
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from prb_jax.errors import listed, quote
from prb_jax.records import fields as checks
from prb_jax.records.comparison import Message, parsed_profile
from prb_jax.records.conversation import Messages, refuse_extras
from prb_jax.records.messages import split_response
from prb_jax.records.template_marks import without_end_marks
from prb_jax.serving import fields
from prb_jax.serving.fields import WHERE, Body
from prb_jax.serving.items import ChatItem, Item, RenderedItem, Score

Answer = Callable[[Sequence[Score], str], Any]
"""Makes the JSON answer of the scores and the model's name; another process can send it (pickle)."""


@dataclass(frozen=True)
class ScoreRequest:
    """A parsed request.

    Attributes:
      items: Items to score.
      answer: Makes the JSON answer.
      activation: If True, the client wants 1 / (1 + exp(-score)) instead of the score.
      ignored: Names of fields that changed nothing, for a header.
    """

    items: Sequence[Item]
    answer: Answer
    activation: bool = False
    ignored: str = ""

    def reply(self, scores: Sequence[Score], model: str) -> Any:
        """Return the JSON answer."""
        if self.activation:
            scores = [replace(score, value=_sigmoid(score.value)) for score in scores]
        return self.answer(scores, model)


def score(body: Body) -> ScoreRequest:
    """``/score`` of Personalised RewardBench: {response_text, query, profile}; of vLLM: {queries, documents}.

    A text profile is appended to the query without a separator, as in the paper's scripts. A list of posts is shown
    as in `prb evaluate`.
    """
    if "response_text" not in body:
        return _score_documents(body)
    query, response = fields.text(body, "query"), fields.text(body, "response_text")
    profile = parsed_profile(body.get("profile"), WHERE)
    shown = isinstance(profile, str)
    if shown:
        query += checks.text(profile, WHERE, "profile")
    items = _answers(body, [fields.user_turn(query, "query")], [response], shown=shown)
    return ScoreRequest(items, _one_score, _activation(body))


def _one_score(scores: Sequence[Score], model: str) -> Any:
    return {"score": scores[0].value}


def _score_documents(body: Body) -> ScoreRequest:
    if body.get("documents") is None and body.get("text_2") is None:
        expected = "missing; expected 'response_text' with 'query', or 'documents' with 'queries'"
        given = listed([quote(name) for name in body], most=8) or "no fields"
        checks.fail(body.where, "response_text", f"{expected}, found {given}")
    documents = fields.responses(body, "documents", "text_2")
    queries = fields.prompts(body, "queries", "text_1", "query", count=len(documents))
    return ScoreRequest(
        _answers(body, queries, documents), _listing("score", _indexed_score), _activation(body)
    )


def _indexed_score(place: int, value: float) -> Any:
    return {"index": place, "object": "score", "score": value}


def rerank(body: Body) -> ScoreRequest:
    """``/rerank``: {query, documents, top_n}: results, best first; `top_n` 0 returns all."""
    query, documents = fields.text(body, "query"), fields.texts(body, "documents")
    top = fields.whole_number(body, "top_n", least=0, default=0) or len(documents)
    items = _answers(body, [fields.user_turn(query, "query")] * len(documents), documents)
    return ScoreRequest(items, partial(_ranking, documents, top), _activation(body))


def _ranking(documents: Sequence[str], top: int, scores: Sequence[Score], model: str) -> Any:
    order = sorted(range(len(scores)), key=lambda k: -scores[k].value)[:top]
    results = [
        {"index": k, "document": {"text": documents[k]}, "relevance_score": scores[k].value} for k in order
    ]
    return {"id": _id("rerank"), "model": model, "usage": _usage(scores), "results": results}


def classify(body: Body) -> ScoreRequest:
    """``/classify``: {input or messages}: data with the score as the only entry of `probs`."""
    return _conversations(body, "classify", _class)


def _class(place: int, value: float) -> Any:
    return {"index": place, "label": "LABEL_0", "probs": [value], "num_classes": 1}


def pooling(body: Body) -> ScoreRequest:
    """``/pooling``: like :func:`classify`, with another answer format."""
    return _conversations(body, "pooling", _pooled)


def _pooled(place: int, value: float) -> Any:
    return {"index": place, "object": "pooling", "data": [value]}


def embeddings(body: Body) -> ScoreRequest:
    """``/v1/embeddings``: {input}: the score is an embedding of one number."""
    form = body.get("encoding_format") or "float"
    if form not in ("float", "base64"):
        checks.fail(WHERE, "encoding_format", f"expected float or base64, found {checks.found(form)}")
    return _conversations(body, "embd", partial(_embedding, form))


def _embedding(form: str, place: int, value: float) -> Any:
    shown = [value] if form == "float" else base64.b64encode(np.float32(value).tobytes()).decode()
    return {"index": place, "object": "embedding", "embedding": shown}


def get_reward(body: Body) -> ScoreRequest:
    """``/get_reward`` of OpenRLHF: {query: whole conversations as text}; each gets one end-of-text token.

    An entry of `labels` may be an object {user_id, profile, question}, or its JSON text, to give the user. With a
    question (a text or messages), only the response is taken from the conversation: the text after the entry of
    `prompts`. The model then sees question, user, profile and response as in `prb evaluate`.
    """
    fields.no_profile(body)
    texts = fields.texts(body, "query")
    labels, prompts = (fields.column(body, name, len(texts)) for name in ("labels", "prompts"))
    users = fields.users(body, len(texts))
    items = [
        _labelled_item(text, user, fields.label_fields(label, f"labels[{k}]", body.sizes), prompt, k)
        for k, (text, user, label, prompt) in enumerate(zip(texts, users, labels, prompts, strict=True))
    ]
    return ScoreRequest(items, _rewards, _activation(body))


def _rewards(scores: Sequence[Score], model: str) -> Any:
    values = [score.value for score in scores]
    return {"rewards": values, "scores": values, "extra_logs": {}}


def _labelled_item(text: str, user: str | None, label: Body, prompt: object, k: int) -> Item:
    """Return the item of one OpenRLHF conversation, for the user of its label."""
    (own,) = fields.users(label, 1)
    if own is not None and user is not None and own != user:
        about = (
            f"expected the user of the request's 'user_id', {quote(user)}, or none there, found {quote(own)}"
        )
        checks.fail(label.where, "user_id", about)
    user = own or user
    question, profile = label.get("question"), label.get("profile")
    context = fields.context(label)
    label.ignored()  # refuses misspelt field names
    if question is None:
        if profile or context:
            name = "profile" if profile else "tools or chat_template_kwargs"
            checks.fail(label.where, name, "is shown with a question: expected 'question' beside it")
        return RenderedItem(text, special_tokens=False, ended=True, user_id=user)
    if not isinstance(prompt, str) or not text.startswith(prompt):
        about = "expected the beginning of the query, which the response follows"
        checks.fail(WHERE, f"prompts[{k}]", about)
    response = without_end_marks(text[len(prompt) :])
    messages = fields.prompt(question, f"labels[{k}].question")
    return ChatItem(*fields.placed(messages, response, context), user, fields.profiles(label, 1)[0])


def bare_number(body: Body) -> ScoreRequest:
    """``/slime``: {prompt, response}: the answer is the number itself. The prompt is a text or a conversation."""
    prompt = fields.prompt(body.get("prompt"), "prompt")
    items = _answers(body, [prompt], [without_end_marks(fields.text(body, "response"))])
    return ScoreRequest(items, _number, _activation(body))


def _number(scores: Sequence[Score], model: str) -> Any:
    return scores[0].value


def compare(body: Body) -> ScoreRequest:
    """``/compare`` of NeMo Gym: {conversation_history, response_objs}: the rewards of all responses to one prompt.

    Each response is a Responses API object; only its output texts are read (`output_text`), not its reasoning.
    `user_id` and `profile` give the user.
    """
    objects = checks.sequence(body.get("response_objs"), WHERE, "response_objs")
    if not objects:
        checks.fail(WHERE, "response_objs", "expected at least one response, found none")
    body.sizes.check_count(len(objects), WHERE)
    if body.get("principle") is not None:
        checks.fail(WHERE, "principle", "not read here; give what the user wishes as 'profile'")
    prompt = fields.messages(body.get("conversation_history"), "conversation_history")
    texts = [fields.output_text(one, f"response_objs[{k}]") for k, one in enumerate(objects)]
    return ScoreRequest(_answers(body, [prompt] * len(texts), texts), _compared, _activation(body))


def _compared(scores: Sequence[Score], model: str) -> Any:
    return {"rewards": [score.value for score in scores], "comparison_results": None, "metrics": None}


def verify(body: Body) -> ScoreRequest:
    """``/verify`` of NeMo Gym: {responses_create_params, response}: the request again, with the response's reward.

    The `input` of the parameters is a text or messages, and follows their `instructions`. Only the texts of the
    response are read. `user_id` and `profile` give the user.
    """
    asked = checks.mapping(body.get("responses_create_params"), WHERE, "responses_create_params")
    name = "responses_create_params.input"
    given = asked.get("input")
    prompt = fields.user_turn(given, name) if isinstance(given, str) else fields.response_input(given, name)
    if instructions := checks.optional_text(
        asked.get("instructions"), WHERE, "responses_create_params.instructions"
    ):
        prompt = (Message("system", instructions), *prompt)
    refuse_extras(asked, ("tools",), WHERE, within="responses_create_params")
    text = fields.output_text(body.get("response"), "response")
    return ScoreRequest(
        _answers(body, [prompt], [text]), partial(_verified, dict(body.given)), _activation(body)
    )


def _verified(given: dict[str, Any], scores: Sequence[Score], model: str) -> Any:
    return given | {"reward": scores[0].value}


ROUTES: Mapping[str, Callable[[Body], ScoreRequest]] = {
    "/score": score,
    "/v1/score": score,
    "/rerank": rerank,
    "/v1/rerank": rerank,
    "/v2/rerank": rerank,
    "/classify": classify,
    "/v1/classify": classify,
    "/pooling": pooling,
    "/v1/embeddings": embeddings,
    "/get_reward": get_reward,
    "/slime": bare_number,
    "/compare": compare,
    "/verify": verify,
}
"""By path, how a request is understood."""


def _conversations(body: Body, kind: str, one: Callable[[int, float], Any]) -> ScoreRequest:
    items = _chat_items(body) if body.get("messages") is not None else _rendered_items(body)
    return ScoreRequest(items, _listing(kind, one), _activation(body))


def _chat_items(body: Body) -> list[Item]:
    if body.get("input") is not None:
        checks.fail(WHERE, "messages", "given beside 'input'; expected one of the two")
    messages = fields.messages(body["messages"], "messages")
    if len(messages) < 2 or messages[-1].role != "assistant":
        checks.fail(WHERE, "messages", "expected a conversation that ends with the assistant's response")
    prompt, response = split_response(messages)
    return _answers(body, [prompt], [response])


def _rendered_items(body: Body) -> list[Item]:
    """Return items of conversations that the client has rendered, as texts or token ids."""
    fields.no_profile(body)
    given = body.get("input")
    one = fields.token_ids(given)
    if one is not None or isinstance(given, str):
        given = [given if one is None else one]
    if not isinstance(given, list) or not given:
        expected = f"expected a text, token ids, or a list of either, found {checks.found(given)}"
        checks.fail(WHERE, "input", expected)
    body.sizes.check_count(len(given), WHERE)
    special = fields.flag(body, "add_special_tokens", default=True)
    keep = fields.whole_number(body, "truncate_prompt_tokens", least=-1, default=None)
    if keep == 0:
        checks.fail(WHERE, "truncate_prompt_tokens", "expected -1 or a number above 0, found 0")
    items: list[Item] = []
    for k, (entry, user) in enumerate(zip(given, fields.users(body, len(given)), strict=True)):
        ids = one if entry is one else fields.token_ids(entry)
        content = checks.text(entry, WHERE, f"input[{k}]") if ids is None else ids
        items.append(RenderedItem(content, special_tokens=special, keep=keep, user_id=user))
    return items


def _answers(
    body: Body, prompts: Sequence[Messages], responses: Sequence[str], *, shown: bool = False
) -> list[Item]:
    """Return items of responses with the users of a request, and their profiles unless the prompts show them."""
    count = len(responses)
    order = checks.optional_text(body.get("profile_order"), WHERE, "profile_order")
    profiles = [()] * count if shown else fields.profiles(body, count)
    context = fields.context(body)
    placed = {id(prompt): fields.placed(prompt, "", context)[0] for prompt in prompts if prompt}
    whole = [
        (placed[id(prompt)], response) if prompt else fields.placed(prompt, response, context)
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    given = zip(whole, fields.users(body, count), profiles, strict=True)
    return [ChatItem(*pair, user, profile, order) for pair, user, profile in given]


def _activation(body: Body) -> bool:
    return fields.flag(body, "activation", "use_activation")


def _sigmoid(value: float) -> float:
    small = math.exp(-abs(value))
    return 1 / (1 + small) if value >= 0 else small / (1 + small)


def _listing(kind: str, one: Callable[[int, float], Any]) -> Answer:
    """Return an answer function for one entry per score, in the envelope of vLLM."""
    return partial(_list, kind, one)


def _list(kind: str, one: Callable[[int, float], Any], scores: Sequence[Score], model: str) -> Any:
    data = [one(place, score.value) for place, score in enumerate(scores)]
    head = {"id": _id(kind), "object": "list", "created": int(time.time()), "model": model}
    return {**head, "data": data, "usage": _usage(scores)}


def _usage(scores: Sequence[Score]) -> dict[str, int]:
    tokens = sum(score.tokens for score in scores)
    return {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}


def _id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"
