"""The `thruway` command."""

import sys

from thruway._thruway import run_command


def main() -> None:
    """Runs the command line of this process."""
    sys.exit(run_command(["thruway", *sys.argv[1:]], [sys.executable, "-m", "thruway"]))


if __name__ == "__main__":
    main()
