"""A training step, run again exactly as it was, watched by whoever asks, and undone: record -> cut -> start -> run -> undo.

- **record**: `StepRecorder` (`step_recorder`) keeps, at the first model call of each step, what its start was: the arguments, the buffers,
  random states, mutable Python state and the variables that the step overwrites; `step.Step` is that record. It
  is dropped after ``backward()``, so that it pins nothing.
- **cut**: `step_slice` finds the user's statements from the model call to the sink (``backward()`` or ``grad()``) in their source, and
  makes them code that runs once more.
- **start** and **undo**: `step_rerun.ReplayState` puts everything as it was at the step's start, and as it is now again, whatever
  interrupts come.
- **run**: `step_rerun.StepRerun` executes that code under a `Trace`, feeds each model call what it was
  given, sends nothing to other ranks (`unsent_collectives`), stops right after the sink, and says in a `Replayed` whether
  the loss was the same to the last bit, or why nothing was run.

`StepRerun.modules` runs only the recorded model calls, `StepRerun.call` any function.
Everything that the rerun changed is as it was when these return or raise, gradients included.
"""
