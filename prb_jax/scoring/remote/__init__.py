"""Clients of remote servers: endpoints that generate text, and servers that score."""

from typing import Final
from urllib.parse import urlsplit

TOKEN: Final = "PRB_SERVE_TOKEN"  # environment variable with the token of a server and its clients
ROUTES: Final = ("/classify", "/pooling")  # routes of vLLM and SGLang that return one number per conversation


def is_url(reward: object) -> bool:
    """Return True for the address of a server."""
    return isinstance(reward, str) and reward.startswith(("http://", "https://"))


def is_class_server(url: object) -> bool:
    """Return True for an address with a classification route, e.g. http://HOST:PORT/classify#MODEL."""
    return isinstance(url, str) and urlsplit(url).path.endswith(ROUTES)
