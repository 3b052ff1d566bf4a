"""What a look from another thread tells of the main thread: progress, loops, backward passes, tracers."""
