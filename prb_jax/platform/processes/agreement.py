"""Compare the inputs of all processes before they compute: equal, or one clear error in each process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from prb_jax.errors import RunError
from prb_jax.platform.processes.sharing import gather_int32, process_count

_FIELDS_SHOWN = 3
_LONGEST_VALUE = 100


def check_agreement(inputs: Mapping[str, Any]) -> None:
    """Check that ``inputs`` are equal in all processes; a collective.

    Args:
      inputs: Any JSON value. For files, pass digests instead of paths: paths may differ between machines.

    Raises:
      RunError: raised in every process; names the fields and the first process that differs from process 0.
    """
    if process_count() == 1:
        return
    contents = json.dumps(inputs, sort_keys=True).encode()
    # Digests have a fixed length, which a collective needs; other processes may have inputs of another length.
    digests = gather_int32(np.frombuffer(hashlib.sha256(contents).digest(), np.int32))
    if all(np.array_equal(digest, digests[0]) for digest in digests):
        return
    text = json.dumps(inputs).encode()  # unsorted: errors list fields in the order that people know
    first, *others = (
        json.loads(part.astype(np.uint8).tobytes())
        for part in gather_int32(np.frombuffer(text, np.uint8).astype(np.int32))
    )
    differing = ((process, differences(first, other)) for process, other in enumerate(others, start=1))
    process, fields = next(((process, fields) for process, fields in differing if fields), (0, {}))
    if not fields:  # 1 and 1.0
        return
    shown = [
        f"inputs.{field}: {_short(found)}, expected {_short(expected)}"
        for field, (expected, found) in list(fields.items())[:_FIELDS_SHOWN]
    ]
    if len(fields) > _FIELDS_SHOWN:
        shown.append(f"and {len(fields) - _FIELDS_SHOWN} more")
    raise RunError(f"process {process} differs from process 0 in {'; '.join(shown)}")


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the fields that differ, by dotted name, with both values as JSON."""
    old, new = _flat(before), _flat(after)
    names = dict.fromkeys([*old, *new])
    changed = [name for name in names if old.get(name, _ABSENT) != new.get(name, _ABSENT)]
    return {name: (_show(old, name), _show(new, name)) for name in changed}


_ABSENT = object()


def _show(values: Mapping[str, Any], name: str) -> str:
    return json.dumps(values[name]) if name in values else "(absent)"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings and lists to one mapping of dotted names to plain values."""
    if isinstance(value, Mapping) and value:
        items: Iterable[tuple[str, Any]] = ((f".{key}", item) for key, item in value.items())
    elif isinstance(value, list) and value:
        items = ((f"[{index}]", item) for index, item in enumerate(value))
    else:
        return {prefix.removeprefix("."): value}
    return {name: leaf for key, item in items for name, leaf in _flat(item, prefix + key).items()}
