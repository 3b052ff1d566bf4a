"""An error of a `DataLoader` worker, of which this process has the text alone, raised once more where its frames and values can be read."""

from __future__ import annotations

import re
import time
import traceback
from typing import Any

from torch.utils.data import _DatasetKind
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from torchdebug_magics.probing.outside.effects import Effects, Irrevocable
from torchdebug_magics.probing.safety import Guard, interrupts_held, quiet
from torchdebug_magics.probing.state.read_once import is_read_once
from torchdebug_magics.probing.state.snapshot import KeptState

_CAUGHT = re.compile(r"Caught (\w+) in DataLoader worker process \d+\.\nOriginal Traceback")
_MOST_S = 5.0
"""Of reading batches; an error that takes longer to come again stays what its text says."""


def raised_here(error: BaseException) -> Exception | None:
    """The same error, raised by reading the loader's batches in this process; None for any other error, and where it does not come again.

    What reading them changes is put back.
    """
    caught = _CAUGHT.match(str(error))
    frames = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    iterator: Any = next((value for value in frames if isinstance(value, _MultiProcessingDataLoaderIter)), None)
    if caught is None or iterator is None or is_read_once([iterator._dataset, iterator._collate_fn]):
        return None
    guard = Guard()
    roots = iterator._dataset, iterator._collate_fn, iterator._index_sampler
    effects = Effects(guard, *roots, sentence="{} cannot be undone")
    kept = KeptState(roots, guard, effects)
    try:
        with effects.trial(), quiet():
            again = _read_until_error(iterator)
    except Irrevocable:
        return None
    finally:
        with interrupts_held():
            kept.put_back()
            effects.finish()
    return again if type(again).__name__ == caught[1] else None


def _read_until_error(iterator: Any) -> Exception | None:
    given = iterator._dataset_kind, iterator._dataset, iterator._auto_collation, iterator._collate_fn, iterator._drop_last
    until_s = time.monotonic() + _MOST_S
    try:
        fetcher = _DatasetKind.create_fetcher(*given)
        for indices in iterator._index_sampler:
            fetcher.fetch(indices)
            if time.monotonic() > until_s:
                break
    except Exception as error:  # noqa: BLE001 - whatever reading a sample raises is the answer
        return error
    return None
