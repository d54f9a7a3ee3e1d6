"""`python -m phalanx` is the same program as `phalanx`."""

from phalanx.cli.main import main

if __name__ == "__main__":
    main()
