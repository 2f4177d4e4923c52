"""A scorer behind `prb serve`'s application, in a thread of this process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from prb_jax.serving.app import make_app
from prb_jax.serving.http_server import address, bind, run_app
from prb_jax.serving.options import ServeOptions
from prb_jax.serving.serve import make_engine


@contextlib.contextmanager
def serving(scorer: Any, **options: Any) -> Iterator[str]:
    """The URL of a server of the scorer; it ends with the process."""
    listening, ready = bind("127.0.0.1", 0), threading.Event()
    engine, served = make_engine(scorer, options=ServeOptions(**options))
    run = threading.Thread(
        target=lambda: run_app(make_app(served), listening, limits=served.limits, ready=ready.set),
        daemon=True,
    )
    run.start()
    assert ready.wait(60)
    yield address(listening)
    engine.close()
