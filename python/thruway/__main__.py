"""The `thruway` command."""

import sys

from thruway._thruway import run_command


def main() -> None:
    """Runs the command line of this process."""
    if sys.argv[1:2] == ["convert"]:
        # The one command that needs torch, whose files it reads.
        from thruway.torch import _convert

        sys.exit(_convert.main(sys.argv[2:]))
    sys.exit(run_command(["thruway", *sys.argv[1:]], [sys.executable, "-m", "thruway"]))


if __name__ == "__main__":
    main()
