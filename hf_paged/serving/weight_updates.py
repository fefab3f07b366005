"""Pauses of a server, and new weights from a trainer in another process. Used on the event loop only."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hf_paged.errors import EngineStopped, RankError
from hf_paged.features.new_weights.new_weights import NewWeights, files_of, open_files
from hf_paged.generation.engine.arrivals import HaltMode
from hf_paged.generation.engine.engine import Engine
from hf_paged.serving.answers import refusals
from hf_paged.serving.problems import Problem, draining
from hf_paged.serving.worker import EngineWorker


class WeightUpdates:
    """Owns the pauses of a server: those that its admin asks for, and those of updates, which come one after another.

    An update leaves the server as its admin wants it: paused or not.
    """

    def __init__(self, engine: Engine, worker: EngineWorker, folders: Sequence[str]) -> None:
        """folders: where files of new weights may be."""
        self._engine = engine
        self._worker = worker
        self._folders = [Path(folder).resolve() for folder in folders]
        self._one = asyncio.Lock()
        self._is_updating = self._is_paused = self._is_draining = False

    @property
    def version(self) -> int:
        return self._engine.weight_version

    async def pause(self, mode: HaltMode) -> None:
        self._check_open()
        self._is_paused = True
        with refusals():
            has_begun = await self._worker.pause(mode, ends_kept=True)
        if not has_begun:
            self._check_open()
            raise Problem(409, "the server was resumed before this pause began; pause it again", code="resumed")

    def resume(self) -> None:
        self._is_paused = False
        if not self._is_updating:
            with refusals():
                self._worker.resume()

    def drain(self) -> None:
        """End all pauses, and begin none: the server ends, and lets its requests finish."""
        self._is_draining, self._is_paused = True, False
        # If the engine's thread has ended, there is nothing to resume.
        with suppress(EngineStopped):
            self._worker.resume()

    def _check_open(self) -> None:
        if self._is_draining:
            raise draining()

    async def update(self, path: str, version: int | None, *, partial: bool, mode: HaltMode, recompute: bool) -> int:
        """Read weights while steps run, pause, write them, and resume. Returns their version. Raises Problem; the
        former weights are then in use."""
        async with self._one:
            new = await self._read(path, is_partial=partial)
            self._check_open()  # it may have begun to drain meanwhile
            self._is_updating = True
            try:
                with refusals():
                    await self._worker.pause(mode)
                    return await self._worker.call(lambda engine: _write(engine, new, version, recompute=recompute))
            finally:
                self._is_updating = False
                if not self._is_paused:
                    with suppress(EngineStopped):
                        self._worker.resume()

    async def _read(self, path: str, *, is_partial: bool) -> NewWeights:
        try:
            files = open_files(self._allowed(path), self._open)
            return await asyncio.to_thread(self._engine.read_weights, files, partial=is_partial)
        except (ValueError, RankError) as error:
            raise Problem(400, str(error), param="path") from error

    def _allowed(self, path: str) -> list[Path]:
        """Return the files at a path, without links: those of a folder may be links too. Raises as `_resolved` does."""
        if not self._folders:
            raise Problem(403, "no folder may have new weights; start the server with --weights-folder FOLDER")
        return [self._resolved(str(file)) for file in files_of(self._resolved(path))]

    def _resolved(self, path: str) -> Path:
        """Return the path without links. Raises ValueError if nothing is there, and Problem (403) outside of the
        folders."""
        try:
            real = Path(path).resolve(strict=True)
        except (OSError, ValueError, RuntimeError) as error:  # no file, a name that none can have, a ring of links
            raise ValueError(
                f"{path[:100]!r} is no file: {error}; give an absolute path, below a folder of --weights-folder"
            ) from error
        if self._above(real) is None:
            raise Problem(
                403, f"{path[:100]!r} is in none of the folders of --weights-folder; write it to one", param="path"
            )
        return real

    def _above(self, path: Path) -> Path | None:
        """Return the folder of --weights-folder that the path is in."""
        return next((folder for folder in self._folders if path.is_relative_to(folder)), None)

    def _open(self, path: str, flags: int) -> int:
        """Open a file that is allowed, by the folders above it one after another: a part of its path that has become a
        link since it was checked is not followed. Raises OSError for it."""
        folder = self._above(Path(path))
        if folder is None:
            raise PermissionError(f"{path!r} is in none of the folders of --weights-folder")
        *folders, last = Path(path).relative_to(folder).parts
        at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for name in folders:
                below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
                os.close(at)
                at = below
            return os.open(last, flags | os.O_NOFOLLOW, dir_fd=at)
        finally:
            os.close(at)


def _write(engine: Engine, new: NewWeights, version: int | None, *, recompute: bool) -> int:
    """Write between two steps, in the engine's thread."""
    if not engine.is_halted:  # a server that ends lets all requests finish, and they have begun with the former weights
        raise draining()
    return engine.update_weights(new, version, recompute=recompute)
