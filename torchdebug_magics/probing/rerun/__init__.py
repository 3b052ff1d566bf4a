"""A training step, run again exactly as it was, watched by whoever asks, and undone: record -> cut -> start -> run -> undo.

- **record**: `StepRecorder` (`step_recorder`) keeps, at the first model call of each step, what its start was: the arguments, the buffers,
  random states, mutable Python state and the variables that the step overwrites; `step.Step` is that record. It
  is dropped after ``backward()``, so that it pins nothing.
- **cut**: `step_slice` finds the user's statements from the model call to the sink (``backward()`` or ``grad()``) in their source;
  `step_statements` and `runnable_code` make them code that runs once more.
- **start** and **undo**: `replay_state.ReplayState` puts everything as it was at the step's start, and as it is now again, whatever
  interrupts come.
- **run**: `step_rerun.StepRerun` executes that code under an `attempt.Observer`, feeds each model call what it was
  given, sends nothing to other ranks (`unsent_collectives`), stops right after the sink, and says in a `Replayed` whether
  the loss was the same to the last bit.

How an instrument uses it::

    class Watch(Observer):                      # modes, hooks: whatever is to be seen in one rerun
        def attach(self, stack): enter(stack, OpListener(self._record, hooks))

    hooks, guard = Hooks(), Guard()
    recorder = StepRecorder(hooks, guard, done=lambda entry, output: None)
    rerun = StepRerun(recorder, observe=Watch)

    recorder.attach(stack)                      # in Probe.attach, on the session's stack
    hooks.autograd_calls(stack, "backward", around)
    hooks.optimizer_steps(stack, before_update, after_update)

    def around(original, *args, **kwargs):      # in place of torch.autograd.backward (and .grad)
        tensors = tuple(tensors_in(args[0]))
        if rerun.active:                        # a call of the replayed code itself
            return rerun.sink_call(original, tensors, *args, **kwargs)
        result = original(*args, **kwargs)
        step = recorder.step
        step.backwards += 1
        if something_is_wrong:
            leaves = {id(leaf): leaf for leaf in leaves_of(tensors)}
            attempt = Attempt(tensors, max(1, step.backwards), leaves)
            replayed = rerun.statements(step, frame_chain(sys._getframe()), attempt)  # raises CannotReplay, with the reason
            replayed.observer, replayed.reproduced, replayed.finished, replayed.losses, replayed.gradients
        step.closed = True                      # the next model call begins a new step
        recorder.mark()
        return result

    def before_update(optimizer, args, kwargs):
        if rerun.active:
            rerun.update_call()                 # ends the rerun: no update ever happens in one

    rerun.recover()                             # in Probe.sweep, before hooks.sweep(recorder.modules())

`StepRerun.modules` runs only the recorded model calls, `StepRerun.call` any function.
Everything that the rerun changed is as it was when these return or raise, gradients included.
"""
