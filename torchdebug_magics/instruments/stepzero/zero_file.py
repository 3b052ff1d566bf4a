"""Step zero in a file, as tensors and plain values: reading it runs no code."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch

from torchdebug_magics.errors import TorchDebugError
from torchdebug_magics.instruments.stepzero.zero_state import ZeroState
from torchdebug_magics.probing.rng import RandomState

__all__ = ["read", "write"]

_TENSOR = "$tensor"


def write(zero: ZeroState, path: Path) -> None:
    """All at once: a reader finds the old file or the new one."""
    tensors: dict[str, torch.Tensor] = {}
    plain = _plain(_as_dict(zero), tensors)
    part = path.with_name(f"{path.name}.part")
    if path.suffix == ".safetensors":
        _safetensors().save_file(tensors, part, metadata={"stepzero": json.dumps(plain)})
    else:
        torch.save({"stepzero": json.dumps(plain), "tensors": tensors}, part)
    part.replace(path)


def read(path: Path) -> ZeroState:
    """What `write` wrote; a `TorchDebugError` for any other file."""
    try:
        text, tensors = _safe(path) if path.suffix == ".safetensors" else _pickled(path)
        return _state(_filled(json.loads(text), tensors))
    except TorchDebugError:
        raise
    except Exception as error:  # noqa: BLE001 - a file of any other kind may raise anything
        first = next(iter(str(error).splitlines()), "")
        msg = f"{path} holds no step zero: {type(error).__name__}{f': {first[:120]}' if first else ''}"
        raise TorchDebugError(msg) from None


def _state(found: dict[str, Any]) -> ZeroState:
    random = found["random"]
    numpy = random["numpy"]
    return ZeroState(
        tensors=found["tensors"],
        frozen=tuple(found["frozen"]),
        optimizers=tuple(found["optimizers"]),
        random=RandomState(
            python=_tuples(random["python"]),
            numpy=None if numpy is None else (numpy[0], numpy[1].numpy().astype("uint32"), *numpy[2:]),
            cpu=random["cpu"],
            cuda=tuple(random["cuda"]),
            xpu=tuple(random["xpu"]),
            mps=random["mps"],
        ),
        digests=found["digests"],
        steps=found["steps"],
    )


def _as_dict(zero: ZeroState) -> dict[str, Any]:
    random = zero.random
    numpy = None
    if random.numpy is not None:
        name, words, *rest = random.numpy
        numpy = [name, torch.as_tensor(words.astype("int64")), *rest]
    return {
        "tensors": zero.tensors,
        "frozen": list(zero.frozen),
        "optimizers": list(zero.optimizers),
        "random": {
            "python": random.python,
            "numpy": numpy,
            "cpu": random.cpu,
            "cuda": list(random.cuda),
            "xpu": list(random.xpu),
            "mps": random.mps,
        },
        "digests": dict(zero.digests),
        "steps": zero.steps,
    }


def _plain(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """As JSON has it; tensors are put aside by number, and dicts are lists of pairs, as their keys may be numbers."""
    if isinstance(value, torch.Tensor):
        tensors[str(len(tensors))] = value.detach().cpu().clone().contiguous()
        return {_TENSOR: str(len(tensors) - 1)}
    if isinstance(value, dict) or hasattr(value, "items"):
        return {"pairs": [[_plain(key, tensors), _plain(item, tensors)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return [_plain(item, tensors) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    msg = f"a {type(value).__name__} in the optimizer's state cannot be written to a file"
    raise TorchDebugError(msg)


def _filled(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, dict):
        if _TENSOR in value:
            return tensors[value[_TENSOR]]
        return {_filled(key, tensors): _filled(item, tensors) for key, item in value["pairs"]}
    return [_filled(item, tensors) for item in value] if isinstance(value, list) else value


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _pickled(path: Path) -> tuple[str, dict[str, torch.Tensor]]:
    held = torch.load(path, map_location="cpu", weights_only=True)
    return held["stepzero"], held["tensors"]


def _safe(path: Path) -> tuple[str, dict[str, torch.Tensor]]:
    _safetensors()
    library: Any = importlib.import_module("safetensors")
    with library.safe_open(path, "pt") as opened:
        return opened.metadata()["stepzero"], {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping


def _safetensors() -> Any:
    if importlib.util.find_spec("safetensors") is None:
        msg = "safetensors is not installed: install it, or name the file *.pt"
        raise TorchDebugError(msg)
    return importlib.import_module("safetensors.torch")
