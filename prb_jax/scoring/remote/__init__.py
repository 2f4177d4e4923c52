"""Clients of other machines' servers: endpoints that write texts, and servers that score."""

from typing import Final
from urllib.parse import urlsplit

ROUTES: Final = ("/classify", "/pooling")  # of vLLM and SGLang, which give a number for a whole conversation


def is_url(reward: object) -> bool:
    """Tell whether a reward is the address of a server."""
    return isinstance(reward, str) and reward.startswith(("http://", "https://"))


def is_class_server(url: object) -> bool:
    """Tell whether an address names a route that classifies, as http://HOST:PORT/classify#MODEL."""
    return isinstance(url, str) and urlsplit(url).path.endswith(ROUTES)
