"""``%%deterministic``: the same numbers twice, or the op that differs and why."""

from torchdebug_magics.instrument import Instrument, Option

__all__ = ["INSTRUMENT"]

_HERE = __name__

INSTRUMENT = Instrument(
    name="deterministic",
    summary="the same numbers twice: all seeds and flags set for the cell and put back after it; --verify names what the numbers depend on",
    description="""Seed everything, tell torch to be deterministic, and put all of it back when the cell ends.

Seeded: Python, NumPy's global generator, torch on every device, and each generator that your names lead to, with a seed of its own. Set:
torch's deterministic algorithms and cuDNN's, no TF32, attention whose backward is deterministic, PYTHONHASHSEED for child processes.
Workers of a DataLoader draw their seeds from torch's, so that they follow; `np.random.default_rng()` inside a worker does not.
What is too late in a running process is said. CUDA is never started.

    %%deterministic --seed 7        above a cell: for this cell alone
    %%deterministic --verify        run it again changing one thing at a time, and name what its numbers depend on
    %%deterministic --verify --quick            ... with the same seeds and with other seeds only
    %%deterministic --save run.json             write down what each op gave
    %%deterministic --against run.json          ... and compare a later run with it, to the last bit or to within --rtol
    %deterministic --seed 7         from now on, over all cells
    %deterministic off              ... until here
    %deterministic status           every source of random numbers, and the state that it is in
    %%deterministic --strict        an op without a deterministic implementation raises torch's own error, at your line
    %%deterministic --keep-rng      afterwards the generators go on from where the cell left them
    torchdebug_magics.verify(function)          --verify of a function, in a script or a test

One of these settings that the cell changes itself is put back, too, and the report says so; any other stays as the cell leaves it.
--verify runs the cell again from the same start: with the same seeds, with other seeds, twice without these settings where an op asks for
them, with files and finished work in another order; then once more from where the first run ended. What moves the results is named with
its line, worst first, in `depends_on`: an op that draws from a generator that nothing seeded, a sum in another order, the weights or the
list that the next run finds changed (`carried`).

Ranks that the cell launches are each seeded alike, and held against one another: whether they draw the same batch, begin with the same
weights, and keep them. Their weights are compared by digest after each of the first steps, then ever more rarely, or, with --ranks, after
each. --against compares a rank with the same rank of an earlier run. --verify, --cost and --save look at the launching process only.

Nothing is added to the cost of torch's own flags; those may double the time of a training step. --verify takes the time of two runs or
more, and looks at every op; an interrupt ends them, and the report keeps what was found. With -o NAME, what each op gave is written
down, for a later --against.""",
    options=(
        Option("--seed", "a whole number from 0 to 4294967295 (default 42)", {"type": int, "default": 42, "metavar": "N"}),
        Option("--strict", "raise where torch has no deterministic implementation, instead of warning", {"action": "store_true"}),
        Option("--keep-rng", "do not put the generators of random numbers back", {"action": "store_true"}),
        Option(
            "--verify",
            "run the cell again, changing one thing at a time, and name what its numbers depend on",
            {"action": "store_true"},
        ),
        Option("--quick", "with --verify: no runs but the second one and those with other seeds", {"action": "store_true"}),
        Option("--against", "compare with a report that was kept before, by its name or file", {"metavar": "NAME"}),
        Option("--save", "write what each op gave to a file, for a later --against", {"metavar": "PATH"}),
        Option(
            "--rtol",
            "how far numbers may be apart, relative to the larger (default: every bit is compared)",
            {"type": float, "metavar": "R"},
        ),
        Option("--ranks", "in ranks that the cell launches: compare replicas after every step of the optimizer", {"action": "store_true"}),
        Option("--cost", "measure how much slower the cell is, and by which setting", {"action": "store_true"}),
    ),
    probe=f"{_HERE}.probe:DeterministicProbe",
    view=f"{_HERE}.view:page",
    over_ranks=f"{_HERE}.over_ranks:compared",
    lasting=True,
    line_lasts=True,
    runs_again=True,
    knows_output=True,
    after_cell=f"{_HERE}.view:after_cell",
    words={"status": f"{_HERE}.ritual.status:status"},
)
