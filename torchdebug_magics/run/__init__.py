"""Any script under an instrument, in one process or in each rank: command -> meeting.

``torchrun --nproc-per-node 2 -m torchdebug_magics run nanhunt train.py`` prints one report. The script runs as ``python train.py`` would
run it: its session opens when it imports torch, and what it raises ends it as ever.
"""
