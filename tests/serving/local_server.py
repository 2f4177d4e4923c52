"""A scorer behind `prb serve`'s application, in a thread of this process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from prb_jax.serving.app import make_app
from prb_jax.serving.http_server import address, bind, run_app
from prb_jax.serving.options import ServeOptions
from prb_jax.serving.serve import make_served


@contextlib.contextmanager
def serving(scorer: Any, **options: Any) -> Iterator[str]:
    """The URL of a server of the scorer; it ends with the process."""
    listening, ready = bind("127.0.0.1", 0), threading.Event()
    served = make_served(scorer, ServeOptions(**options))
    app, limits = make_app(served), served.options.limits
    threading.Thread(
        target=lambda: run_app(app, listening, limits=limits, ready=ready.set), daemon=True
    ).start()
    assert ready.wait(300)
    yield address(listening)
    served.engine.close()
