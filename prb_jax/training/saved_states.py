"""Saved states of a run: written in the background, complete or not at all, and restored onto any mesh.

A state is a flat dict of named arrays with a small JSON object. Checksums in the object detect damaged files.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from prb_jax.errors import RunError
from prb_jax.models.checkpoints.array_folder import checksums, quiet_orbax, reason_of
from prb_jax.platform.processes.sharing import on_first_process
from prb_jax.records.schema import check_schema
from prb_jax.runs.training import RunIdentity

_ARRAYS, _FACTS = "arrays", "facts"
_DAMAGED = "damaged"

Say = Callable[[str], None]


@dataclass(frozen=True)
class SavedState:
    """One restored checkpoint."""

    step: int  # completed updates
    arrays: dict[str, jax.Array]  # by name, in the shardings asked for
    facts: dict[str, Any]  # the JSON object saved with it


class _OtherRunError(RunError):
    """A checkpoint belongs to another run."""


class Checkpoints:
    """Checkpoints in a folder, by step. Every process of a run must make the same calls.

    Args:
      folder: Parent of one folder per step; created if necessary. Incomplete files of a killed process are removed.
      keep_last: Number of newest checkpoints to keep.
      keep_best: Number of best checkpoints to keep in addition, by the smallest `value` in their facts.
      say: Function that shows messages to the user.
      read_only: If True, change nothing in the folder; another process may be writing to it.
      run: Run that the checkpoints belong to. It is saved with them, and checkpoints of another run are refused.
        Checkpoints of an earlier version do not record their run.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep_last: int = 2,
        keep_best: int = 1,
        say: Say = lambda text: None,
        read_only: bool = False,
        run: RunIdentity | None = None,
    ) -> None:
        self.folder = Path(folder).absolute()
        self._run = run
        self._say = say
        self._values: dict[int, float] = {}
        self._saving: int | None = None
        quiet_orbax()
        options = ocp.CheckpointManagerOptions(
            preservation_policy=_Preserve(self._values, keep_last, keep_best),
            cleanup_tmp_directories=not read_only,
            enable_async_checkpointing=True,
            read_only=read_only,
            create=not read_only,
        )
        if read_only and not self.folder.is_dir():
            raise RunError(f"{self.folder}: no such folder, so there is no checkpoint")
        with self._errors("be opened"):
            if not read_only:
                self.folder.mkdir(parents=True, exist_ok=True)
            self._manager = ocp.CheckpointManager(
                self.folder,
                options=options,
                item_handlers={_ARRAYS: ocp.StandardCheckpointHandler(), _FACTS: ocp.JsonCheckpointHandler()},
            )
        for step in self.steps():
            # A damaged checkpoint is reported when it is restored.
            with contextlib.suppress(Exception):
                self._remember(step, self._facts(step))

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def best(self) -> int | None:
        """Return the step with the smallest `value`, the earliest of equals; None if no checkpoint has a value."""
        present = [step for step in self.steps() if step in self._values]
        return min(present, key=lambda step: (self._values[step], step), default=None)

    def save(self, step: int, arrays: Mapping[str, jax.Array], facts: Mapping[str, Any]) -> None:
        """Wait for the previous save and start this one; the arrays may be donated afterwards.

        Raises:
          RunError: This or the previous checkpoint could not be written, e.g. because the disk is full.
        """
        self.wait()
        stored = {**facts, "step": step, "checksums": checksums(arrays), "run": self._run}
        self._remember(step, stored)
        self._saving = step
        parts = {_ARRAYS: ocp.args.StandardSave(dict(arrays)), _FACTS: ocp.args.JsonSave(stored)}  # pyright: ignore[reportCallIssue]
        with self._errors(f"hold the checkpoint of step {step}"):
            self._manager.save(step, args=ocp.args.Composite(**parts), force=True)

    def wait(self) -> None:
        """Wait until the current save is written.

        Raises:
          RunError: The checkpoint could not be written.
        """
        if self._saving is None:
            return
        step, self._saving = self._saving, None
        try:
            with self._errors(f"hold the checkpoint of step {step}"):
                self._manager.wait_until_finished()
        except RunError:
            self._values.pop(step, None)
            raise

    def restore_newest(self, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> SavedState | None:
        """Restore the newest readable checkpoint onto the shardings of `abstract`; None without one.

        A damaged checkpoint is reported, renamed and skipped.

        Raises:
          RunError: A checkpoint belongs to another run.
        """
        for step in reversed(self.steps()):
            try:
                return self.restore(step, abstract)
            except _OtherRunError:
                raise
            except RunError as error:
                self._put_aside(step, str(error))
        return None

    def restore(self, step: int, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> SavedState:
        """Restore one checkpoint.

        Raises:
          RunError: The checkpoint cannot be read, belongs to another run, has other arrays, or its checksums do not
            match.
        """
        where = self.folder / str(step)
        try:
            facts = self._facts(step)
        except Exception as error:
            raise RunError(f"{where}: cannot be read: {reason_of(error)}") from error
        self._check_run(where, facts.get("run"))
        try:
            arrays = dict(self._read(step, _ARRAYS, ocp.args.StandardRestore(dict(abstract))))  # pyright: ignore[reportCallIssue]
        except Exception as error:
            raise RunError(f"{where}: cannot be read: {reason_of(error)}") from error
        computed = checksums(arrays)
        expected = facts.get("checksums")
        if computed != expected:
            wrong = [
                name
                for name in computed
                if not isinstance(expected, dict) or computed[name] != expected.get(name)
            ]
            raise RunError(f"{where}: damaged: {', '.join(wrong[:3])} differs from what was saved")
        return SavedState(step, arrays, facts)

    def close(self) -> None:
        """Wait for the current save and release the folder."""
        try:
            self.wait()
        finally:
            with contextlib.suppress(Exception):
                self._manager.close()

    def _check_run(self, where: Path, saved: Any) -> None:
        if self._run is None or saved is None:
            return
        check_schema(saved, RunIdentity, where=f"{where}: run", error=RunError)
        # A lengthened run continues from checkpoints of its earlier lengths.
        longer = self._run["lengths"][: len(saved["lengths"])] == saved["lengths"]
        if saved["inputs"] != self._run["inputs"] or not longer:
            raise _OtherRunError(
                f"{where}: is the checkpoint of another run (other settings, data, model or versions): remove it, or "
                "restore the run it belongs to"
            )

    def _facts(self, step: int) -> dict[str, Any]:
        facts = self._read(step, _FACTS, ocp.args.JsonRestore())  # pyright: ignore[reportCallIssue]
        if not isinstance(facts, dict) or facts.get("step") != step:
            raise ValueError("its JSON object belongs to another step")
        return facts

    def _read(self, step: int, part: str, how: Any) -> Any:
        return self._manager.restore(step, args=ocp.args.Composite(**{part: how}))[part]

    def _remember(self, step: int, facts: Mapping[str, Any]) -> None:
        value = facts.get("value")
        if value is not None:
            self._values[step] = float(value)

    def _put_aside(self, step: int, reason: str) -> None:
        damaged = self.folder / f"{_DAMAGED}-{step}"

        def move() -> None:
            shutil.rmtree(damaged, ignore_errors=True)
            with contextlib.suppress(OSError):
                (self.folder / str(step)).rename(damaged)

        on_first_process(move)
        self._values.pop(step, None)
        self._manager.reload()
        self._say(f"checkpoint skipped and renamed to {damaged.name}: {reason}")

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            older = [step for step in self._present() if step != self._saving]
            kept = f"the checkpoint of step {older[-1]} is kept" if older else "there is no older checkpoint"
            raise RunError(
                f"{self.folder} cannot {what}: {reason_of(error)}; {kept}: once the cause is fixed, the same command "
                "continues the run"
            ) from error

    def _present(self) -> list[int]:
        with contextlib.suppress(OSError):
            return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdigit())
        return []


class _Preserve(checkpoint_managers.PreservationPolicy):
    """Policy that keeps the newest and the best checkpoints."""

    def __init__(self, values: Mapping[int, float], keep_last: int, keep_best: int) -> None:
        self._values, self._keep_last, self._keep_best = values, keep_last, keep_best

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        steps = sorted(checkpoint.step for checkpoint in checkpoints)
        ranked = sorted((step for step in steps if step in self._values), key=lambda s: (self._values[s], s))
        kept = {*steps[-self._keep_last :], *ranked[: self._keep_best]}
        return [checkpoint.step in kept for checkpoint in checkpoints]
