"""Writes the bytecode of what tests and kernels import, in an environment that pip has installed without any.

Every kernel and every process that a test starts imports torch, which takes more than twice the time without bytecode; to compile all that
is installed takes longer than to compile what is imported. ``PYTHONDONTWRITEBYTECODE`` forbids tests, not this, to write it.
"""

from __future__ import annotations

import contextlib
import importlib
import sys

NAMES = (
    "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.multiprocessing", "torch.optim.adamw",
    "torch.profiler", "torch.utils.checkpoint", "torch.utils.data", "torch.utils.flop_counter",
    "transformers.models.bert.modeling_bert", "transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama",
    "transformers.models.t5.modeling_t5", "accelerate", "lightning",
    "IPython", "ipykernel.kernelapp", "ipywidgets", "matplotlib.pyplot", "matplotlib.backends.backend_agg", "psutil", "pynvml",
    "matplotlib_inline.backend_inline", "jupyter_client.manager", "jupyterlab.labapp", "nbclient", "nbconvert",
    "pip._internal.cli.main", "playwright.sync_api", "pytest", "pytest_timeout", "xdist.remote", "xdist.plugin", "hatchling.build",
)  # fmt: skip

sys.dont_write_bytecode = False
for name in NAMES:
    with contextlib.suppress(ImportError):  # the Colab-like stack holds less
        importlib.import_module(name)
