"""Saved states of a run: written in the background, whole or not at all, restored onto any mesh.

A state is a flat dict of arrays under our own names, and a small JSON object beside it. Checksums in that object tell a
damaged file from a good one.
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

    step: int  # updates made before it was saved
    arrays: dict[str, jax.Array]  # by name, in the shardings asked for
    facts: dict[str, Any]  # the JSON object saved with it


class _OtherRunError(RunError):
    """A checkpoint is of another run."""


class Checkpoints:
    """The checkpoints in a folder, by step. Every process of a run must make the same calls.

    Args:
      folder: holds one folder a step; made if need be. What a killed process left half written is removed.
      keep_last: how many of the newest are kept.
      keep_best: how many of the best are kept besides: those with the smallest `value` in their facts.
      say: takes messages for the user.
      read_only: changes nothing in the folder, which another process may be writing to.
      run: Run that the checkpoints are of. It is saved with them, and those of another run are refused; checkpoints of
        an earlier version do not name theirs.
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
            # A damaged one is found out when it is to be restored.
            with contextlib.suppress(Exception):
                self._remember(step, self._facts(step))

    def steps(self) -> list[int]:
        """Steps of all checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def best(self) -> int | None:
        """The step whose `value` is smallest, the earliest of equals; None if none has a value."""
        present = [step for step in self.steps() if step in self._values]
        return min(present, key=lambda step: (self._values[step], step), default=None)

    def save(self, step: int, arrays: Mapping[str, jax.Array], facts: Mapping[str, Any]) -> None:
        """Starts saving; the arrays may be donated afterwards. Waits for the save before it.

        Raises:
          RunError: this one, or the one before it, could not be written (a full disk).
        """
        self.wait()
        stored = {**facts, "step": step, "checksums": checksums(arrays), "run": self._run}
        self._remember(step, stored)
        self._saving = step
        parts = {_ARRAYS: ocp.args.StandardSave(dict(arrays)), _FACTS: ocp.args.JsonSave(stored)}  # pyright: ignore[reportCallIssue]
        with self._errors(f"hold the checkpoint of step {step}"):
            self._manager.save(step, args=ocp.args.Composite(**parts), force=True)

    def wait(self) -> None:
        """Until what was started is written.

        Raises:
          RunError: it could not be.
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
        """The newest checkpoint that can be read, onto the shardings of `abstract`; None without one.

        A damaged checkpoint is reported, renamed, and passed over.

        Raises:
          RunError: a checkpoint is of another run.
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
        """One checkpoint.

        Raises:
          RunError: it cannot be read, is of another run, holds other arrays, or its checksums do not match.
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
            raise RunError(f"{where}: damaged: {', '.join(wrong[:3])} is not what was saved")
        return SavedState(step, arrays, facts)

    def close(self) -> None:
        """Waits for what is being written and lets go of the folder."""
        try:
            self.wait()
        finally:
            with contextlib.suppress(Exception):
                self._manager.close()

    def _check_run(self, where: Path, saved: Any) -> None:
        if self._run is None or saved is None:
            return
        check_schema(saved, RunIdentity, where=f"{where}: run", error=RunError)
        # A run that was made longer goes on from checkpoints of its earlier lengths.
        longer = self._run["lengths"][: len(saved["lengths"])] == saved["lengths"]
        if saved["inputs"] != self._run["inputs"] or not longer:
            raise _OtherRunError(
                f"{where}: is the checkpoint of another run (other settings, data, model or versions): remove it, or "
                "put back the run that it is of"
            )

    def _facts(self, step: int) -> dict[str, Any]:
        facts = self._read(step, _FACTS, ocp.args.JsonRestore())  # pyright: ignore[reportCallIssue]
        if not isinstance(facts, dict) or facts.get("step") != step:
            raise ValueError("its JSON object is that of another step")
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
            kept = f"that of step {older[-1]} is kept" if older else "there is no older one"
            raise RunError(
                f"{self.folder} cannot {what}: {reason_of(error)}; {kept}: once this is put right, the same command "
                "continues the run"
            ) from error

    def _present(self) -> list[int]:
        with contextlib.suppress(OSError):
            return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdigit())
        return []


class _Preserve(checkpoint_managers.PreservationPolicy):
    """Keeps the newest and the best."""

    def __init__(self, values: Mapping[int, float], keep_last: int, keep_best: int) -> None:
        self._values, self._keep_last, self._keep_best = values, keep_last, keep_best

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        steps = sorted(checkpoint.step for checkpoint in checkpoints)
        ranked = sorted((step for step in steps if step in self._values), key=lambda s: (self._values[s], s))
        kept = {*steps[-self._keep_last :], *ranked[: self._keep_best]}
        return [checkpoint.step in kept for checkpoint in checkpoints]
