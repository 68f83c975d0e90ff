"""`python -m headstart` and `torchrun -m headstart`: the same command line as `headstart`."""

from .cli import main

if __name__ == "__main__":
    main()
