"""`python -m workbench` is the same program as the `workbench` console script."""

import sys

from workbench.cli import run_process

if __name__ == "__main__":
    sys.exit(run_process())
