"""WeightMethods: the methods of an engine that give its model new weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch

from hf_paged.annotations import Model
from hf_paged.features.new_weights.new_weights import NewWeights, files_of, open_files
from hf_paged.generation.engine.arrivals import WeightVersions


class WeightMethods:
    """A part of `Engine`: new weights, all at once. It uses `pause`, which `PauseMethods` has."""

    _model: Model
    _versions: WeightVersions
    _refuse_ranks: Callable[[str], None]
    pause: Any

    @property
    def weight_version(self) -> int:
        """The number of the weights, which finished outputs have too (`RequestMetrics.weight_versions`).

        It is 0 at first. `update_weights` sets it, and so may a trainer that changes the weights in this process, which
        the engine does not count.
        """
        return self._versions.latest

    @weight_version.setter
    def weight_version(self, number: int) -> None:
        _check_version(number)
        self._versions.add(number)

    def update_weights(
        self,
        weights: Mapping[str, torch.Tensor] | str | os.PathLike[str] | NewWeights,
        version: int | None = None,
        *,
        partial: bool = False,
        recompute: bool = True,
    ) -> int:
        """Write new values into the model's weights between two steps, all of them or none.

        Names, shapes, dtypes and numbers are checked before the first one is written. No step computes with a part of
        them, and no later request uses a cached prefix of the former weights. Running requests continue with the new
        ones: the tokens that they have are kept. To end them first, run steps until none is unfinished. Files are
        read into memory, which takes their size until the end of the call.

        Args:
            weights: Tensors on any device, by the names of `model.state_dict()`; one name suffices for tied weights.
                Or a file of safetensors, or a folder with some, in shared memory too (/dev/shm). Floating-point values
                are rounded to the weight's dtype.
            version: The number of these weights, 0 or more. None = one more than the last.
            partial: Whether some weights may be left out, which keep their values.
            recompute: Whether running requests drop their K/V, which the new weights compute again. False = they keep
                it, and the new weights read K/V of the former ones; they cache no further blocks.

        Returns:
            The number, which `weight_version` is now.

        Raises:
            ValueError: If they do not fit, or a file cannot be read. The model has its former weights.
            RankError: For a model on several ranks; use `pause` and `run_worker(on_pause=...)`.
            RuntimeError: Inside a step of this engine, and if it is closed.

        Example:
            ```python
            new = {name: weight.detach() * 1.01 for name, weight in model.named_parameters()}
            assert engine.update_weights(new) == engine.weight_version
            [output] = engine.generate([prompt], config)
            assert output.metrics.weight_versions == (engine.weight_version, engine.weight_version)
            ```
        """
        number = self.weight_version + 1 if version is None else version
        _check_version(number)
        # Before the pause, so that steps run while files are read.
        new = weights if isinstance(weights, NewWeights) else self.read_weights(weights, partial=partial)
        with self.pause(recompute=recompute):
            new.write()
            self._versions.add(number)
        return number

    def read_weights(
        self,
        weights: Mapping[str, torch.Tensor] | str | os.PathLike[str] | Iterator[IO[bytes]],
        *,
        partial: bool = False,
    ) -> NewWeights:
        """Read and check weights for `update_weights`, in any thread, while steps run: the longer part of it.

        Args:
            weights: As for `update_weights`; or an iterator of open files of safetensors, each of which is closed.
            partial: As for `update_weights`.

        Returns:
            The weights in memory, for one call of `update_weights`.

        Raises:
            ValueError: As for `update_weights`.
            RankError: As for `update_weights`.
        """
        self._refuse_ranks("update_weights: each rank has a part of them; use pause() and run_worker(on_pause=...)")
        if isinstance(weights, Mapping):
            return NewWeights(self._model, weights, partial=partial)
        files = weights if isinstance(weights, Iterator) else open_files(files_of(Path(weights)))
        return NewWeights.read(self._model, files, partial=partial)


def _check_version(number: int) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError(f"version={number!r}: give an integer of at least 0")
