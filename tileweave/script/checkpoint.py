"""Checkpoints: one safetensors file with all that a training script needs to go on exactly where it was.

    model.*            the model's state_dict              optimizer.{index}.*   the optimizer's tensors
    rng.torch          torch's CPU generator               metadata["tileweave"] JSON: step, position, the optimizer's
                                                           numbers, the generators of `random` and NumPy

The idea: the file is complete before it has its name (temporary name, fsync, rename, fsync of the folder), so that an
interruption at any byte leaves the previous one in use; and it is only ever read back with the SHA-256 that the job's
store recorded. What cannot be read is an error, never a fresh start. No pickle. Plain torch reads it:
`{k[6:]: v for k, v in safetensors.torch.load_file(path).items() if k.startswith("model.")}`.
Left out: sharding, and writing in the background.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

FORMAT = 1
METADATA_KEY = "tileweave"
SUFFIX = ".safetensors"


class CheckpointError(RuntimeError):
    """A checkpoint is missing, damaged, or of another model; the message says which and what to do."""


@dataclass(slots=True)
class TrainState:
    """What a checkpoint holds besides the generators. `position` is the script's own place in its data (which batch is
    next, say): the script moves it, and finds it again after a resume."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    position: int = 0


@dataclass(frozen=True, slots=True)
class Written:
    """A complete checkpoint file: `size` bytes with this SHA-256 (hexadecimal)."""

    path: Path
    sha256: str
    size: int


def checkpoint_name(step: int, epoch: int) -> str:
    """File name. The epoch is part of it: a replayed step never writes over a file that the store has recorded."""
    return f"step-{step:08d}.epoch-{epoch}{SUFFIX}"


def write_checkpoint(path: Path, step: int, state: TrainState) -> Written:
    """Writes the state after `step` steps to `path`, atomically. Raises OSError or SafetensorError (no room, say), and
    then leaves nothing at `path`."""
    tensors, optimizer = _tensors(state)
    version, words, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    about = {
        "format": FORMAT,
        "step": step,
        "position": state.position,
        "optimizer": optimizer,
        "python_rng": [version, list(words), gauss],
        "numpy_rng": _jsonable(numpy_state),
    }
    temporary = path.with_suffix(".tmp")
    try:
        save_file(tensors, temporary, metadata={METADATA_KEY: json.dumps(about)})
        with temporary.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
            size = os.fstat(file.fileno()).st_size
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return Written(path, sha256, size)


def read_checkpoint(path: Path, sha256: str | None, state: TrainState) -> int:
    """Loads `path` into the state and the generators; the number of steps done.

    `sha256` is what the job's store recorded (None: not checked). Raises CheckpointError, and then has changed nothing
    unless the file turns out to be of another model."""
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 is not None and found != sha256:
            raise CheckpointError(
                f"checkpoint {path} is damaged: its SHA-256 is {found}, recorded was {sha256}; "
                "restore the file from a backup, or submit the job anew"
            )
        with safe_open(path, framework="pt") as opened:
            about = json.loads((opened.metadata() or {})[METADATA_KEY])
            tensors: dict[str, Tensor] = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        if about["format"] != FORMAT:
            raise CheckpointError(f"checkpoint {path} has format {about['format']}; this version reads {FORMAT}")
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {path} cannot be read ({type(error).__name__}: {error}); "
            "restore the file from a backup, or submit the job anew"
        ) from error
    try:
        _restore(state, tensors, about)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint {path} does not fit this script's model or optimizer: {error}") from error
    return int(about["step"])


def remove_others(folder: Path, keep: set[Path]) -> None:
    """Deletes every checkpoint, finished or not, in `folder` except those to keep."""
    for path in folder.iterdir():
        if path.suffix in (SUFFIX, ".tmp") and path not in keep:
            path.unlink()


def _tensors(state: TrainState) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All tensors by their name in the file, and what the optimizer holds besides tensors."""
    named = {f"model.{name}": tensor for name, tensor in state.model.state_dict().items()}
    optimizer = state.optimizer.state_dict()
    numbers: dict[str, dict[str, Any]] = {}
    for index, slots in optimizer["state"].items():
        for name, value in slots.items():
            if isinstance(value, Tensor):
                named[f"optimizer.{index}.{name}"] = value
            else:
                numbers.setdefault(str(index), {})[name] = value
    named["rng.torch"] = torch.get_rng_state()
    seen: set[int] = set()
    tensors: dict[str, Tensor] = {}
    for name, value in named.items():
        tensor = value.detach()
        memory = tensor.untyped_storage()
        whole = tensor.is_contiguous() and memory.nbytes() == tensor.nbytes and memory.data_ptr() not in seen
        tensors[name] = tensor if whole else tensor.clone(memory_format=torch.contiguous_format)  # tied weights, views
        seen.add(memory.data_ptr())
    return tensors, {"numbers": numbers, "groups": optimizer["param_groups"]}


def _restore(state: TrainState, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    state.model.load_state_dict({k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")})
    slots: dict[int, dict[str, Any]] = {int(i): dict(values) for i, values in about["optimizer"]["numbers"].items()}
    for key, value in tensors.items():
        if key.startswith("optimizer."):
            _, index, name = key.split(".", 2)
            slots.setdefault(int(index), {})[name] = value.clone()  # not memory of the file
    groups = about["optimizer"]["groups"]
    for group, live in zip(groups, state.optimizer.param_groups, strict=True):
        group.update({key: tuple(group[key]) for key, value in live.items() if isinstance(value, tuple)})
    state.optimizer.load_state_dict({"state": slots, "param_groups": groups})
    state.position = about["position"]
    version, words, gauss = about["python_rng"]
    random.setstate((version, tuple(words), gauss))
    numpy_rng = about["numpy_rng"]
    numpy_rng["state"]["key"] = np.array(numpy_rng["state"]["key"], dtype=np.uint32)
    np.random.set_state(numpy_rng)
    torch.set_rng_state(tensors["rng.torch"])


def _jsonable(state: Any) -> Any:
    """NumPy's generator state with its array as a list."""
    return {**state, "state": {**state["state"], "key": state["state"]["key"].tolist()}}
