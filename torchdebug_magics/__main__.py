"""The package as a command: ``python -m torchdebug_magics run nanhunt train.py``."""

import sys

from torchdebug_magics.run.command import main

if __name__ == "__main__":
    main(sys.argv[1:])
