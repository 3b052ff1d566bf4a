"""Who holds a storage: paths from named roots, such as ``losses[0].grad_fn -> PowBackward0.saved_self``."""

from torchdebug_magics.probing.holders.cycles import Cycles, cycles_of, waiting_cycles
from torchdebug_magics.probing.holders.found import Held, History, Holding, find_holders, histories
from torchdebug_magics.probing.holders.paths import NOWHERE, HolderPath, Owner
from torchdebug_magics.probing.holders.python_weights import PlainCollection, plain_collections
from torchdebug_magics.probing.holders.tensor_holders import addresses_of

__all__ = [
    "NOWHERE", "Cycles", "Held", "History", "HolderPath", "Holding", "Owner", "PlainCollection", "addresses_of", "cycles_of",
    "find_holders", "histories", "plain_collections", "waiting_cycles",
]  # fmt: skip
