"""`prb audit`: a page on which people judge pairs, until SIGTERM."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

from prb_jax.auditing.folder import open_folder, read_secret
from prb_jax.data.writing import held_folder, refuse_file
from prb_jax.errors import RunError, need_extra
from prb_jax.scoring.inputs import Data
from prb_jax.serving.options import Limits

INVITATION = "PRB_AUDIT_TOKEN"
"""The environment variable with the token that must come with a name that is typed."""


LIMITS = Limits(bytes=100_000, seconds=30.0)
"""For the clients of the page, who send nothing longer than an answer."""


def audit(
    out: str | Path,
    *,
    data: Data | None = None,
    gold: Data | None = None,
    subset: str | None = None,
    limit: int | None = None,
    sample: int | None = None,
    per_item: int | None = None,
    check_every: int | None = None,
    margin: float | None = None,
    seed: int | None = None,
    annotators: Sequence[str] = (),
    lease: float = 30.0,
    host: str = "127.0.0.1",
    port: int = 8000,
    invitation: str | None = None,
) -> None:
    """Serve the page of an audit, a new one or one that goes on, until SIGTERM or Ctrl-C.

    What is left out is the default in a new audit, and the audit's own setting in one that goes on.

    Args:
      out: the folder of the audit.
      data: pairs, as of `prb_jax.evaluate`; needed for a new audit.
      gold: pairs whose personal fit is known for certain, which show whether annotators pay attention.
      subset: of the data.
      limit: of each source, the first so many.
      sample: a random choice of so many of the comparisons.
      per_item: people who judge each item; 3 by default.
      check_every: one judgement in so many is a check, on average; 10 by default, 0 for none.
      margin: differences of general quality within so many points, of the five, make no difference; 0.25 by default.
      seed: of choice, orders, sides and resamples; 0 by default.
      annotators: names of those who may judge, each with a link; anybody who types a name where there are none.
      lease: minutes for which a pair is held for an annotator of whom nothing is heard.
      host: an address; beyond this machine's own loopback there must be annotators or an invitation.
      port: 0 picks a free one.
      invitation: a token that must come with a name that is typed; None for none.

    Raises:
      RunError: the folder holds another audit or something else, is served already, or was changed by hand; the
        address cannot be used, or others could reach it and there is neither annotator nor invitation.
      DataError: the data cannot be read, hold something else than pairs, or changed since the audit began.
    """
    need_extra("serve", "prb audit")
    from prb_jax.auditing.app import make_app
    from prb_jax.auditing.session import Session
    from prb_jax.serving.http_server import address, bind, is_loopback, local_names, run_app

    loopback = is_loopback(host)
    if not loopback and not annotators and invitation is None:
        raise RunError(
            f"--host {host}: others than this machine could reach the page: name the people with --annotators, or set "
            f"{INVITATION} to a token that must come with a name"
        )
    if not 0 < lease < 1e6:
        raise RunError(f"lease: expected minutes above 0, found {lease:g}")
    refuse_file(out)
    path = Path(out)
    with held_folder(path, purpose="serves this audit"), contextlib.ExitStack() as ended:
        chosen = {"subset": subset, "limit": limit, "sample": sample, "seed": seed}
        asked = {"per_item": per_item, "check_every": check_every, "margin": margin}
        folder = open_folder(path, data=data, gold=gold, **chosen, **asked)
        database = folder.open_database(write=True)
        ended.callback(database.close)
        session = Session(database, folder.inputs, lease=60 * lease, secret=read_secret(path))
        links = dict(session.join(name) for name in annotators)
        worker = ended.enter_context(ThreadPoolExecutor(1, "audit"))
        listening = bind(host, port)
        ended.callback(listening.close)
        app = make_app(
            session,
            title=path.resolve().name,
            allowed=frozenset(links) if links else None,
            invitation=invitation,
            hosts=local_names(host) if loopback else None,
            limits=LIMITS,
            worker=worker,
        )
        place = address(listening)
        lines = [f"auditing {out} at {place}"]
        lines += [f"{name}: {place}/#token={token}" for name, token in links.items()]
        if not links and invitation is not None:
            lines.append(f"invitation: {place}/#invitation={quote(invitation, safe='')}")
        run_app(app, listening, limits=LIMITS, ready=lambda: print("\n".join(lines), flush=True))
