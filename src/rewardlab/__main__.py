"""`python -m rewardlab`."""

import sys


def _run() -> None:
    # Python puts the current folder first on the import path of every `-m`, where a file such as `random.py` shadows a
    # module. It goes before anything else is imported; the processes that rewardlab starts never have it (`-P`).
    if not sys.flags.safe_path:
        del sys.path[0]
    from rewardlab.cli import main

    main()


_run()
