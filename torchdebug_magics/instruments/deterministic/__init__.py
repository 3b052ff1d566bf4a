"""``%%deterministic``: the same numbers twice, or the op that differs and why."""

from torchdebug_magics.instrument import Instrument, Option

__all__ = ["INSTRUMENT"]
INSTRUMENT = Instrument(
    name="deterministic",
    module=__name__,
    summary="the same numbers twice: seeds and flags set for the cell, restored after it; --verify names what the numbers depend on",
    description="""Seed every generator, make PyTorch deterministic, and restore everything when the cell ends.

Seeded: Python, NumPy's global generator, torch on every device, and each generator reachable from your variables, with its own seed.
Set: deterministic algorithms of PyTorch and cuDNN, no TF32, attention with a deterministic backward, PYTHONHASHSEED for child processes.
DataLoader workers draw their seeds from torch's generator, so they follow; `np.random.default_rng()` inside a worker does not.
The report names settings that need a restart of the kernel. CUDA is never initialized.

    %%deterministic --seed 7        above a cell: for this cell alone
    %%deterministic --verify        rerun it, changing one thing at a time, and name what its numbers depend on
    %%deterministic --verify --quick            ... with the same seeds and with different seeds only
    %%deterministic --save run.json             write a fingerprint of each op's result
    %%deterministic --against run.json          ... and compare a later run with it, bit by bit or to within --rtol
    %deterministic --seed 7         for all cells from now on
    %deterministic off              ... until here
    %deterministic status           every random number generator with its seed and state
    %%deterministic --strict        an op without a deterministic implementation raises PyTorch's own error at your line
    %%deterministic --keep-rng      generators continue from where the cell left them
    torchdebug_magics.verify(function)          --verify of a function, in a script or a test

If the cell changes one of these settings itself, it is restored too, and the report says so; other settings stay as the cell leaves them.
--verify reruns the cell from the same start: with the same seeds, with different seeds, twice without these settings if an op depends on
them, with files and completed work in another order; then once more from where the first run ended. `depends_on` lists what changes the
results, with its line, the most serious first: a draw from an unseeded generator, a sum in a varying order, weights or a list that this
run changes for the next one (`carried`).

Ranks that the cell launches are all seeded alike and compared with one another: whether they draw the same batch, start with the same
weights, and stay equal. Digests of their weights are compared after each of the first steps and then at growing intervals, or, with
--ranks, after every step. --verify, --save and --against cover the launching process only.

The magic adds no cost to that of PyTorch's own flags, which may double the time of a training step. --verify takes the time of two or
more runs and records every op; an interrupt ends them, and the report keeps what was found. With -o NAME, a fingerprint of each op's
result is kept for a later --against.""",
    options=(
        Option("--seed", "an integer from 0 to 4294967295 (default 42)", {"type": int, "default": 42, "metavar": "N"}),
        Option("--strict", "raise instead of warning where PyTorch has no deterministic implementation", {"action": "store_true"}),
        Option("--keep-rng", "do not restore the random number generators", {"action": "store_true"}),
        Option("--verify", "rerun the cell, changing one thing at a time, and name what its numbers depend on", {"action": "store_true"}),
        Option("--quick", "with --verify: only the second run and the runs with different seeds", {"action": "store_true"}),
        Option(
            "--anyway", "with --verify: rerun the cell even if it does what cannot be undone, such as a request", {"action": "store_true"}
        ),
        Option("--against", "compare with an earlier report, given by its name or file", {"metavar": "NAME"}),
        Option("--save", "write a fingerprint of each op's result to a file for a later --against", {"metavar": "PATH"}),
        Option("--rtol", "relative tolerance of the comparison (default: bit by bit)", {"type": float, "metavar": "R"}),
        Option("--ranks", "in ranks that the cell launches: compare replicas after every optimizer step", {"action": "store_true"}),
    ),
    subjects='"status"',
    lasting="line",
)
