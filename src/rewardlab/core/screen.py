"""Text with colours and tables on the terminal, by rich."""

from __future__ import annotations

from rich.console import Console


class Screen(Console):
    """A console whose reader may leave: rich would end the program with exit status 1, which means something else."""

    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError that rich has caught. The command line ends by it as everywhere."""
        raise
