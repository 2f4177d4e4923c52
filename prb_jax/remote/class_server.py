"""A sequence classifier behind vLLM or SGLang: `/classify` or `/pooling` gives one number for a whole conversation."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

import numpy as np

from prb_jax.data.comparison import Comparison, Message
from prb_jax.errors import RunError, quote
from prb_jax.remote.score_server import TRIES, ScoreClient, open_client
from prb_jax.text.protocol import TextProtocol
from prb_jax.text.view import ViewOptions, choose_view
from prb_jax.text.visible import visible
from prb_jax.trees.tree import ScoredBatch

if TYPE_CHECKING:
    import httpx

    from prb_jax.text.tokenizer import ChatTokenizer


class ClassServer(ScoreClient):
    """A :class:`prb_jax.scoring.scorer.Scorer` that asks for each conversation. Build with :func:`open_class_server`.

    Attributes:
      remarks: what a run should say of the server.
      view: what it shows its model is not known.
    """

    uses: ClassVar[tuple[str, ...]] = ("profile_posts",)
    view = None

    def __init__(self, url: str, client: httpx.Client, *, chat: ChatTokenizer | None) -> None:
        parts = urlsplit(url)
        super().__init__(f"{parts.scheme}://{parts.netloc}", client)
        self._route, self._chat = parts.path, chat
        info = self._fact("/get_model_info")
        self._sglang = info is not None
        models = self._fact("/v1/models") or {}
        served = [model for model in models.get("data") or () if isinstance(model, dict)]
        names = [str(model.get("id")) for model in served]
        name = parts.fragment or (names[0] if len(names) == 1 else None)
        if name is None and info is None:
            raise RunError(
                f"{url}: expected #MODEL behind the address, one of {', '.join(names) or 'its models'}"
            )
        self._name = name or str((info or {}).get("model_path"))
        if self._sglang and chat is None:
            raise RunError(
                f"{url}: SGLang classifies token ids, not messages: give --tokenizer NAME (of prb ppo "
                "scoring.tokenizer=NAME), whose chat template renders the conversation here"
            )
        model = next((model for model in served if model.get("id") == self._name), {})
        known = {"root": model.get("root"), "max_model_len": model.get("max_model_len")}
        known |= {"server_version": (self._fact("/version") or {}).get("version")}
        known |= {"model_path": (info or {}).get("model_path")}
        self._facts = {key: value for key, value in known.items() if value is not None}
        unknown = ["the files of the model", "dtype", *([] if chat else ["chat template", "tokenizer"])]
        self._unknown = f"{', '.join(unknown)}: the server alone knows"
        self.remarks = [f"{self.url}: not known, and not recorded: {', '.join(unknown)}"]

    def identity(self) -> dict[str, Any]:
        """Return the name, what the server tells of itself, and what cannot be known."""
        found = {
            "name": self._name,
            "server": self.url,
            "route": self._route,
            "model": self._name,
            **self._facts,
        }
        if self._chat is not None:
            found |= {"tokenizer": self._chat.name, "template_sha256": self._chat.template_hash}
        return found | {"unknown": self._unknown}

    def stream(
        self,
        comparisons: Sequence[Comparison],
        *,
        profile_posts: int | None,
        skip: Any,
        protocol: str | None = None,
        max_length: int | None = None,
    ) -> Iterator[ScoredBatch]:
        """Yield the scores of one comparison after the other.

        Raises:
          RunError: another protocol or a length, which the server decides; or it refuses, is gone, or gives several
            classes.
        """
        if max_length is not None or protocol not in (None, TextProtocol.DEFAULT):
            raise RunError(f"max_length, protocol: decided by the server {self.url}: leave out here")
        posts = choose_view(None, ViewOptions(profile_posts=profile_posts)).view.profile_posts

        def score(comparison: Comparison, over: threading.Event) -> np.ndarray:
            shown = visible(comparison, profile_posts=posts, protocol=TextProtocol.DEFAULT)
            return np.asarray(
                [
                    self._score((*shown.prefix_messages, Message("assistant", response)), over)
                    for response in shown.responses
                ],
                np.float32,
            )

        yield from self.side_by_side(comparisons, score, skip=skip)

    def _score(self, messages: Sequence[Message], over: threading.Event) -> float:
        body: dict[str, Any] = {"model": self._name}
        if self._sglang:
            assert self._chat is not None
            body["input_ids"] = self._chat.encode(messages)
        else:
            body |= {"activation": False, "use_activation": False}  # the older and the newer name
            if self._chat is None:
                body["messages"] = [{"role": each.role, "content": each.content} for each in messages]
            else:
                body["input"] = self._chat.encode(messages)
        answer = self.ask("POST", self._route, body, tries=TRIES, over=over)
        numbers = _numbers(answer)
        if numbers is None or len(numbers) != 1 or not math.isfinite(numbers[0]):
            raise RunError(
                f"{self.url}{self._route}: expected one finite number, the score of a classifier with one label, found "
                f"{quote(answer)}"
            )
        return numbers[0]

    def _fact(self, path: str) -> Mapping[str, Any] | None:
        """What the server tells of itself; None where it has no such route."""
        try:
            answer = self.ask("GET", path, None, tries=1, over=threading.Event())
        except RunError as error:
            if "status 404" in str(error) or "status 405" in str(error):
                return None
            raise
        return answer if isinstance(answer, dict) else None


def _numbers(answer: Any) -> list[float] | None:
    """The numbers of the only entry: vLLM's `probs` or `data`, SGLang's `embedding`; None where there are none."""
    data = answer.get("data") if isinstance(answer, dict) else answer
    entry = data[0] if isinstance(data, list) and len(data) == 1 else answer
    if not isinstance(entry, dict):
        return None
    numbers = next((entry[key] for key in ("probs", "data", "embedding") if key in entry), None)
    if not isinstance(numbers, list) or not all(type(number) in (int, float) for number in numbers):
        return None
    return numbers


def open_class_server(
    url: str, *, tokenizer: str | None = None, revision: str | None = None, chat_template: str | None = None
) -> ClassServer:
    """Return the scorer of a server of vLLM (`/classify`, `/pooling`) or SGLang (`/classify`).

    Args:
      url: with the route, and the model's name where there are several, as http://HOST:PORT/classify#MODEL.
      tokenizer: folder or hub id of the model's tokenizer, whose chat template renders conversations here; without one
        the server renders messages by its own.
      revision, chat_template: of the tokenizer.

    Raises:
      RunError: nothing answers there, or it is not known which model is asked.
    """
    if tokenizer is None:
        if revision is not None or chat_template is not None:
            raise RunError("revision, chat_template: belong to --tokenizer NAME: leave out here")
        return ClassServer(url, open_client(), chat=None)
    from prb_jax.text.tokenizer import load_tokenizer  # takes long to import

    chat = load_tokenizer(tokenizer, revision=revision, chat_template=chat_template)
    return ClassServer(url, open_client(), chat=chat)
