"""`python -m rewardlab`."""

from rewardlab.cli import main

main()
